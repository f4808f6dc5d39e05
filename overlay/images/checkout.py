"""The project's own state in git, for an image's labels."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path

from overlay.errors import ExportError, GitError
from overlay.images.labels import Source
from overlay.patches.checkout import git_folders
from overlay.trees.git import Git

UNKNOWN = Source(commit="", is_dirty=True, created="")
_OURS = ("images", "overlay", "patches")


def project_source(root: Path) -> Source:
    """Commit of the checkout at ``root``, its time, and whether anything of ours differs from it.

    Outside of a repository nothing is known.
    """
    try:
        folder, _ = git_folders(root)
        with tempfile.TemporaryDirectory(prefix="vllm-overlay-source-") as scratch:
            here = Path(scratch, "git")
            here.mkdir()
            git = Git(here)
            env = {"GIT_DIR": str(folder), "GIT_WORK_TREE": str(root)}
            head = git.run("log", "-1", "--format=%H %ct", env=env).decode().split()
            # No lock on the index: somebody may be committing
            asked = ("--no-optional-locks", "status", "--porcelain", "--no-renames")
            changed = git.run(*asked, "--", *_OURS, env=env)
    except (ExportError, GitError):
        return UNKNOWN
    created = datetime.fromtimestamp(int(head[1]), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Source(commit=head[0], is_dirty=bool(changed.strip()), created=created)

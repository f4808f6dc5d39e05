"""Begin a line from another one, or a patch from a diff or a mail.

The usual way to write a patch is checkout, commit, export; this is for a change that exists as
a file already.
"""

from __future__ import annotations

import email.utils
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import LineError, MachineError, PatchError
from overlay.files import machine_errors, write_atomic
from overlay.lines.line import CODENAME, LINE_FILE, SERIES_FILE, UPSTREAMS, read_line
from overlay.patches.commits import NAME_LINE, format_mails
from overlay.patches.patch import (
    NAME,
    NAME_TRAILER,
    SUFFIX,
    TEMPLATES,
    message_faults,
    parse_patch,
)
from overlay.patches.series import extend
from overlay.trees.apply import Applied, apply_series, refuse_bad

if TYPE_CHECKING:
    from overlay.lines.line import Line, Upstream
    from overlay.trees.store import Commit, Store

_IDENTITY = re.compile(r"(.+) <([^<>]+)> (\d+) ([+-]\d{4})\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPatch:
    """A patch that was appended to a series.

    Attributes:
        path: of the file.
        applied: its verdict and effects at the end of the series.
        is_template: the message is a template, to be completed by rewording.
    """

    path: Path
    applied: Applied
    is_template: bool


def new_line(root: Path, name: str, *, like: str) -> Path:
    """Make line ``name``: the ``line.toml`` of ``like`` with its comments, and empty series.

    Args:
        root: the ``patches`` folder.
        name: codename, lower-case letters and digits.
        like: an existing line.

    Returns:
        The new folder. It appears complete or not at all; there is no lock in it yet.

    Raises:
        LineError: a bad name, one that is taken, or no such line to start from.
    """
    if not CODENAME.match(name):
        raise LineError(
            f"{name!r} is no codename", fix="use lower-case letters and digits, a letter first"
        )
    template = read_line(root, like)
    folder = root / name
    if folder.exists():
        raise LineError(f"{root.name}/{name} exists already", fix="choose another name")
    new = root / f".new-{name}"
    with machine_errors(root, is_cache=False):
        shutil.rmtree(new, ignore_errors=True)  # of a killed run
        try:
            new.mkdir()
            shutil.copyfile(template.folder / LINE_FILE, new / LINE_FILE)
            for upstream in UPSTREAMS:
                (new / upstream).mkdir()
                heading = f"# {upstream} {template.pin(upstream).version}.\n"
                write_atomic(new / upstream / SERIES_FILE, heading.encode())
            new.rename(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    return folder


def new_patch(
    line: Line,
    upstream: Upstream,
    name: str,
    raw: bytes,
    store: Store,
    base: Commit,
    *,
    subject: str = "",
    identity: str = "",
) -> NewPatch:
    """Append a diff or a mail to a series as a patch in canonical form.

    Args:
        line: as its folder says it now.
        upstream: whose series.
        name: of the new patch.
        raw: ``git diff`` output, or one mail of ``git format-patch``.
        store: holds ``base``.
        base: the line's base tree.
        subject: for a plain diff; without it a template.
        identity: ``Name <mail> <seconds> <+hhmm>``, for a plain diff; else the user's own.

    Raises:
        LineError: the name is malformed or taken.
        PatchError: ``raw`` can't be read, or its message can't be carried.
        ApplyError: the series or the new patch has a bad verdict. Nothing was written.
    """
    name = name.removesuffix(SUFFIX)
    _check_name(line, upstream, name)
    is_mail = raw.startswith((b"From ", b"From: "))
    if not is_mail:
        raw = _mail(raw, name, subject, identity or _user())
    patch = parse_patch(raw, name=name)
    faults = list(message_faults(patch))
    if any(NAME_LINE.match(text) for text in patch.body.split("\n")):
        faults.append(f"'{NAME_TRAILER}:' is in the message; the name is an argument here")
    if faults:
        raise PatchError(f"{name}: {faults[0]}", why="\n".join(faults[1:]), fix="edit the message")
    old = line.series[upstream]
    patched = apply_series(store, base, [*old, patch])
    refuse_bad(patched, line.name, upstream)
    commits = [applied.commit for applied in patched.patches]
    before = commits[-2] if old else base.commit
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-new-") as scratch:
        (mail,) = format_mails(store.git, before, commits[-1], 1, Path(scratch))
    extend(line, upstream, {name: mail}, store, base, [p.tree for p in patched.patches])
    path = line.folder / upstream / f"{name}{SUFFIX}"
    return NewPatch(path=path, applied=patched.patches[-1], is_template=not is_mail)


def _check_name(line: Line, upstream: Upstream, name: str) -> None:
    if not NAME.match(name):
        raise LineError(
            f"{name!r} is no name of a patch",
            fix="use lower-case letters, digits, '-', '_' or '.', beginning with a letter",
        )
    if name in (patch.name for patch in line.series[upstream]):
        raise LineError(
            f"{line.name}'s {upstream} series has a patch {name} already",
            fix="choose another name, or change that patch in a checkout",
        )


def _mail(diff: bytes, name: str, subject: str, identity: str) -> bytes:
    """A mail around a plain diff; what stands before the diff is left out."""
    start = re.search(rb"^diff --git ", diff, re.MULTILINE)
    if start is None:
        raise PatchError(
            f"{name}: neither a mail nor a diff of git",
            why="no line starts with 'diff --git '",
            fix="write it with 'git diff --binary --full-index', or with git format-patch",
        )
    if diff[start.start() :].partition(b"\n")[0].endswith(b"\r"):
        raise PatchError(
            f"{name}: the diff has CRLF line ends",
            why="an editor, a download or git's autocrlf rewrote it",
            fix="write it again, with 'git diff --binary --full-index' into a file",
        )
    if not subject.isprintable():
        raise PatchError(f"{name}: the subject {subject!r} is not one line of text")
    match = _IDENTITY.match(identity)
    if match is None:
        raise PatchError(f"{name}: {identity!r} names no author", fix="say 'Name <mail>'")
    author, address, seconds, zone = match.groups()
    offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[3:])) * (-1 if zone[0] == "-" else 1)
    when = datetime.fromtimestamp(int(seconds), timezone(offset))
    head = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"
        f"From: {email.utils.formataddr((author, address))}\n"
        f"Date: {email.utils.format_datetime(when)}\n"
        f"Subject: [PATCH] {subject or TEMPLATES['subject']}\n\n"
        f"{TEMPLATES['reason']}\n\n"
        f"Upstream-Status: Pending\nRemove-When: {TEMPLATES['Remove-When']}\n\n"
    )
    return head.encode() + diff[start.start() :]


def _user() -> str:
    """The user as git knows them, and now; the one place where their configuration counts."""
    done = subprocess.run(
        ("git", "var", "GIT_AUTHOR_IDENT"),
        capture_output=True, check=False, env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    if done.returncode:
        raise MachineError(
            "git does not know who you are",
            why="\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:]),
            fix="run 'git config --global user.name ...' and 'user.email', or give --author",
        )
    return done.stdout.decode(errors="replace").strip()

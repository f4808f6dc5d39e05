"""No configuration, hook, attribute, variable, locale or folder of a user changes an id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.trees.git import MIN_GIT

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent

CONFIG = """
[core]
    autocrlf = true
    eol = crlf
    safecrlf = true
    hooksPath = {home}/hooks
    attributesFile = {home}/attributes
    fsmonitor = {home}/hooks/evil
    pager = {home}/hooks/evil
    editor = {home}/hooks/evil
    sshCommand = {home}/hooks/evil
    quotePath = false
    ignoreCase = true
    precomposeUnicode = true
    symlinks = false
    fileMode = false
    bigFileThreshold = 1
    compression = 0
    sharedRepository = world
    abbrev = 4
    alternateRefsCommand = {home}/hooks/evil
[user]
    name = Evil
    email = evil@example.invalid
    signingKey = evil
[commit]
    gpgSign = true
    template = {home}/attributes
[gpg]
    program = {home}/hooks/evil
[diff]
    noprefix = true
    external = {home}/hooks/evil
    algorithm = patience
    renames = false
[init]
    templateDir = {home}/template
    defaultObjectFormat = sha256
[i18n]
    commitEncoding = ISO-8859-1
    logOutputEncoding = ISO-8859-1
[apply]
    whitespace = fix
    ignoreWhitespace = change
[filter "evil"]
    clean = {home}/hooks/evil
    smudge = {home}/hooks/evil
    process = {home}/hooks/evil
    required = true
[alias]
    fast-import = !{home}/hooks/evil
    cat-file = !{home}/hooks/evil
[safe]
    directory =
    bareRepository = explicit
[fastimport]
    unpackLimit = 1
[transfer]
    hideRefs = refs
[extensions]
    objectFormat = sha256
[trace2]
    eventTarget = {home}/ran
[protocol]
    allow = never
"""


def run(cache: Path, env: dict[str, str], cwd: Path = ROOT) -> dict[str, Any]:
    done = subprocess.run(
        (sys.executable, "-m", "tests.support.child", str(cache)),
        capture_output=True, check=False, cwd=cwd,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    answer = run(tmp_path_factory.mktemp("cache"), {})
    assert "error" not in answer
    return answer


def make_home(home: Path) -> Path:
    """A home whose every program notes that it ran, and then fails."""
    for folder in ("hooks", "template/hooks", "template/info", "xdg/git"):
        (home / folder).mkdir(parents=True)
    evil = f"#!/bin/sh\necho $0 >>{home}/ran\nexit 1\n"
    hooks = ("evil", "reference-transaction", "post-index-change", "pre-commit", "post-commit")
    for name in hooks:
        for folder in ("hooks", "template/hooks"):
            (home / folder / name).write_text(evil)
            (home / folder / name).chmod(0o755)
    (home / "template" / "config").write_text("[core]\n\tautocrlf = true\n")
    attributes = "* text eol=crlf ident filter=evil working-tree-encoding=UTF-16 diff=evil\n"
    (home / "attributes").write_text(attributes)
    (home / "template" / "info" / "attributes").write_text(attributes)
    (home / "xdg" / "git" / "attributes").write_text(attributes)
    return home


def config(home: Path) -> dict[str, str]:
    (home / ".gitconfig").write_text("[include]\n\tpath = more\n")
    (home / "more").write_text(CONFIG.format(home=home))
    return {}


def xdg_config(home: Path) -> dict[str, str]:
    (home / "xdg" / "git" / "config").write_text(CONFIG.format(home=home))
    return {"XDG_CONFIG_HOME": str(home / "xdg")}


def config_variables(home: Path) -> dict[str, str]:
    (home / "config").write_text(CONFIG.format(home=home))
    return {
        "GIT_CONFIG": str(home / "config"),
        "GIT_CONFIG_GLOBAL": str(home / "config"),
        "GIT_CONFIG_SYSTEM": str(home / "config"),
        "GIT_CONFIG_NOSYSTEM": "0",
        "GIT_CONFIG_PARAMETERS": "'core.hooksPath'='" + str(home / "hooks") + "'",
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.hooksPath",
        "GIT_CONFIG_VALUE_0": str(home / "hooks"),
        "GIT_CONFIG_KEY_1": "core.autocrlf",
        "GIT_CONFIG_VALUE_1": "true",
    }


def place_variables(home: Path) -> dict[str, str]:
    subprocess.run(("git", "init", "--quiet", "--bare", str(home / "other.git")), check=True)
    return {
        "GIT_DIR": str(home / "other.git"),
        "GIT_COMMON_DIR": str(home / "other.git"),
        "GIT_WORK_TREE": str(home),
        "GIT_INDEX_FILE": str(home / "index"),
        "GIT_OBJECT_DIRECTORY": str(home / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(home / "other.git" / "objects"),
        "GIT_CEILING_DIRECTORIES": "/",
        "GIT_NAMESPACE": "evil",
        "GIT_PREFIX": "evil/",
        "GIT_SHALLOW_FILE": str(home / "attributes"),
        "GIT_GRAFT_FILE": str(home / "attributes"),
        "GIT_REPLACE_REF_BASE": "refs/heads/",
        "GIT_EXEC_PATH": str(home / "hooks"),
        "GIT_TEMPLATE_DIR": str(home / "template"),
        "GIT_QUARANTINE_PATH": str(home),
    }


def way_variables(home: Path) -> dict[str, str]:
    return {
        "GIT_AUTHOR_DATE": "1 +0000",
        "GIT_COMMITTER_DATE": "1 +0000",
        "GIT_AUTHOR_NAME": "Evil",
        "GIT_COMMITTER_EMAIL": "evil@example.invalid",
        "GIT_DEFAULT_HASH": "sha256",
        "GIT_EXTERNAL_DIFF": str(home / "hooks" / "evil"),
        "GIT_DIFF_OPTS": "-u1",
        "GIT_TRACE": "2",
        "GIT_TRACE_PACKET": "1",
        "GIT_TRACE2_EVENT": "2",
        "GIT_TRACE_CURL": "2",
        "GIT_PAGER": str(home / "hooks" / "evil"),
        "GIT_EDITOR": str(home / "hooks" / "evil"),
        "GIT_SSH_COMMAND": str(home / "hooks" / "evil"),
        "GIT_ATTR_SOURCE": "HEAD",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_ICASE_PATHSPECS": "1",
        "GIT_TEST_ASSUME_DIFFERENT_OWNER": "1",
        "GIT_PYTHON_TRACE": "full",
        "GIT_PYTHON_REFRESH": "raise",
        "GIT_PYTHON_GIT_EXECUTABLE": str(home / "hooks" / "evil"),
        "PAGER": str(home / "hooks" / "evil"),
    }


def locale(_: Path) -> dict[str, str]:
    return {"LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "de_DE", "LANG": "de_DE", "TZ": "Asia/Kathmandu"}


def plain_locale(_: Path) -> dict[str, str]:
    return {"LC_ALL": "C", "LANGUAGE": "tr", "TZ": "XYZ+11:30"}


HOSTILE = (
    config, xdg_config, config_variables, place_variables, way_variables, locale, plain_locale,
)  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_environment_changes_nothing(
    hostile: Callable[[Path], dict[str, str]], tmp_path: Path, expected: dict[str, Any]
) -> None:
    home = make_home(tmp_path / "home")
    answer = run(tmp_path / "cache", {"HOME": str(home), **hostile(home)})
    assert answer == expected
    assert not (home / "ran").exists(), (home / "ran").read_text()
    store = tmp_path / "cache" / "stores" / "vllm.git"
    assert not (store / "hooks").exists()
    assert not (store / "info").exists()


def test_the_hostile_home_is_hostile(tmp_path: Path) -> None:
    """Plain git fails in it; else the tests above would prove nothing."""
    home = make_home(tmp_path / "home")
    config(home)
    env = {"PATH": os.environ["PATH"], "HOME": str(home)}
    work = tmp_path / "work"
    subprocess.run(("git", "init", "-q", str(work)), check=False, env=env, capture_output=True)
    (work / "f").write_text("x\n")
    for arguments in (("add", "f"), ("commit", "-m", "x")):
        subprocess.run(("git", *arguments), check=False, env=env, cwd=work, capture_output=True)
    assert (home / "ran").exists()


def test_umask_changes_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    old = os.umask(0o077)
    try:
        assert run(tmp_path, {}) == expected
    finally:
        os.umask(old)


def test_a_folder_inside_another_repository_changes_nothing(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    home = make_home(tmp_path / "home")
    subprocess.run(("git", "init", "-q", str(tmp_path / "other")), check=True)
    (tmp_path / "other" / ".git" / "config").write_text(
        CONFIG.format(home=home) + "[core]\n\trepositoryFormatVersion = 9\n"
    )
    answer = run(tmp_path / "other" / "cache", {}, cwd=tmp_path / "other")
    assert answer == expected
    assert not (home / "ran").exists()


def test_replacements_in_the_store_change_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    assert run(tmp_path, {}) == expected
    git = ("git", "--git-dir", str(tmp_path / "stores" / "vllm.git"))
    other = subprocess.run(
        (*git, "hash-object", "-w", "--stdin"), input=b"evil\n", capture_output=True, check=True
    ).stdout.decode().strip()  # fmt: skip
    blob = subprocess.run(
        (*git, "rev-parse", "refs/overlay/base/child:dir/0"), capture_output=True, check=True
    ).stdout.decode().strip()  # fmt: skip
    subprocess.run((*git, "replace", blob, other), check=True)
    for state in (tmp_path / "states" / "vllm").iterdir():
        state.unlink()
    answer = run(tmp_path, {})
    assert answer["patches"] == expected["patches"]
    assert answer["cached"] == [False] * 4


def program(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "git").write_text(text)
    (folder / "git").chmod(0o755)
    return folder


@pytest.mark.parametrize("refresh", ["quiet", "raise"])
def test_missing_git(refresh: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    answer = run(
        tmp_path / "cache", {"PATH": str(tmp_path / "empty"), "GIT_PYTHON_REFRESH": refresh}
    )
    assert answer["error"] == "machine"
    assert "git is not installed" in answer["message"]


def test_old_git(tmp_path: Path) -> None:
    fake = program(tmp_path / "fake-old-git", "#!/bin/sh\necho git version 2.20.1\n")
    answer = run(tmp_path / "cache", {"PATH": str(fake)})
    assert answer["error"] == "machine"
    assert "git 2.20.1 is too old" in answer["message"]
    assert ".".join(map(str, MIN_GIT)) in answer["message"]


@pytest.mark.parametrize(
    "text",
    ["#!/bin/sh\necho nothing\n", "#!/bin/sh\nexit 1\n", "#!/missing\n", "no program"],
)
def test_a_git_that_is_none(text: str, tmp_path: Path) -> None:
    fake = program(tmp_path / "fake-git", text)
    assert run(tmp_path / "cache", {"PATH": str(fake)})["error"] == "machine"

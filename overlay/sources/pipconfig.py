"""Asks the machine's pip where it looks for packages, and how it gets there.

pip stays the one place where a user says this: environment, configuration files, find-links.
pip is asked for its configuration only, never to resolve or to download.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from overlay.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Weakest first. What a user wrote for one of pip's commands counts before what is global.
_SECTIONS = ("global", "install", "download", ":env:")
_LINE = re.compile(r"(global|install|download|:env:)\.([\w-]+)=(.+)")
_ALIASES = {"default-timeout": "timeout", "pypi-url": "index-url"}
_KEYS = frozenset(
    {
        "index-url", "extra-index-url", "find-links", "no-index", "trusted-host",
        "cert", "client-cert", "proxy", "timeout", "retries",
    }
)  # fmt: skip
# Only these variables of pip get to it: PIP_QUIET, PIP_PYTHON and the like could change or
# silence what it prints.
_VARIABLES = frozenset("PIP_" + key.replace("-", "_").upper() for key in (*_KEYS, *_ALIASES)) | {
    "PIP_CONFIG_FILE",
    "PIP_ISOLATED",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A package index or a find-links entry.

    Attributes:
        kind: ``index`` or ``find-links``.
        url: as configured, so with credentials if it has any; a path is allowed.
    """

    kind: str
    url: str

    @property
    def path(self) -> Path | None:
        """The file or folder, where the place is on this machine's disks."""
        if self.url.startswith("file:"):
            return Path(url2pathname(urlsplit(self.url).path))
        return None if "://" in self.url else Path(self.url).expanduser()

    @property
    def is_local(self) -> bool:
        """Whether it can be read without a network."""
        return self.path is not None

    def __str__(self) -> str:
        return f"{self.kind} {redacted(self.url)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipConfig:
    """What pip is configured with, as far as finding and downloading a file goes.

    ``index_urls`` is empty where pip's own default holds; ``timeout`` is in seconds.
    """

    index_urls: tuple[str, ...] = ()
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    trusted_hosts: tuple[str, ...] = ()
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    timeout: float = 15.0
    retries: int = 5

    def places(self, default_index: str) -> tuple[Place, ...]:
        """All places to ask, those on disk first; else in pip's order."""
        urls = () if self.no_index else (self.index_urls or (default_index,))
        extra = () if self.no_index else self.extra_index_urls
        found = [Place(kind="find-links", url=url) for url in self.find_links]
        found += [Place(kind="index", url=url) for url in (*urls, *extra)]
        return tuple(sorted(dict.fromkeys(found), key=lambda place: not place.is_local))


def redacted(url: str) -> str:
    """``url`` without its user name and password, also where it is malformed."""
    return re.sub(r"(?s)(?<=://).*@", "***@", url)


def read_pip_config() -> PipConfig:
    """Run ``pip config list`` and read its answer; about half a second, no network.

    Raises:
        MachineError: pip is missing or rejects its configuration.
    """
    # -P: else a folder called pip in the current one would be run.
    # -vvv: else `quiet` in a configuration file would leave nothing to read.
    argv = (sys.executable, "-P", "-W", "ignore", "-m", "pip", "--no-color", "-vvv")
    done = subprocess.run(
        (*argv, "config", "list"),
        env=_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        if importlib.util.find_spec("pip") is None:
            raise MachineError(
                "the module pip is missing from the Python that runs this tool",
                why="pip's configuration says which package index to ask",
                fix=f"run `{Path(sys.executable).name} -m ensurepip`, or install pip",
            )
        raise MachineError(
            "pip can't say how it is configured",
            # pip tells of some faults on its standard output
            why="\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]),
            fix="correct pip's configuration until `python -m pip config list` works",
        )
    return parse_pip_config(done.stdout.splitlines())


def parse_pip_config(lines: Iterable[str]) -> PipConfig:
    """Read lines like ``global.index-url='https://…'``; others are skipped.

    Raises:
        MachineError: a number or a truth value can't be read as one.
    """
    sections: dict[str, dict[str, str]] = {name: {} for name in _SECTIONS}
    for line in lines:
        if match := _LINE.fullmatch(line.strip()):
            section, name, value = match.groups()
            key = name.lower().replace("_", "-")
            text = _unquoted(value)
            if text.strip():  # pip, too, takes an empty value for none
                sections[section][_ALIASES.get(key, key)] = text.strip()
    merged = {key: value for name in _SECTIONS for key, value in sections[name].items()}
    return PipConfig(
        index_urls=tuple(merged.get("index-url", "").split()[:1]),
        extra_index_urls=tuple(merged.get("extra-index-url", "").split()),
        find_links=tuple(merged.get("find-links", "").split()),
        no_index=_truth(merged),
        trusted_hosts=tuple(merged.get("trusted-host", "").split()),
        cert=merged.get("cert"),
        client_cert=merged.get("client-cert"),
        proxy=merged.get("proxy"),
        timeout=_number(merged, "timeout", 15.0),
        retries=int(_number(merged, "retries", 5)),
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environ.items()
        if not name.upper().startswith("PIP_") or name in _VARIABLES
    }
    return kept | {"PYTHONIOENCODING": "utf-8"}


def _unquoted(value: str) -> str:
    try:
        return str(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return value


def _truth(merged: Mapping[str, str]) -> bool:
    value = merged.get("no-index", "false").lower()
    if value in ("1", "true", "t", "yes", "y", "on"):
        return True
    if value in ("0", "false", "f", "no", "n", "off"):
        return False
    raise _bad_value("no-index", value, "true or false")


def _number(merged: Mapping[str, str], key: str, default: float) -> float:
    try:
        value = float(merged.get(key, default))
    except ValueError:
        value = -1
    if not 0 <= value < 1e6:
        raise _bad_value(key, merged[key], "a number that isn't negative")
    return value


def _bad_value(key: str, value: str, expected: str) -> MachineError:
    return MachineError(
        f"pip's setting {key} can't be read",
        why=f"it is {value!r}; expected: {expected}",
        fix="correct pip's configuration; `python -m pip config debug` tells where it stands",
    )

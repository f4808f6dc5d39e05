"""What a person or a program gets to see: tables, progress, JSON, errors.

On a terminal: colours, tables and progress bars. Elsewhere: plain lines. With ``--json``:
one JSON document on standard output and nothing else there. All else goes to standard error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from overlay.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from overlay.errors import OverlayError

    Advance = Callable[[int], None]

# Words that a reader looks for, wherever they fill a cell
_GOOD, _SO_SO, _BAD = "green", "yellow", "bold red"
_STYLES = {
    **dict.fromkeys(("applies", "ok", "as recorded", "verified", "kept", "passed"), _GOOD),
    **dict.fromkeys(("offset", "context", "moved"), _SO_SO),
    **dict.fromkeys(("hint", "optional", "leftover", "rewritten", "stale"), _SO_SO),
    **dict.fromkeys(("merged", "partly-merged", "reworked", "conflict", "blocked"), _BAD),
    **dict.fromkeys(("error", "missing", "not locked", "dropped", "failed"), _BAD),
}


class Reporter:
    """Prints for one invocation. Library code gets it passed in, and never prints by itself."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet

    def say(self, message: str) -> None:
        """One line of progress or outcome, on standard error."""
        if not self.quiet:
            _tell(message)

    @contextmanager
    def progress(self, label: str, total: int | None = None) -> Iterator[Advance]:
        """Yield a function that is told how many more bytes (or items) are done.

        A bar on a terminal; in CI one line at the start and one at the end.
        """
        if self.quiet or not sys.stderr.isatty():
            started = time.monotonic()
            self.say(f"{label} ...")
            yield lambda _: None
            self.say(f"{label}: done in {time.monotonic() - started:.1f} s")
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(escape(label), total=total)
            yield lambda n: bar.advance(task, n)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table on a terminal; tab-separated lines elsewhere, so that ``cut`` works."""
        if not sys.stdout.isatty():
            _put("".join("\t".join(row) + "\n" for row in rows))
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console, table = Console(), Table(*columns)
        for row in rows:
            # Text, or rich would take words in brackets for its own markup and drop them
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        with console.capture() as capture:
            console.print(table)
        _put(capture.get())

    def text(self, text: str) -> None:
        """Plain text on standard output."""
        _put(text if text.endswith("\n") else text + "\n")

    def bytes(self, data: bytes) -> None:
        """Bytes on standard output, as they are."""
        _put(data)

    def json(self, document: Mapping[str, Any]) -> None:
        """The one JSON document of this invocation."""
        try:
            _put(json.dumps(document, indent=2, sort_keys=False, default=str) + "\n")
        except MachineError:
            self.as_json = False  # say why in plain words, on standard error
            raise

    def error(self, error: OverlayError, document: Mapping[str, Any] | None = None) -> None:
        """What happened, why, what to do; as JSON when asked, after what there is to say."""
        if self.as_json:
            told = {
                "kind": error.kind,
                "what": error.what,
                "why": error.why,
                "fix": error.fix,
                "exit_code": error.exit_code,
            }
            with contextlib.suppress(MachineError):
                self.json({**(document or {}), "error": told})
                return
        lines = [f"error: {error.what}"]
        lines += [f"  {line}" for line in error.why.splitlines()]
        lines += [f"fix: {error.fix}"] if error.fix else []
        _tell("\n".join(lines))


def prepare_streams() -> None:
    """Make standard output and error take whatever is written to them.

    A closed one is replaced by the null device, lest a file that is opened later gets its number
    and what we print. What the locale's encoding can't hold is escaped, not an error.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def release_streams() -> None:
    """Let go of what standard error holds and can't take, as on a full disk.

    Python would try once more at its end, and make that the exit code.
    """
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _put(data: str | bytes) -> None:
    """Write to standard output, now, so that it is known here whether that worked.

    Where the reader has gone away, as ``head`` does, the rest is dropped: the work goes on, and
    the exit code is its own.
    """
    try:
        if isinstance(data, bytes):
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
        else:
            sys.stdout.write(data)
        sys.stdout.flush()
    except OSError as error:
        # What is buffered still would be tried again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise MachineError(
                f"can't write to standard output: {error.strerror}",
                fix="give it another file, or free some room",
            ) from None


def _tell(text: str) -> None:
    """Write to standard error. Nothing fails because nobody can read it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

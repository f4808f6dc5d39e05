"""Verbs on proof: check runs a session on a line, status says what was proven."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlay.app import App, reaches_sources, told_with, verb
from overlay.errors import CheckError, OverlayError

if TYPE_CHECKING:
    from overlay.checks.receipt import Standing
    from overlay.lines.line import Line


@verb(
    short="Run a session of checks on a line",
    examples="""
    vllm-overlay check static infernal
    vllm-overlay check static infernal --force
    vllm-overlay check cpu infernal --python venv/bin/python -- -k launcher
    """,
)
@click.argument("session")
@click.argument("line")
@click.argument("words", nargs=-1)
@click.option("--force", is_flag=True, help="Run even if a receipt says that it passed.")
@click.option("--due", is_flag=True, help="Run nothing; say 'due' or 'unchanged' and why.")
@click.option(
    "--python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Interpreter to run the tests with (default: this one).",
)
@reaches_sources
def check(
    app: App, session: str, line: str, words: tuple[str, ...], force: bool, due: bool,
    python: Path | None,
) -> None:  # fmt: skip
    """Run the tests of SESSION on LINE and write the receipt; WORDS go to pytest.

    A session that passed on the same digest with the same tests is not run again. A run of part
    of the tests writes no receipt.
    """
    from overlay.checks.sessions import find_session, run_session, settled
    from overlay.lines.lock import check_lock, read_lock
    from overlay.trees.apply import refuse_bad
    from overlay.trees.pipeline import apply_line

    wanted, read = find_session(session), app.line(line)
    patched = apply_line(read, app.sources)
    for upstream, one in patched.items():
        refuse_bad(one.tree, line, upstream)
    digest = check_lock(read, patched, read_lock(read)).digest
    receipt = None if force or words else settled(read, wanted, digest)
    if receipt is None and not due:
        run_session(read, wanted, patched, digest=digest, python=python, words=words)
    state = "due" if receipt is None else "unchanged"
    if app.report.as_json:
        app.report.json({"verb": "check", "session": session, "line": line, "state": state})
    elif receipt is not None:
        app.report.text(
            f"unchanged: {session} passed on {line} {digest[:8]} with these tests "
            f"({receipt.when}, {receipt.card_name}); --force runs it again"
        )
    elif due:
        app.report.text(f"due: {session} has no passing receipt for {line} {digest[:8]}")


@verb(
    short="Which checks passed for which digest",
    examples="""
    vllm-overlay status
    vllm-overlay status infernal --json
    """,
)
@click.argument("lines", nargs=-1)
def status(app: App, lines: tuple[str, ...]) -> None:
    """Show for each of LINES (default: all) and session whether its digest is proven.

    Only a receipt for the line's own digest counts; others are shown as stale.
    """
    from overlay.lines.line import find_lines

    rows: list[dict[str, Any]] = []
    faults: list[OverlayError] = []
    for name in lines or find_lines(app.root):
        try:
            rows += _line_status(app.line(name))
        except OverlayError as error:  # one bad line must not hide the others
            faults.append(error)
            rows.append({"line": name, "error": error.what})
    document = {"verb": "status", "receipts": rows}
    if app.report.as_json and not faults:
        app.report.json(document)
    elif not app.report.as_json:
        app.report.table(
            ("line", "digest", "session", "on", "state", "passed", "failed", "skipped", "when"),
            [_status_row(row) for row in rows],
        )
    with told_with(app, document):
        if faults:
            raise faults[0]


def _line_status(line: Line) -> list[dict[str, Any]]:
    """A row a receipt, and one for each session that has none."""
    from overlay.checks.sessions import SESSIONS, locked_digest, standings
    from overlay.errors import LockError

    try:
        digest, problem = locked_digest(line), ""
    except LockError as error:  # no receipt can count, which is an answer
        digest, problem = "", error.what
    rows: list[dict[str, Any]] = []
    for session in SESSIONS.values():
        row = {"line": line.name, "digest": digest or None, "session": session.name}
        row |= {"problem": problem} if problem else {}
        found = standings(line, session, digest)
        rows += [{**row, **_standing(one)} for one in found] or [{**row, "state": "none"}]
    return rows


def _standing(one: Standing | CheckError) -> dict[str, Any]:
    from overlay.checks.receipt import to_document

    if isinstance(one, CheckError):
        return {"state": "unreadable", "problem": f"{one.what}: {one.why}"}
    return {
        "state": one.state,
        "same_tests": one.same_tests,
        "on": one.receipt.card_name,
        "receipt": to_document(one.receipt),
    }


def _status_row(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (row["line"], "?", "", "", row["error"], "", "", "", "")
    state = {"none": "no receipt", "skipped": "nothing ran"}.get(row["state"], row["state"])
    if state == "passed" and not row["same_tests"]:
        state = "passed, with other tests than now"
    if row["state"] == "stale":
        state = f"stale (of {row['receipt']['digest'][:8]})"
    receipt = row.get("receipt")
    counts = receipt["counts"] if receipt else {}
    return (
        row["line"],
        row["digest"][:8] if row["digest"] else "not locked",
        row["session"],
        row.get("on", ""),
        state,
        *(str(counts.get(name, "")) for name in ("passed", "failed", "skipped")),
        receipt["when"] if receipt else "",
    )

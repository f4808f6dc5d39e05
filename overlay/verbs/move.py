"""The verb that carries a line's series to another pin: begin, look, resolve, skip, end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlay.app import App, reaches_sources, told_with, verb
from overlay.errors import ExportError, MoveError, OverlayError, VerdictError
from overlay.verbs.maintain import UPSTREAM
from overlay.verbs.verdicts import clones_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.lines.line import Upstream
    from overlay.moving.journal import Journal
    from overlay.moving.move import Move

_ACTIONS = ("status", "resolve", "continue", "skip", "abort", "save")


@verb(
    short="Carry a series to another pin",
    examples="""
    vllm-overlay move infernal vllm 0.33.0
    vllm-overlay move infernal vllm 0.33.0 --to copper
    vllm-overlay move --status
    vllm-overlay move --resolve lse-plumbing
    vllm-overlay move --continue
    vllm-overlay move --skip kernel-block-size --reason 'upstream views larger blocks as pages'
    vllm-overlay move infernal --save && git add patches
    """,
)
@click.argument("line", required=False)
@click.argument("upstream", type=UPSTREAM, required=False)
@click.argument("target", metavar="VERSION|COMMIT|LINE2", required=False)
@click.option("--to", metavar="NEWLINE", help="Make this line of it; LINE stays as it is.")
@click.option("--status", is_flag=True, help="What became of each patch so far.")
@click.option("--resolve", metavar="PATCH", help="A git worktree with PATCH's conflicts.")
@click.option(
    "--in", "folder", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Where the worktree of --resolve is, or of --continue (default: work/LINE-PATCH).",
)  # fmt: skip
@click.option("--continue", "go_on", is_flag=True, help="Take what was resolved, and go on.")
@click.option("--skip", metavar="PATCH", help="Leave PATCH behind.")
@click.option("--reason", metavar="TEXT", help="Of --skip: why the line can do without it.")
@click.option("--abort", is_flag=True, help="Give the move up; LINE stays as it is.")
@click.option("--save", is_flag=True, help="Let git take the move half-done, for others.")
@click.option(
    "--history", metavar="UPSTREAM=CLONE", multiple=True,
    help="A clone of upstream, asked for the commits in between; repeat for several.",
)  # fmt: skip
@reaches_sources
def move(
    app: App,
    line: str | None,
    upstream: Upstream | None,
    target: str | None,
    to: str | None,
    status: bool,
    resolve: str | None,
    folder: Path | None,
    go_on: bool,
    skip: str | None,
    reason: str | None,
    abort: bool,
    save: bool,
    history: tuple[str, ...],
) -> None:
    """Carry LINE's UPSTREAM series to another pin, by three-way merges, every patch at once.

    What can't be carried waits: --resolve it in a worktree, then --continue; or --skip it. LINE
    changes when nothing waits any more, all at once. With one move under way, LINE needn't be
    said.
    """
    from overlay.files import locked
    from overlay.moving.finish import recover

    given = dict(zip(_ACTIONS, (status, resolve, go_on, skip, abort, save), strict=True))
    asked = [name for name, value in given.items() if value not in (None, False)]
    _check_usage(asked, line, upstream, target, to=to, folder=folder, reason=reason)
    clones = clones_of(history)
    with locked(app.cache / "stores" / "move.lock"):
        for name in recover(app.root):
            app.report.say(f"{name}: the move was done, save for its last step; it is complete now")
        if not asked:
            assert line is not None and upstream is not None and target is not None  # noqa: S101, PT018
            _begin(app, line, upstream, target, to, clones)
            return
        name = line or _only_move(app)
        going = _Going(app, name, upstream, clones)
        if abort:
            going.abort()
        elif save:
            going.save()
        elif resolve:
            going.resolve(resolve, folder)
        elif skip:
            going.skip(skip, reason or "")
        elif go_on:
            going.go_on(folder)
        else:
            going.status()


def _check_usage(
    asked: list[str], line: str | None, upstream: str | None, target: str | None, **more: Any
) -> None:
    """Refuse combinations of which one part would be ignored."""
    action = asked[0] if asked else ""
    if len(asked) > 1:
        raise click.UsageError(f"say one of --{' and --'.join(asked)}")
    if not asked and not (line and upstream and target):
        raise click.UsageError("give LINE UPSTREAM and where to, or one of the options")
    if asked and target:
        raise click.UsageError(f"--{action} goes on with a move: give no {target} with it")
    allowed = {"to": [""], "folder": ["resolve", "continue"], "reason": ["skip"]}
    for name, actions in allowed.items():
        if more[name] is not None and action not in actions:
            option = "in" if name == "folder" else name
            raise click.UsageError(f"--{option} has no meaning here")
    if action == "skip" and not (more["reason"] or "").strip():
        raise click.UsageError("--skip needs --reason TEXT: others will ask why")


def _only_move(app: App) -> str:
    from overlay.moving.journal import find_moves

    found = find_moves(app.root)
    if len(found) == 1:
        return found[0]
    if not found:
        raise MoveError("no move is under way", fix="begin one: move LINE UPSTREAM VERSION")
    raise MoveError(f"moves of {', '.join(found)} are under way", fix="say which line")


def _begin(
    app: App,
    name: str,
    upstream: Upstream,
    target: str,
    to: str | None,
    clones: Mapping[Upstream, Path],
) -> None:
    from overlay.moving.journal import Journal, begin, moving, read_journal
    from overlay.moving.move import check_new_name, target_id, target_pin, work_out

    line = app.line(name)
    pin = target_pin(app.root, app.sources, line, upstream, target)
    journal = Journal(upstream=upstream, pin=pin, to=to)
    if moving(line.folder):
        there = read_journal(line.folder)
        same = (there.upstream, target_id(there.pin), there.to) == (upstream, target_id(pin), to)
        if not same:
            raise MoveError(
                f"{name} is being moved already: {there.upstream} to {there.pin.version}",
                fix=f"go on with that (move {name} --status), or give it up (--abort)",
            )
        _go(app, work_out(app.root, line, there, app.sources, clones), evidence=True)
        return
    if to is not None:
        check_new_name(app.root, to)
    worked = work_out(app.root, line, journal, app.sources, clones)
    if worked.waiting:
        begin(line.folder, journal)
    _go(app, worked, evidence=True)


class _Going:
    """A move that is under way, and what can be done with it."""

    def __init__(
        self, app: App, name: str, upstream: Upstream | None, clones: Mapping[Upstream, Path]
    ) -> None:
        from overlay.moving.journal import read_journal

        self._app = app
        self._line = app.line(name)
        self._given, self._clones = upstream, clones
        self._journal: Journal | None = None
        self._read = read_journal

    @property
    def journal(self) -> Journal:
        """What was decided so far."""
        if self._journal is None:
            self._journal = self._read(self._line.folder)
            if self._given not in (None, self._journal.upstream):
                raise MoveError(
                    f"it is {self._line.name}'s {self._journal.upstream} that is being moved",
                    fix=f"say 'vllm-overlay move {self._line.name}', or end that move first",
                )
        return self._journal

    def worked(self) -> Move:
        """The move, worked out anew."""
        from overlay.moving.move import work_out

        return work_out(self._app.root, self._line, self.journal, self._app.sources, self._clones)

    def status(self) -> None:
        """Say how far it is."""
        from overlay.verbs.showmove import tell

        tell(self._app, self.worked())

    def save(self) -> None:
        """Let git take it."""
        from overlay.moving.journal import save
        from overlay.verbs.showmove import document, table

        move = self.worked()
        save(self._line.folder)
        if self._app.report.as_json:
            self._app.report.json(document(self._app, move))
        else:
            table(self._app, move)
        self._app.report.say(
            f"saved: commit patches/{self._line.name}/move and patches/resolutions; "
            "whoever has them goes on with 'move --continue'"
        )

    def abort(self) -> None:
        """Give it up."""
        from overlay.lines.line import read_line
        from overlay.moving.journal import end, moving

        name = self._line.name
        if not moving(self._line.folder):
            self._read(self._line.folder)  # which says so
        end(self._line.folder)
        read_line(self._app.root, name)
        if self._app.report.as_json:
            self._app.report.json({"verb": "move", "line": name, "state": "aborted"})
        self._app.report.say(f"{name}: the move is given up; recorded resolutions are kept")

    def skip(self, patch: str, reason: str) -> None:
        """Leave a patch behind."""
        from overlay.moving.journal import Decision, decide

        move = self.worked()
        of = move.patch(patch)
        self._journal = decide(
            self._line.folder, self.journal, of, Decision(of=of.sha256, skip=reason.strip())
        )
        _go(self._app, self.worked())

    def resolve(self, name: str, folder: Path | None) -> None:
        """Make a worktree with a patch's conflicts."""
        from overlay.moving.move import open_patch, resolving_folder

        app, move = self._app, self.worked()
        patch = move.patch(name)
        target = folder or resolving_folder(app.root, self._line.name, patch.name)
        text = open_patch(app.root, move, patch.name, target, app.sources)
        if app.report.as_json:
            document = {"patch": patch.name, "folder": str(target), "dossier": text}
            app.report.json({"verb": "move", "line": self._line.name, **document})
            return
        app.report.text(text)
        app.report.say(
            f"{target}: resolve, 'git add' and 'git commit' there, then: move --continue"
            + (f" --in {target}" if folder else "")
        )

    def go_on(self, folder: Path | None) -> None:
        """Take what was resolved, and end the move if nothing waits any more."""
        from overlay.moving.journal import Decision, decide
        from overlay.moving.resolved import record, resolutions_in
        from overlay.verbs.showmove import document, table

        app, move = self._app, self.worked()
        unfinished: list[OverlayError] = []
        for patch, read in resolutions_in(app.root, move, folder):
            try:
                resolved = read()
            except (MoveError, ExportError) as error:
                unfinished.append(error)
                continue
            before = self.journal.decisions.get(patch.name)
            if before is not None and before.patch == resolved.patch.sha256:
                continue
            keys, why_not = record(app.root, move, resolved)
            if why_not:
                app.report.say(f"{patch.name}: not recorded for other moves: {why_not}")
            said = Decision(of=patch.sha256, patch=resolved.patch.sha256, recorded=keys)
            self._journal = decide(self._line.folder, self.journal, patch, said, resolved.patch.raw)
            app.report.say(f"{patch.name}: taken as resolved")
        move = self.worked()
        if unfinished:
            if not app.report.as_json:
                table(app, move)
            with told_with(app, document(app, move)):
                raise unfinished[0]
        _go(app, move)


def _go(app: App, move: Move, *, evidence: bool = False) -> None:
    """End the move if nothing waits, else say what does."""
    from overlay.moving.finish import finish
    from overlay.verbs.showmove import document, table, tell

    if not move.waiting:
        tell(app, move, finish(app.root, move, app.sources))
        return
    with told_with(app, document(app, move)):
        if not app.report.as_json:
            table(app, move, evidence=evidence)
        first = move.waiting[0].name
        raise VerdictError(
            f"{len(move.waiting)} of {len(move.patches)} patches need a person",
            fix=f"move --resolve {first}, or move --skip {first} --reason TEXT; "
            "in the order of the series",
        )

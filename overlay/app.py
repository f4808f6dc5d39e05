"""What all verbs share: the group, the state of one invocation, the options in common."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from overlay.errors import LineError, OverlayError
from overlay.report import Reporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from overlay.lines.line import Line, Upstream
    from overlay.sources.source import Sources

    F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class App:
    """What every verb of one invocation shares."""

    report: Reporter = field(default_factory=Reporter)
    patches: Path | None = None
    offline: bool = False
    choices: dict[Upstream, str] = field(default_factory=dict)

    @cached_property
    def root(self) -> Path:
        """The ``patches`` folder: the one named, else the nearest above the current folder."""
        if self.patches is not None:
            if not self.patches.is_dir():  # else nothing would be linted, and all collected
                raise LineError(
                    f"--patches {self.patches}: no such folder", fix="name the folder of the lines"
                )
            return self.patches
        here = Path.cwd()
        for folder in (here, *here.parents):
            if (folder / "patches").is_dir():
                return folder / "patches"
        raise LineError(
            f"no 'patches' folder in {here} or above",
            fix="run inside a checkout of the project, or name the folder with --patches",
        )

    @property
    def cache(self) -> Path:
        """The cache folder."""
        from overlay.trees.store import cache_folder

        return cache_folder()

    def line(self, name: str) -> Line:
        """Read one line."""
        from overlay.lines.line import read_line

        return read_line(self.root, name)

    @cached_property
    def sources(self) -> Sources:
        """Where base trees and wheels come from in this invocation."""
        from overlay.sources.source import Sources

        return Sources(
            cache=self.cache, report=self.report, offline=self.offline, choices=self.choices
        )


class Verbs(click.Group):
    """Lists verbs in the order of a line's life, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which they were added."""
        del ctx
        return list(self.commands)


class Verb(click.Command):
    """A verb whose help shows examples as they stand in the docstring."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, one a line."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.strip().splitlines():
                    formatter.write(f"  {line.strip()}\n")
            formatter.write_paragraph()
        del ctx


@click.group(
    cls=Verbs,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="vllm-overlay", prog_name="vllm-overlay")
@click.option(
    "--patches",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the lines (default: nearest 'patches').",
)
@click.pass_context
def cli(ctx: click.Context, patches: Path | None) -> None:
    """Carry ordered patches over pinned vLLM and FlashInfer, prove them, build wheels.

    A line is a folder below patches/: pins, settings and two series. The cache is
    $VLLM_OVERLAY_CACHE, else the user's cache folder.

    Exit codes: 2 usage, 3 line, 4 patch, 5 source differs from its pin, 6 source out of reach,
    7 bad verdict, 8 lock, 9 wheel, 10 lint, 11 machine, 12 export, 13 git, 14 check,
    15 a patch needs a person, 16 unnoticed defect, 17 move, 18 drop, 19 bisect,
    20 capability, 21 recipe, 22 unsupported, 23 unknown, 24 kernels, 25 image, 26 engine,
    27 publishing, 28 signature.
    """
    ctx.ensure_object(App)
    ctx.obj.patches = patches
    if ctx.invoked_subcommand is None:
        ctx.obj.report.text(ctx.get_help())
        raise click.exceptions.Exit(2)


def verb(
    *, short: str, examples: str, name: str | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Register a verb; every one takes ``--json`` and ``--quiet``.

    Args:
        short: what it does, in the list of verbs.
        examples: invocations, one a line.
        name: where the function's own name can't be it.
    """

    def register(function: Callable[..., Any]) -> click.Command:
        function = click.option(
            "--json", is_flag=True, expose_value=False, is_eager=True, callback=_set_json,
            help="One JSON document on standard output.",
        )(function)  # fmt: skip
        function = click.option(
            "--quiet", "-q", is_flag=True, expose_value=False, callback=_set_quiet,
            help="No progress on standard error.",
        )(function)  # fmt: skip
        return cli.command(name, cls=Verb, epilog=examples, short_help=short)(
            click.pass_obj(function)
        )

    return register


def reaches_sources(function: F) -> F:
    """Add ``--source`` and ``--offline`` to a verb that needs base trees."""
    function = click.option(
        "--source", metavar="[UPSTREAM=]archive|git|PATH", multiple=True, expose_value=False,
        callback=_set_source,
        help="Where base trees come from (default: the line's own order).",
    )(function)  # fmt: skip
    return click.option(
        "--offline", is_flag=True, expose_value=False, callback=_set_offline,
        help="Never touch the network.",
    )(function)  # fmt: skip


@contextmanager
def told_with(app: App, document: Mapping[str, Any]) -> Iterator[None]:
    """Let a refusal in this block be reported together with what is known already."""
    try:
        yield
    except OverlayError as error:
        if not app.report.as_json:
            raise
        app.report.error(error, document)
        raise click.exceptions.Exit(error.exit_code) from None


def _set_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    ctx.ensure_object(App).report.as_json |= value


def _set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    ctx.ensure_object(App).report.quiet |= value


def _set_source(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> None:
    from overlay.lines.line import UPSTREAMS

    choices = ctx.ensure_object(App).choices
    for value in values:
        name, equals, rest = value.partition("=")
        named = [upstream for upstream in UPSTREAMS if equals and upstream == name]
        choice = rest if named else value
        if not choice:  # as a path it would be the current folder
            raise click.BadParameter("is empty", ctx, param)
        choices |= dict.fromkeys(named or UPSTREAMS, choice)


def _set_offline(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    ctx.ensure_object(App).offline = value

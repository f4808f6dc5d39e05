"""The command: verbs in, exit codes out.

Verbs live in ``overlay.verbs`` and import what they need when they run, so that a warm
``apply`` doesn't pay for a download's libraries.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import click

from overlay.app import App, cli
from overlay.errors import MachineError, OverlayError
from overlay.report import Reporter, prepare_streams, release_streams
from overlay.verbs import (
    build,
    bundle,
    capability,
    check,
    frontier,
    image,
    importing,
    kernels,
    look,
    maintain,
    move,
    preflight,
    publishing,
    series,
    verdicts,
)

# Importing the verbs has registered them
__all__ = [
    "build",
    "bundle",
    "capability",
    "check",
    "cli",
    "frontier",
    "image",
    "importing",
    "kernels",
    "look",
    "main",
    "maintain",
    "move",
    "preflight",
    "publishing",
    "series",
    "verdicts",
]

INTERRUPTED, INTERNAL = 130, 70
DEBUG_VARIABLE = "VLLM_OVERLAY_DEBUG"


def main(arguments: list[str] | None = None) -> int:
    """Run one invocation and return its exit code."""
    prepare_streams()
    try:
        return _run(arguments)
    finally:
        release_streams()


def _run(arguments: list[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    # --json must hold for usage errors too, which come before any option is processed
    app = App(report=Reporter(as_json="--json" in given))
    try:
        code = cli.main(given, obj=app, prog_name="vllm-overlay", standalone_mode=False)
    except OverlayError as error:
        app.report.error(error)
        return error.exit_code
    except click.ClickException as error:
        return _usage(app, error)
    except (click.Abort, KeyboardInterrupt):
        refused = OverlayError("interrupted; nothing half-written was left", fix="run it again")
        return _refuse(app, refused, INTERRUPTED)
    except SystemExit:  # click's, when the reader of its help goes away, as 'head' does
        return 0
    except OSError as error:
        refused = MachineError(
            str(error), fix="see 'vllm-overlay doctor' for what this machine lacks"
        )
        if not _has_folder():
            refused = MachineError("the current folder is gone", fix="go to another one (cd)")
        return _debug(_refuse(app, refused, refused.exit_code))
    except Exception as error:  # the last resort: a defect of ours
        refused = OverlayError(
            f"internal error: {type(error).__name__}: {error}",
            fix=f"report it with the output of the same command under {DEBUG_VARIABLE}=1",
        )
        return _debug(_refuse(app, refused, INTERNAL))
    return code if isinstance(code, int) else 0


def _usage(app: App, error: click.ClickException) -> int:
    refused = OverlayError(error.format_message())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        refused.fix = f"see '{error.ctx.command_path} --help'"
    return _refuse(app, refused, error.exit_code)


def _refuse(app: App, refused: OverlayError, code: int) -> int:
    refused.exit_code = code
    app.report.error(refused)
    return code


def _has_folder() -> bool:
    try:
        return bool(Path.cwd())
    except OSError:
        return False


def _debug(code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    return code

"""The ``graphc`` command line; one quickly imported file per sub-command.

Exit codes: 0 done, 1 failed, 2 usage, 3 unsupported op, 130 interrupted. Results go to standard output; progress, notes and
errors to standard error.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from graphc import __version__
from graphc.cli import output
from graphc.errors import GraphcError

COMMANDS = (
    "demo",
    "check",
    "inspect",
    "compile",
    "opt",
    "train",
    "run",
    "launch",
    "show",
    "passes",
    "backends",
    "ops",
    "doctor",
    "bench",
)
"""Sub-commands in the order of ``graphc --help``; ``graphc.cli.NAME`` defines ``command`` or ``group`` of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    output.open_standard_streams()
    try:
        result = _app()(args=arguments, prog_name="graphc", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except GraphcError as error:
        if os.environ.get(output.DEBUG):
            raise
        output.error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        output.error("interrupted")
        return 130
    except BrokenPipeError:
        # The reader closed standard output, as in 'graphc ops | head'; stop writing to it.
        output.drop_standard_output()
        return 1
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is not None:
            output.error(f"{usage()}; 'graphc --help' lists the commands, 'graphc COMMAND --help' its options")
            return int(getattr(error, "exit_code", 2))
        if os.environ.get(output.DEBUG):
            raise
        output.error(output.unexpected(error))
        return 1


def _app() -> typer.Typer:
    # Panels and colours only on a terminal; piped help is plain text.
    markup: Literal["rich"] | None = "rich" if output.is_terminal("stdout") else None
    app = typer.Typer(
        rich_markup_mode=markup,
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=True,
        help="Train ONNX models: a dataflow-graph compiler with autodiff, AllReduce injection and data-parallel workers.",
    )
    app.callback()(_common)
    for name in COMMANDS:
        module = importlib.import_module(f"graphc.cli.{name}")
        if hasattr(module, "group"):
            app.add_typer(module.group(), name=name)
        else:
            app.command(name, **getattr(module, "SETTINGS", {}))(module.command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"graphc {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the sub-command; each takes effect on its own."""


__all__ = ["COMMANDS", "main"]

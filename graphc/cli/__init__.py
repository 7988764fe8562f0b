"""The ``graphc`` command line; one quickly imported file per sub-command.

Exit codes: 0 done, 1 failed, 2 usage, 3 unsupported op, 130 interrupted (143, 129 and 131 by SIGTERM,
SIGHUP and SIGQUIT). Results go to standard output; progress, notes and errors to standard error.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from graphc import __version__
from graphc.cli.terminal import options, output, streams, usage
from graphc.errors import GraphcError
from graphc.launch.signals import interruption

COMMANDS = (
    "demo",
    "check",
    "inspect",
    "compile",
    "opt",
    "train",
    "plan",
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
    streams.open_standard_streams()
    with warnings.catch_warnings():
        warnings.showwarning = output.warning
        code = _main(arguments)
    threads = sys.modules.get("graphc.distributed.threads")
    if threads is not None:
        threads.end_process(code)
    return code


def _main(arguments: Sequence[str] | None) -> int:
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        result = _app()(args=words, prog_name="graphc", standalone_mode=False, obj=words)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except GraphcError as error:
        if os.environ.get(output.DEBUG):
            raise
        output.error(str(error))
        return error.exit_code
    except KeyboardInterrupt as end:
        what, code = interruption(end)
        output.error(f"stopped by {what}")
        return code
    except BrokenPipeError:
        # The reader closed standard output, as in 'graphc ops | head'; stop writing to it.
        output.drop_standard_output()
        return 1
    except Exception as error:
        if hasattr(error, "format_message"):
            output.error(usage.explain(error, sys.argv[1:] if arguments is None else arguments, COMMANDS))
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
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Train ONNX models: a dataflow-graph compiler with autodiff, AllReduce injection and data-parallel workers.",
    )
    app.callback(invoke_without_command=True)(_common)
    for name in COMMANDS:
        module = importlib.import_module(f"graphc.cli.{name}")
        if hasattr(module, "group"):
            app.add_typer(module.group(), name=name)
        else:
            settings = getattr(module, "SETTINGS", {})
            app.command(name, cls=usage.with_examples(module.EXAMPLES), **settings)(module.command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"graphc {__version__}")
        raise typer.Exit


def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the sub-command; each takes effect on its own."""
    options.help_unless_named(context)


__all__ = ["COMMANDS", "main"]

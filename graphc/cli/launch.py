"""``graphc launch``: runs a Python script as several workers on one machine."""

from __future__ import annotations

from typing import Annotated

import typer

from graphc.cli.terminal import options
from graphc.options import Option

EXAMPLES = (
    "graphc launch -n 2 train.py --epochs 3",
    "graphc launch -n 2 -m my_package.train",
)


SETTINGS = {"context_settings": {"allow_interspersed_args": False, "ignore_unknown_options": True}}
"""Context settings that pass everything after SCRIPT to the script."""


@options.takes_options
def command(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]…", help="As for 'python': a file, or -m MODULE.")],
    workers: Annotated[int, Option("Number of workers.", "N", flags=("-n", "--workers"))],
    transport: options.Transport = "auto",
    keep_going: Annotated[bool, Option("Go on without workers of parameter servers that die.")] = False,
    deadline: options.Deadline = None,
) -> int:
    """Run SCRIPT as N workers; inside, graphc.Trainer finds its rank."""
    from graphc.launch.local import launch

    return launch(workers, script, transport=transport, keep_going=keep_going, deadline=deadline)

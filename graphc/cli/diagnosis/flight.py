"""``graphc show flight``: compares the flight recorders' logs of a failed run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import Option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphc.distributed.health.flight_recorder import RankLog


EXAMPLES = ("graphc show flight graphc-flight-20261121-114206-11399 --last 2",)


@options.takes_options
def command(
    dumps: Annotated[
        list[Path], typer.Argument(metavar="DUMP…", help="Logs of ranks, or folders of them.", show_default=False)
    ],
    last: Annotated[int, Option("Show the last K collectives of each rank.", "K", minimum=0)] = 8,
    form: options.Format = Format.text,
) -> None:
    """Compare the flight logs of a failed run: which rank is behind, and in which collective."""
    from graphc.distributed.health.flight_recorder import load
    from graphc.distributed.health.hang_report import compare

    flights = sorted((flight for path in dumps for flight in load(path)), key=lambda flight: flight.rank)
    verdict = compare(flights)
    if form is Format.json:
        output.document({"verdict": verdict, "ranks": [asdict(flight) for flight in flights]})
        return
    for reason in dict.fromkeys(flight.reason for flight in flights):
        output.say(f"the run ended: {reason}")
    for line in verdict:
        output.say(line)
    for flight in flights:
        if last:
            output.say(f"\nrank {flight.rank} of {flight.size}, {len(flight.entries)} collectives")
            output.table(("#", "step", "collective", "tag", "bytes", "began", "took"), _rows(flight, flights, last))


def _rows(flight: RankLog, flights: Sequence[RankLog], last: int) -> list[tuple[str, ...]]:
    """Return table rows of a log's last entries; times count from the first entry shown of any rank."""
    origin = min((f.entries[-last:][0].start + f.offset for f in flights if f.entries), default=0.0)
    return [
        (
            str(entry.sequence) if entry.communicator == 1 else f"{entry.communicator}:{entry.sequence}",
            str(entry.step) if entry.step >= 0 else "-",
            f"{entry.kind}({entry.op})" if entry.op else entry.kind,
            entry.tag,
            str(entry.nbytes),
            f"{(entry.start + flight.offset - origin) * 1e3:.3f} ms",
            "did not end" if entry.end is None else f"{(entry.end - entry.start) * 1e3:.3f} ms",
        )
        for entry in flight.entries[-last:]
    ]

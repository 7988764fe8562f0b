"""``graphc ops``: lists every operator's gradient and native kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format

if TYPE_CHECKING:
    from graphc.report.op_coverage import Coverage

EXAMPLES = (
    "graphc ops",
    "graphc ops Conv",
)


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this operator.")] = None,
    form: options.Format = Format.text,
) -> None:
    """List every standard operator with its gradient (direct, through body, zero or none), and graphc's own operators."""
    from graphc.report import op_coverage

    rows, own = op_coverage.standard(), op_coverage.own()
    if name is not None:
        _print_one(name, rows, own, form)
        return
    counts = op_coverage.summary(rows)
    if form is Format.json:
        output.document({"summary": counts, "onnx": [row.row() for row in rows], "graphc": [_without_markup(o) for o in own]})
        return
    output.table(
        ("graphc op", "kind", "standard form", "gradient", "on a GPU", "what it is"),
        [
            (o["name"], o["kind"], "yes" if o["decomposes"] else "no", o["gradient"], o["gpu"], output.plain(o["doc"]))
            for o in own
        ],
    )
    output.say()
    output.table(
        ("standard op", "since", "gradient", "second order", "native kernels", "on a GPU"),
        [[output.plain(cell) for cell in row.cells] for row in rows],
    )
    output.prose(
        f"{counts['operators']} operators: {counts['covered']} of {counts['differentiable']} differentiable ones covered "
        f"({counts['direct']} direct, {counts['through_body']} through body), {counts['zero']} zero, {counts['none']} none; "
        f"{counts['second_order']} twice"
    )


def _print_one(name: str, standard: Sequence[Coverage], own: Sequence[Mapping[str, Any]], form: Format) -> None:
    """Print the operators of this name, whatever its domain and case."""
    from graphc.errors import UsageError, nearest

    found = [row.row() for row in standard if name.lower() in (row.name.lower(), row.cells[0].lower())]
    found += [_without_markup(o) for o in own if name.lower().removeprefix("graphc::") == o["name"].lower()]
    if not found:
        known = [*(row.cells[0] for row in standard), *(o["name"] for o in own)]
        raise UsageError(f"there is no operator {name!r}{nearest(name, known)}; 'graphc ops' lists them all")
    if form is Format.json:
        output.document(found)
        return
    for row in found:
        shown = {key.replace("_", " "): _shown(value) for key, value in row.items() if value not in ("", [], ())}
        output.pairs({key: output.plain(value) for key, value in shown.items()})


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _without_markup(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "doc": output.plain(row["doc"])}

"""``graphc ops``: lists every operator's gradient and native kernels."""

from __future__ import annotations

from graphc.cli import options, output
from graphc.cli.output import Format


def command(form: options.Format = Format.text) -> None:
    """List every standard operator with its gradient (direct, through body, zero or none), and graphc's own operators."""
    from graphc.report import op_coverage

    rows, own = op_coverage.standard(), op_coverage.own()
    counts = op_coverage.summary(rows)
    if form is Format.json:
        output.document({"summary": counts, "onnx": [row.row() for row in rows], "graphc": own})
        return
    output.table(
        ("graphc op", "kind", "standard form", "gradient", "on a GPU", "what it is"),
        [(o["name"], o["kind"], "yes" if o["decomposes"] else "no", o["gradient"], o["gpu"], o["doc"]) for o in own],
    )
    output.say()
    output.table(
        ("standard op", "since", "gradient", "second order", "native kernels", "on a GPU"),
        [row.cells for row in rows],
    )
    output.say(
        f"{counts['operators']} operators: {counts['covered']} of {counts['differentiable']} differentiable ones covered "
        f"({counts['direct']} direct, {counts['through_body']} through body), {counts['zero']} zero, {counts['none']} none; "
        f"{counts['second_order']} twice"
    )

"""rows: write gathers and scatters whose indices are the same for a whole row as gathers and sums of rows.

    before   y = ScatterElements(zeros, Expand(i, [6, 3]), x, axis=0, reduction="add")
    after    y = GatherGrad(x, i, [5, 3])

``legalize`` does so where shapes are known then (:mod:`graphc.passes.legalize.rows`); a plan knows all of them.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import counted
from graphc.passes.legalize.rows import INDEXED, by_rows
from graphc.passes.optimize.simplify import replace_each
from graphc.pipeline import Context, graph_pass


@graph_pass("rows", requires=("legalize",), changes="form")
def rows(model: ir.Model, ctx: Context) -> bool:
    """Replace every gather and scatter of whole rows by one that reads an index for each."""
    count = replace_each(model.graph, INDEXED, by_rows)
    if count:
        ctx.note(f"rows: {counted(count, 'gather or scatter', 'gathers and scatters')} of whole rows")
    return count > 0

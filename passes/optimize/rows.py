"""rows: write gathers and scatters whose indices are the same for a whole row as gathers and sums of rows.

    before   y = ScatterElements(zeros, Expand(i, [6, 3]), x, axis=0, reduction="add")
    after    y = GatherGrad(x, i, [5, 3])

``legalize`` does so where shapes are known then (:mod:`graphc.passes.legalize.rows`); a plan knows all of them.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import counted
from graphc.gradient import key_of
from graphc.ir.builder import Builder
from graphc.passes.legalize.rows import INDEXED, by_rows
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass

_REPLACED = INDEXED | {"graphc::GatherElementsGrad"}


@graph_pass("rows", requires=("legalize",), changes="form")
def rows(model: ir.Model, ctx: Context) -> bool:
    """Replace every gather and scatter of whole rows by one that reads an index for each."""
    graph = model.graph
    op, count = Builder(graph), 0
    for node in [node for node in graph if key_of(node.domain, node.op_type) in _REPLACED]:
        op.before, op.scope = node, node.name or node.op_type
        made = by_rows(op, node)
        count += made is not None and replace(graph, op, node.outputs[0], made)
    if count:
        dead_code_elimination(graph)
        ctx.note(f"rows: {counted(count, 'gather or scatter', 'gathers and scatters')} of whole rows")
    return count > 0

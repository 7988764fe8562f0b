"""decompose: replace ``graphc`` compute ops by their decomposition into standard ONNX ops.

    before   dx = graphc.ReluGrad(dy, y)
    after    dx = Where(Greater(y, 0), dy, 0)

Collectives become identities (one rank), update nodes become plain arithmetic whose results are the next values.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.ir.decomposition import decompose_graph
from graphc.pipeline import Context, graph_pass


@graph_pass("decompose", changes="form")
def decompose(model: ir.Model, ctx: Context, *, keep: Sequence[str] | None = None) -> bool:
    """Decompose all ``graphc`` nodes except ops in ``keep``, until only standard ops remain."""
    kept = frozenset(keep or ())
    return decompose_graph(model.graph, lambda node: node.op_type in kept)

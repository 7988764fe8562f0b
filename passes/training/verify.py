"""verify: refuse a graph that breaks the rules of the IR; changes nothing.

before   y = MatMul(x, w)      x:[2,3]  w:[4,5]
after    ModelError: MatMul rejects its inputs …, with the node, its neighbours and the lines around it
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir.verify import verify_model
from graphc.pipeline import Context, graph_pass


@graph_pass("verify", changes="form")
def verify(model: ir.Model, ctx: Context, *, legal: bool = True) -> bool:
    """Check ops, attributes, types, order, names, collectives and state; see :func:`graphc.ir.verify.verify_model`.

    Args:
        legal: also demand what ``legalize`` establishes: the one opset, no functions, every value typed, initializers
            that are not inputs.
    """
    verify_model(model, legal=legal)
    return False

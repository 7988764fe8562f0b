"""kept_taps: keep which tap of each pooling window was the maximum, rather than search for it again.

    before   y = MaxPool(x)             dx = MaxPoolGrad(dy, x, y)
    after    y, tap = MaxPoolTaps(x)    dx = MaxPoolTapsGrad(dy, tap, shape(x))

The gradient reads one byte for each window instead of x and y, and finds each element's windows without a search.

Shapes are static: a backend that has kernels for these ops asks for this pass over its plans
(:attr:`graphc.backend.Capabilities.rewrites`).
"""

from __future__ import annotations

import math

import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.facts import input_of, required, static_dims
from graphc.ir.ops.convolution import POOL, Window
from graphc.passes.optimize.simplify import dead_code_elimination, replace
from graphc.pipeline import Context, graph_pass

HIGHEST = 255
"""Taps that a byte tells from each other, and from none."""


@graph_pass("kept_taps", changes="form")
def kept_taps(model: ir.Model, ctx: Context, *, taps: int = HIGHEST, row: int = HIGHEST, step: int = HIGHEST) -> bool:
    """Let float32 MaxPools keep their maxima's taps where gradients read them.

    Args:
        taps, row, step: most taps of a window, most of its row, and longest stride along a row, that the backend takes.
    """
    graph, count = model.graph, 0
    op = Builder(graph)
    for node in [node for node in graph if node.domain == "" and node.op_type == "MaxPool"]:
        gradients = [
            user
            for user, index in node.outputs[0].uses()
            if (user.domain, user.op_type, index) == ("graphc", "MaxPoolGrad", 2) and user.inputs[1] is node.inputs[0]
        ]
        gradients = [user for user in gradients if user.graph is graph and _window(user) == _window(node)]
        window = _window(node) if gradients else None
        if window is None or any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
            continue
        if math.prod(window.kernel) > min(taps, HIGHEST) or window.kernel[-1] > row or window.strides[-1] > step:
            continue
        attributes = {key: attribute.value for key, attribute in node.attributes.items() if key in POOL}
        op.before, op.scope = node, node.name or node.op_type
        y, tap = op.graphc.MaxPoolTaps(input_of(node, 0), **attributes, _outputs=2)
        replace(graph, op, node.outputs[0], y)
        for user in gradients:
            op.before, op.scope = user, user.name or user.op_type
            shape = op.const(list(static_dims(user.outputs[0]) or ()))
            replace(graph, op, user.outputs[0], op.graphc.MaxPoolTapsGrad(input_of(user, 0), tap, shape, **attributes))
        count += 1
    if not count:
        return False
    dead_code_elimination(graph)
    ctx.note(f"kept_taps: {counted(count, 'pool')} whose gradients search for no maximum")
    return True


def _window(node: ir.Node) -> Window | None:
    """The window of a pool or its gradient; None: not one of float32, of a static shape and without dilations."""
    x, y = (node.inputs[0], node.outputs[0]) if node.op_type == "MaxPool" else (node.inputs[1], node.inputs[2])
    size, out = (static_dims(required(value)) for value in (x, y))
    if required(y).dtype != ir.DataType.FLOAT or size is None or out is None or 0 in size or 0 in out:
        return None
    window = Window.of({key: attribute.value for key, attribute in node.attributes.items()}, size[2:])
    return window if set(window.dilations) == {1} else None

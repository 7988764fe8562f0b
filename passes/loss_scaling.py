"""loss_scaling: take the loss scale out of the gradients, skip a step that overflowed, adapt the scale.

    before   dW ─► AllReduce ─► Adam(W, ·, divisor=weight)
    after    dW ─► AllReduce ─► Adam(W, ·, divisor=weight·scale, skip)      skip = AnyNonFinite(every reduced gradient)
             scale' = LossScale(scale, good_steps, skip)

It runs after ``allreduce``: ranks see the same reduced gradients, so all of them skip, or none does. A skipped step leaves
every piece of state as it is, the step counter and running statistics included, and lowers the scale. Without a scale
(``mixed_precision`` makes one for fp16) there is nothing to do.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of, is_update
from graphc.ir.names import GOOD_STEPS, LOSS_SCALE
from graphc.ir.state import scalar
from graphc.pipeline import Context, graph_pass


@graph_pass("loss_scaling", requires=("optimizer", "allreduce"))
def loss_scaling(
    model: ir.Model,
    ctx: Context,
    *,
    growth_interval: int = 2000,
    growth: float = 2.0,
    backoff: float = 0.5,
) -> bool:
    """Unscale, skip and adapt, where the graph has a loss scale.

    Args:
        growth_interval: after how many good steps in a row the scale grows.
        growth: by what it is multiplied then.
        backoff: by what it is multiplied when a step overflowed; it never falls below 1.

    Raises:
        UsageError: a factor out of range.
    """
    if growth_interval < 1 or not 1 <= growth <= 1024 or not 0 < backoff < 1:
        raise UsageError("growth_interval must be at least 1, growth from 1 to 1024, and backoff between 0 and 1")
    graph = model.graph
    scale = graph.initializers.get(LOSS_SCALE)
    if scale is None:
        return False
    updates = [node for node in graph if is_update(node)]
    _move_to_end(graph, updates)
    op = Builder(graph, before=updates[0], scope="loss_scaling")
    gradients = dict.fromkeys(v for n in updates if _reduces(n) and (v := n.inputs[1]) is not None)
    skip = op.graphc.AnyNonFinite(*gradients)
    divisors: dict[ir.Value | None, ir.Value] = {None: scale}
    for node in updates:
        declaration = declaration_of(node)
        assert declaration is not None
        places = {formal.name: k for k, formal in enumerate(declaration.inputs)}
        _put(node, places["skip"], skip)
        if "divisor" in places:
            old = node.inputs[places["divisor"]] if places["divisor"] < len(node.inputs) else None
            if old not in divisors:
                assert old is not None
                divisors[old] = op.Mul(old, op.cast_like(scale, old))
            _put(node, places["divisor"], divisors[old])
    op.before = None
    op.emit(
        "LossScale",
        [scale, scalar(graph, GOOD_STEPS, 0), skip],
        {"growth": growth, "backoff": backoff, "growth_interval": growth_interval},
        domain="graphc",
        outputs=[f"{LOSS_SCALE}::next", f"{GOOD_STEPS}::next"],
        name="update/loss_scale",
    )
    ctx.note(f"loss_scaling: {len(gradients)} gradients are tested before every update")
    return True


def _reduces(node: ir.Node) -> bool:
    declaration = declaration_of(node)
    return declaration is not None and 1 in declaration.reduces


def _put(node: ir.Node, index: int, value: ir.Value) -> None:
    if len(node.inputs) <= index:
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def _move_to_end(graph: ir.Graph, updates: list[ir.Node]) -> None:
    """Updates, and what reads their results, behind everything else, in their order: they all wait for the test."""
    late: set[ir.Node] = set()
    for node in graph:
        if is_update(node) or any(v is not None and v.producer() in late for v in node.inputs):
            late.add(node)
    order = [node for node in graph if node in late]
    graph.remove(order)
    graph.extend(order)

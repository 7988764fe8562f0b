"""loss_scaling: unscale gradients, skip a step that overflowed, adapt the scale.

    before   dW ─► AllReduce ─► Adam(W, ·, divisor=weight)
    after    dW ─► AllReduce ─► Adam(W, ·, divisor=weight·scale, skip)      skip = AnyNonFinite(every reduced gradient)
             scale' = LossScale(scale, good_steps, skip)

The pass runs after ``allreduce``: all ranks see the same reduced gradients, so all of them skip, or none does. A skipped step
leaves all state unchanged, including the step counter and running statistics, and lowers the scale. The pass does nothing
without a scale (``mixed_precision`` creates one for fp16).
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir.builder import Builder
from graphc.ir.declare import operand, place_of, put
from graphc.ir.names import GOOD_STEPS, LOSS_SCALE
from graphc.ir.state import scalar
from graphc.ir.updates import is_reduced, source_of, updates_of
from graphc.passes.precision.update_graph import move_to_end, refuse_without
from graphc.pipeline import Context, graph_pass


@graph_pass("loss_scaling", requires=("optimizer", "allreduce"), changes="training")
def loss_scaling(
    model: ir.Model,
    ctx: Context,
    *,
    growth_interval: int = 2000,
    growth: float = 2.0,
    backoff: float = 0.5,
) -> bool:
    """Unscale gradients, skip overflowed steps and adapt the scale, if the graph has a loss scale.

    Args:
        growth_interval: number of consecutive good steps after which the scale grows.
        growth: growth factor.
        backoff: factor applied when a step overflowed; the scale never falls below 1.

    Raises:
        UsageError: a factor out of range.
    """
    if growth_interval < 1 or not 1 <= growth <= 1024 or not 0 < backoff < 1:
        raise UsageError("growth_interval must be at least 1, growth from 1 to 1024, and backoff between 0 and 1")
    graph = model.graph
    scale = graph.initializers.get(LOSS_SCALE)
    if scale is None:
        return False
    updates = updates_of(graph)
    for name in ("skip", "divisor"):
        refuse_without(updates, name, "a loss scale")
    move_to_end(graph, updates)
    op = Builder(graph, before=updates[0], scope="loss_scaling")
    gradients = dict.fromkeys(source_of(n) for n in updates if is_reduced(n))
    skip = op.graphc.AnyNonFinite(*gradients)
    divisors: dict[ir.Value | None, ir.Value] = {None: scale}
    for node in updates:
        put(node, "skip", skip)
        if place_of(node, "divisor") is not None:
            old = operand(node, "divisor")
            if old is not None and old not in divisors:
                divisors[old] = op.Mul(old, op.cast_like(scale, old))
            put(node, "divisor", divisors[old])
    op.before = None
    op.emit(
        "LossScale",
        [scale, scalar(graph, GOOD_STEPS, 0), skip],
        {"growth": growth, "backoff": backoff, "growth_interval": growth_interval},
        domain="graphc",
        outputs=[f"{LOSS_SCALE}::next", f"{GOOD_STEPS}::next"],
        name="update/loss_scale",
    )
    ctx.note(f"loss_scaling: tests {counted(len(gradients), 'gradient')} before every update")
    return True

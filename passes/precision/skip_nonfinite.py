"""skip_nonfinite: skip a step whose loss or gradients hold a NaN or an infinity.

    before   dW ─► AllReduce ─► Adam(W, ·)
    after    dW ─► AllReduce ─► Adam(W, ·, skip)      skip = AnyNonFinite(every reduced gradient, every reported number)
             Tally(graphc.skipped, skip)

Without the pass such a step ends the run. All ranks see the same reduced numbers, so all of them skip, or none does. A skipped
step leaves all state unchanged, including the step counter, running statistics and residuals of compression;
``graphc.skipped`` counts it. If a loss scale already skips overflows (``loss_scaling``), its flag is counted. The pass runs
after all passes that add state.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graphc.errors import counted
from graphc.ir.builder import Builder
from graphc.ir.declare import operand, place_of, put
from graphc.ir.facts import is_float
from graphc.ir.names import SKIPPED
from graphc.ir.state import scalar
from graphc.ir.updates import is_reduced, source_of, updates_of
from graphc.passes.precision.update_graph import move_to_end, refuse_without
from graphc.pipeline import Context, graph_pass


@graph_pass("skip_nonfinite", requires=("optimizer", "allreduce"), changes="training")
def skip_nonfinite(model: ir.Model, ctx: Context) -> bool:
    """Keep all state unchanged in a step with a NaN or an infinity, and count such steps."""
    graph = model.graph
    refuse_without(updates_of(graph), "skip", "skip_nonfinite")
    updates = [node for node in updates_of(graph) if place_of(node, "skip") is not None]
    flag = next((f for f in (operand(node, "skip") for node in updates) if f is not None), None)
    if flag is None:
        flag = _flag(graph, updates)
        for node in updates:
            put(node, "skip", flag)
    op = Builder(graph)
    count = scalar(graph, SKIPPED, 0, np.int64)
    op.emit("Tally", [count, flag], domain="graphc", outputs=[f"{SKIPPED}::next"], name="update/skipped")
    ctx.note(f"skip_nonfinite: {counted(len(updates), 'update')}")
    return True


def _flag(graph: ir.Graph, updates: list[ir.Node]) -> ir.Value:
    """Whether any reduced gradient or statistic, or any reported number, is not finite."""
    move_to_end(graph, updates_of(graph))
    op = Builder(graph, before=updates_of(graph)[0], scope="skip_nonfinite")
    watched = dict.fromkeys(source_of(node) for node in updates if is_reduced(node))
    watched |= dict.fromkeys(v for v in graph.outputs if is_float(v) and v.producer() is not None)
    kinds: dict[ir.DataType | None, list[ir.Value]] = {}
    for value in watched:
        kinds.setdefault(value.dtype, []).append(value)
    flags = [op.graphc.AnyNonFinite(*values) for values in kinds.values()]
    found: ir.Value = flags[0]
    for other in flags[1:]:
        found = op.Or(found, other)
    return found

"""recompute: drop activations and recompute them when the backward pass needs them.

    before   h = Gemm(x, W);  y = Gelu(h);  …          dW2 = Gemm(y, dz);  dh = GeluGrad(dy, h)
    after    h = Gemm(x, W);  y = Gelu(h);  …          h' = Recompute(h);  y' = Gelu(h');  dW2 = Gemm(y', dz);  …

Results stay the same, bit for bit: the same ops run on the same operands, and random masks depend on a counter, not on the
time of drawing. A minimum cut decides which values are kept (:mod:`graphc.passes.training.recompute_cut`). Recomputed
nodes are placed before the first backward node that reads them, after a ``graphc.Recompute``, which keeps common-subexpression
elimination from merging them with the first computation.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError, nearest
from graphc.ir.builder import Builder
from graphc.ir.facts import constant, dims
from graphc.ir.names import PHASE, STAGE
from graphc.passes.optimize.simplify import simplify_graph
from graphc.passes.training.recompute_cut import Joint, RecomputeChoice, RecomputeRegion
from graphc.pipeline import Context, graph_pass

MODES = ("cheap", "all")
MOST_STRETCHES = 24


@graph_pass("recompute", requires=("autodiff",), changes="training")
def recompute(
    model: ir.Model, ctx: Context, *, mode: str = "cheap", budget_mb: float | None = None, batch: int | None = None
) -> bool:
    """Trade time for memory between the forward and the backward pass.

    Args:
        mode: ``cheap`` recomputes ops that cost little more than reading their results (activations, masks, normalisation,
            casts); ``all`` products too, so that the activations of a deep model grow with the square root of its depth.
        budget_mb: activations may take this much (10⁶ bytes, estimated); chooses the least work within it, up to ``all``.
        batch: value of symbolic dimensions; a budget requires it if the model has any.

    Raises:
        UsageError: an unknown mode, a budget that is not positive, or one that the graph's symbols make meaningless.
    """
    if mode not in MODES:
        raise UsageError(f"mode={mode!r}{nearest(mode, MODES)}; it is cheap or all")
    if budget_mb is not None and not budget_mb > 0:
        raise UsageError(f"budget_mb={budget_mb} must be above 0")
    if batch is not None and batch < 1:
        raise UsageError(f"batch={batch} must be at least 1")
    graph = model.graph
    if budget_mb is not None and batch is None and any(not isinstance(d, int) for v in graph.inputs for d in dims(v) or ()):
        raise UsageError("a budget needs to know how large a batch is: give batch=, the samples of one worker's step")
    simplify_graph(graph)
    joint = Joint(graph, batch or 1)
    before = joint.nothing()
    chosen = _choose(joint, before, mode, budget_mb)
    if chosen.peak >= before.peak and budget_mb is None:
        chosen = before
    _insert(graph, joint, chosen.regions)
    per = "" if batch is None else f" for a batch of {batch}"
    ctx.note(
        f"recompute: {sum(len(r.nodes) for r in chosen.regions)} nodes run again; activations"
        f" {before.peak / 1e6:.3f} to {chosen.peak / 1e6:.3f} MB{per}"
    )
    if budget_mb is not None and chosen.peak > budget_mb * 1e6:
        ctx.note(f"recompute: {budget_mb} MB are not enough, {chosen.peak / 1e6:.3f} MB is the least that was found")
    ctx.values["recompute"] = {"before": before.peak, "after": chosen.peak, "regions": len(chosen.regions)}
    return bool(chosen.regions)


def _choose(joint: Joint, before: RecomputeChoice, mode: str, budget_mb: float | None) -> RecomputeChoice:
    if budget_mb is None and mode == "cheap":
        return joint.cheap()
    most = min(MOST_STRETCHES, max(2, len(joint.forward) // 2))
    if budget_mb is None:
        return min((joint.stretches(k) for k in range(2, most + 1)), key=lambda c: (c.peak, c.work))
    found = [before, joint.cheap()]
    limit = budget_mb * 1e6
    if min(c.peak for c in found) > limit:
        found += [joint.stretches(k) for k in range(2, most + 1)]
    enough = [c for c in found if c.peak <= limit]
    return min(enough, key=lambda c: (c.work, c.peak)) if enough else min(found, key=lambda c: (c.peak, c.work))


def _insert(graph: ir.Graph, joint: Joint, regions: tuple[RecomputeRegion, ...]) -> None:
    op = Builder(graph)
    again: dict[ir.Value, ir.Value] = {}
    for number, region in enumerate(regions):
        for stage, nodes in _by_stage(region.nodes).items():
            op.before, op.scope = region.before, "recompute"
            op.marks = {STAGE: stage, PHASE: "backward"} if stage else {}
            made = {v for node in nodes for v in node.outputs}
            outside = (v for n in nodes for v in n.inputs if v is not None and v not in made)
            near = {v: new for v, new in again.items() if _stage_of(new) == stage}
            reads = dict.fromkeys(v for v in outside if v not in near)
            saved = [v for v in reads if v in joint.made or _is_held_float(v)]
            tag = f"r{number}s{stage}" if stage else f"r{number}"
            names = op.emit("Recompute", saved, {"tag": tag}, domain="graphc", name=f"recompute/{tag}") if saved else ()
            known = {**near, **dict(zip(saved, names, strict=True))}
            for node in nodes:
                attributes = dict(node.attributes.items())
                inputs = [known.get(v, v) if v is not None else None for v in node.inputs]
                op.scope = f"recompute/{node.name or node.op_type}"
                results = op.emit(node.op_type, inputs, attributes, domain=node.domain, outputs=len(node.outputs))
                for old, new in zip(node.outputs, results, strict=True):
                    known[old] = new
                    if old in region.values:
                        again[old] = new
    for node in joint.backward:
        stage = node.metadata_props.get(STAGE, "")
        for index, value in enumerate(node.inputs):
            if value is not None and value in again and _stage_of(again[value]) == stage:
                node.replace_input_with(index, again[value])


def _by_stage(nodes: Sequence[ir.Node]) -> dict[str, list[ir.Node]]:
    """The nodes of a region by their pipeline stage, in order: a stage recomputes what it has."""
    found: dict[str, list[ir.Node]] = {}
    for node in nodes:
        found.setdefault(node.metadata_props.get(STAGE, ""), []).append(node)
    return found


def _stage_of(value: ir.Value) -> str:
    producer = value.producer()
    return producer.metadata_props.get(STAGE, "") if producer is not None else ""


def _is_held_float(value: ir.Value) -> bool:
    """Whether a value is a parameter or a feed: it is read through the mark too, so that a node with no other operand is not
    merged.
    """
    return value.producer() is None and value.dtype is not None and value.dtype.is_floating_point() and constant(value) is None

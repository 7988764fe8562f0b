"""clip: limit the norm of the whole gradient, or each of its elements.

    before   dW ─► AllReduce ─► Adam(W, ·, divisor=weight)
    after    dW ─► AllReduce ─► Adam(W, ·, divisor=weight/c, clip_value=v)
             every reduced gradient ─► SumOfSquares ─► grad_norm = √·/weight;   c = min(1, norm/(grad_norm + 1e-6))

Both follow PyTorch (``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``), applied to the mean over the global batch, as
PyTorch does on one worker. The factor c goes into the divisor and the limit into the update itself, so only the norm costs
a pass over memory. With both, the norm is clipped first. ``grad_norm``, an output of the step, is the norm before clipping.

The pass runs after ``allreduce`` and before ``bucket``. Under ZeRO each worker sums over the elements it owns, and the sums are
added up (``combine`` in the declaration of ``SumOfSquares``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir.builder import Builder
from graphc.ir.declare import operand, put
from graphc.ir.names import CLIP_VALUE
from graphc.ir.updates import source_of, trains, updates_of
from graphc.passes.precision.update_graph import move_to_end, refuse_without
from graphc.pipeline import Context, graph_pass

GRAD_NORM = "grad_norm"
"""Output of the step: norm of the mean gradient over the global batch, before clipping (float32 scalar)."""

EPSILON = 1e-6
"""PyTorch adds this to the norm before it divides by it."""


@graph_pass("clip", requires=("optimizer", "allreduce"), changes="training")
def clip(model: ir.Model, ctx: Context, *, norm: float | None = None, value: float | None = None) -> bool:
    """Clip the gradients of all parameters that train.

    Args:
        norm: largest 2-norm of all gradients together.
        value: largest magnitude of an element of a gradient.

    Raises:
        UsageError: a bound that is not a positive number, or no bound.
    """
    if norm is None and value is None:
        raise UsageError("clip needs norm=, value=, or both")
    for name, bound in (("norm", norm), ("value", value)):
        if bound is not None and not 0 < bound < math.inf:
            raise UsageError(f"clip: {name}={bound} must be a positive number")
    graph = model.graph
    updates = [node for node in graph if trains(node)]
    for name, bound in (("divisor", norm), (CLIP_VALUE, value)):
        refuse_without(updates if bound is not None else (), name, "clip")
    if norm is not None:
        _clip_norm(graph, updates, norm)
    if value is not None:
        for node in updates:
            node.attributes[CLIP_VALUE] = ir.AttrFloat32(CLIP_VALUE, value)
    bounds = [f"{what} {bound:g}" for what, bound in (("norm", norm), ("value", value)) if bound is not None]
    ctx.note(f"clip: {counted(len(updates), 'gradient')} to {' and '.join(bounds)}")
    return True


def _clip_norm(graph: ir.Graph, updates: Sequence[ir.Node], bound: float) -> None:
    move_to_end(graph, updates_of(graph))
    op = Builder(graph, before=updates_of(graph)[0], scope="clip")
    divided: dict[ir.Value | None, dict[ir.DataType | None, dict[ir.Value, None]]] = {}
    for node in updates:
        gradient = source_of(node)
        divided.setdefault(operand(node, "divisor"), {}).setdefault(gradient.dtype, {})[gradient] = None
    total = op.Sum(*[_mean_square(op, divisor, kinds.values()) for divisor, kinds in divided.items()])
    norm = op.Sqrt(total)
    (reported,) = op.emit("Cast", [norm], {"to": int(ir.DataType.FLOAT)}, outputs=[op.unique(GRAD_NORM, value=True)])
    graph.outputs.append(reported)
    factor = op.Min(op.Div(op.scalar(bound, norm), op.Add(norm, EPSILON)), op.scalar(1, norm))
    new = {divisor: _divisor(op, divisor, factor) for divisor in divided}
    for node in updates:
        put(node, "divisor", new[operand(node, "divisor")])


def _mean_square(op: Builder, divisor: ir.Value | None, kinds: Iterable[Iterable[ir.Value]]) -> ir.Value:
    """Σ (g / divisor)² over the gradients that share a divisor."""
    total = op.Sum(*[op.graphc.SumOfSquares(*gradients) for gradients in kinds])
    if divisor is None:
        return total  # type: ignore[no-any-return]
    weight = op.cast_like(divisor, total)
    return op.Div(total, op.Mul(weight, weight))  # type: ignore[no-any-return]


def _divisor(op: Builder, divisor: ir.Value | None, factor: ir.Value) -> ir.Value:
    """The divisor that makes g / divisor the clipped gradient."""
    if divisor is None:
        return op.Cast(op.Div(op.scalar(1, factor), factor), to=int(ir.DataType.FLOAT))  # type: ignore[no-any-return]
    return op.cast_like(op.Div(op.cast_like(divisor, factor), factor), divisor)

"""autodiff: reverse-mode differentiation, as a graph rewrite.

    before   x ─► MatMul(W) ─► loss
    after    x ─► MatMul(W) ─► loss        seed ─► MatMul(xᵀ, ·) ─► W::grad

The backward subgraph is appended to the forward graph (:mod:`graphc.passes.gradients.reverse_mode`). Running the pass again
on gradients gives gradients of gradients. Recurrent layers first take the form that keeps what their gradient reads
(:mod:`graphc.ir.ops.recurrent_training`). Where a rule needs a rank that only the feeds tell, it writes a ``LateGradient``.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError, counted
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.decomposition import replace_node
from graphc.ir.facts import is_float
from graphc.ir.names import GRADIENT_OF, LOSS_TOTAL, find_value, marks_of
from graphc.ir.ops.recurrent import RECURRENT
from graphc.ir.ops.recurrent_training import training_form
from graphc.ir.parameters import select_trainable
from graphc.passes.gradients.reverse_mode import ancestors, differentiate, resolve_late, zeros
from graphc.passes.training.own_gradients import drop_stand_ins
from graphc.pipeline import Context, graph_pass


@graph_pass("autodiff", requires=("legalize",), changes="training")
def autodiff(
    model: ir.Model,
    ctx: Context,
    *,
    of: Sequence[str] | None = None,
    wrt: Sequence[str] | None = None,
    train: Sequence[str] | None = None,
    freeze: Sequence[str] | None = None,
) -> bool:
    """Append the backward subgraph of ``of`` with respect to ``wrt``.

    Args:
        of: values to differentiate; each is seeded with ones. Default: the loss total that the ``loss`` pass marked.
        wrt: names of values (parameters, inputs, intermediates). Default: every parameter that trains.
        train: glob patterns of parameters that train although the default rule leaves them out.
        freeze: glob patterns of parameters that do not train.

    The gradient of value ``w`` is named ``w::grad`` and carries ``graphc.gradient_of = w`` in its metadata.
    """
    graph = model.graph
    targets = [find_value(graph, name) for name in of] if of else _marked_total(graph)
    if wrt is not None:
        sources = [find_value(graph, name) for name in wrt]
    else:
        reachable = ancestors(graph, targets)
        sources = [v for v in select_trainable(graph, train=train, freeze=freeze) if v in reachable]
        if not sources:
            raise UsageError(_nothing_trains(graph, reachable, train, freeze))
    for value in (*targets, *sources):
        if value.dtype is not None and not is_float(value):
            raise UsageError(f"cannot differentiate {value.name!r}: its type is {value.dtype.name}, not a float")
    _keep_gates(graph, targets, sources)
    gradients = differentiate(graph, targets, sources)
    op = Builder(graph, scope="grad")  # shared by all: creating a builder walks the whole graph
    for source in sources:
        if source not in gradients and wrt is not None:
            gradients[source] = zeros(op, source)
    for source, value in gradients.items():
        _name_gradient(op, source, value)
    drop_stand_ins(graph)
    ctx.note(f"autodiff: gradients of {counted(len(gradients), 'value')}, {counted(len(graph), 'node')}")
    return True


def _keep_gates(graph: ir.Graph, targets: Sequence[ir.Value], sources: Sequence[ir.Value]) -> None:
    """Put RecurrentTraining in place of the recurrent layers on the way to ``targets``, where it computes the same."""
    layers = [node for node in graph if node.domain == "" and node.op_type in RECURRENT]
    needed, named = ancestors(list(graph), targets) if layers else set(), {*targets, *sources}
    op = Builder(graph)
    for node in layers:
        if needed.isdisjoint(node.outputs) or not named.isdisjoint(node.outputs):
            continue
        op.before, op.scope, op.marks = node, node.name or node.op_type, marks_of(node)
        replaced = training_form(op, node)
        if replaced is not None:
            replace_node(op, node, replaced)


@graph_pass("late_gradients", changes="training")
def late_gradients(model: ir.Model, ctx: Context) -> bool:
    """Apply the gradient rules that waited for shapes; a plan does so after its shapes are known."""
    waiting = [node for node in model.graph if node.op_type == "LateGradient" and node.domain == DOMAIN]
    op = Builder(model.graph)
    for node in waiting:
        resolve_late(op, node)
    return bool(waiting)


def _nothing_trains(
    graph: ir.Graph, reachable: set[ir.Value], train: Sequence[str] | None, freeze: Sequence[str] | None
) -> str:
    """Say why there is nothing to train."""
    without = [value for value in select_trainable(graph) if value in reachable]
    if without and freeze:
        given = ", ".join(map(repr, freeze))
        return (
            f"nothing to train: freeze={given} covers {'all ' if len(without) > 1 else ''}{counted(len(without), 'parameter')}"
            f" on the path to the loss; freeze fewer, or except some with train= (--train), as in train={without[-1].name!r}"
        )
    return (
        "nothing to train: no parameter lies on a path to the loss; 'graphc check MODEL -v' lists what the file holds and why"
        " it does not train, and train=[NAME] (--train NAME) trains any float constant"
    )


def _name_gradient(op: Builder, source: ir.Value, value: ir.Value) -> None:
    producer = value.producer()
    if GRADIENT_OF in value.metadata_props or producer is None or producer.op_type == "Constant":
        (value,) = op.emit("Identity", [value])
    value.name = op.unique(f"{source.name}::grad", value=True)
    value.metadata_props[GRADIENT_OF] = source.name or ""


def _marked_total(graph: ir.Graph) -> list[ir.Value]:
    marked = [v for node in graph for v in node.outputs if v.metadata_props.get(LOSS_TOTAL)]
    if not marked:
        raise UsageError("no loss to differentiate: run the 'loss' pass first, or name a scalar with of=")
    return marked

"""optimizer: add an update node for every gradient, and the optimizer's state.

    before   W, W::grad
    after    graphc.step ─► Increment ─► t
             graphc.Adam(W, W::grad, W::exp_avg, W::exp_avg_sq, t, graphc.lr, weight) ─► W::next, W::exp_avg::next, …

``weight`` is the divisor of the reported mean (docs/internals-graph.md, "Exact averaging").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graphc import optim
from graphc.errors import UsageError, counted
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import OpDeclaration, Role, declared
from graphc.ir.facts import dtype_of, is_parameter, is_state, shape_of
from graphc.ir.names import GRADIENT_OF, LEARNING_RATE, LOSS_TOTAL, STEP
from graphc.ir.state import add_initializer, scalar
from graphc.pipeline import Context, graph_pass


@graph_pass("optimizer", requires=("autodiff",), changes="training")
def optimizer(model: ir.Model, ctx: Context, *, name: str = "sgd", **options: Any) -> bool:
    """Put an update node behind every gradient of a parameter, in the order of the parameters in the file.

    Args:
        name: sgd, adam, adamw, adagrad, rmsprop, or one that a package registers (:func:`graphc.optim.register`).
        options: of the optimizer, as :mod:`graphc.optim` lists them, with PyTorch's defaults: ``lr``, ``momentum`` …. The
            learning rate becomes the initializer ``graphc.lr``, which schedules may write: float32, or float64 where all
            parameters are.

    Raises:
        UsageError: an unknown optimizer, an option it does not have or a value out of range, nothing to train, or
            parameters that have an optimizer already.
    """
    chosen = optim.make(name, options)
    chosen.check()
    graph = model.graph
    pairs = _gradients(graph)
    domain, op_type, declaration = _update_op(chosen)
    given = chosen.options()
    attributes = {k: int(v) if isinstance(v, bool) else v for k, v in given.items() if k in declaration.attributes}
    op = Builder(graph, scope="update")
    wide = all(parameter.dtype == ir.DataType.DOUBLE for parameter, _ in pairs)
    rate, divisor = scalar(graph, LEARNING_RATE, chosen.lr, np.float64 if wide else np.float32), _divisor(graph)
    (step,) = op.emit("Increment", [scalar(graph, STEP, 0)], domain=DOMAIN, outputs=[f"{STEP}::next"], name="update/step")
    shared = {"lr": rate, "divisor": divisor, "step": step}
    if divisor is not None and declaration.place_of("divisor") is None:
        raise UsageError(f"the loss is a mean, but the op {op_type!r} has no input 'divisor' by which it divides its gradient")
    for parameter, gradient in pairs:
        inputs: list[ir.Value | None] = []
        for k, formal in enumerate(declaration.inputs):
            if k == declaration.gradient:
                inputs.append(gradient)
            elif declaration.roles.get(k) is Role.PARAMETER:
                inputs.append(parameter)
            elif k in declaration.roles:
                kept = not formal.optional or chosen.keeps(formal.name)
                inputs.append(_state(graph, parameter, formal.name, chosen.initial) if kept else None)
            elif formal.name in shared or formal.optional:
                inputs.append(shared.get(formal.name))
            else:
                raise UsageError(f"the op {op_type!r} has an input {formal.name!r}, which optimizers do not supply")
        states = [declaration.inputs[k].name for _, k in sorted(declaration.next_value.items())]
        own = declaration.inputs[declaration.main].name
        names = [f"{parameter.name}::next" if state == own else f"{parameter.name}::{state}::next" for state in states]
        op.emit(op_type, inputs, attributes, domain=domain, outputs=names, name=f"update/{parameter.name}")
    ctx.note(f"optimizer: {name} updates {counted(len(pairs), 'parameter')}")
    return True


def _update_op(chosen: optim.Optimizer) -> tuple[str, str, OpDeclaration]:
    """Domain, name and declaration of the update op."""
    domain, _, op_type = chosen.update_op.rpartition("::")
    declaration = declared(domain or DOMAIN, op_type)
    if declaration is None or declaration.gradient is None:
        raise UsageError(f"optimizer {chosen.name!r}: no op {chosen.update_op!r} is declared with gradient=…")
    return domain or DOMAIN, op_type, declaration


def _gradients(graph: ir.Graph) -> list[tuple[ir.Value, ir.Value]]:
    """(parameter, gradient) in the order of the parameters in the file."""
    found = {v.metadata_props[GRADIENT_OF]: v for node in graph for v in node.outputs if GRADIENT_OF in v.metadata_props}
    pairs = [(value, found[name]) for name, value in graph.initializers.items() if name in found and is_parameter(value)]
    if not pairs:
        raise UsageError("nothing to train: the graph has no gradient of a parameter")
    trained = [value.name for value, _ in pairs if is_state(value)]
    if trained:
        raise UsageError(f"{trained[0]!r} is updated already: the graph has an optimizer")
    return pairs


def _divisor(graph: ir.Graph) -> ir.Value | None:
    """The weight by which the reported loss divides its total; None for a sum, or without a reported loss."""
    for node in graph:
        total = node.inputs[0] if node.op_type == "Mean" and node.domain == DOMAIN else None
        if total is not None and LOSS_TOTAL in total.metadata_props:
            return node.inputs[1] if len(node.inputs) > 1 else None
    return None


def _state(graph: ir.Graph, parameter: ir.Value, name: str, start: float) -> ir.Value:
    """A new initializer ``parameter::name`` of the parameter's type and shape, filled with ``start``."""
    number = np.asarray(start, dtype=dtype_of(parameter).numpy())
    array = np.broadcast_to(number, shape_of(parameter))  # one number in memory
    return add_initializer(graph, f"{parameter.name}::{name}", array)

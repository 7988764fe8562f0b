"""optimizer: add an update node for every gradient, and the optimizer's state.

    before   W, W::grad
    after    graphc.step ─► Increment ─► t
             graphc.Adam(W, W::grad, W::exp_avg, W::exp_avg_sq, t, graphc.lr, weight) ─► W::next, W::exp_avg::next, …

``weight`` is the divisor of the reported mean (docs/internals-graph.md, "Exact averaging").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.errors import UsageError, nearest
from graphc.ir import DOMAIN
from graphc.ir.builder import Builder
from graphc.ir.declare import OPS, PLACEMENT
from graphc.ir.facts import is_parameter, is_state
from graphc.ir.names import BUCKET, CLIP_VALUE, GRADIENT_OF, LEARNING_RATE, LOSS_TOTAL, STEP
from graphc.ir.state import add_initializer, scalar
from graphc.pipeline import Context, graph_pass


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """One optimizer: the update op it emits for given options, and the state that op keeps.

    Attributes:
        lr: default learning rate.
        op: options → name of the update op; the op's attributes are the optimizer's further options.
        states: options → one name per state input (None: left out), in the order of the op's inputs.
        own: options that are no attribute of any op, with their defaults.
        ops: every op that ``op`` may name.
    """

    lr: float
    op: Callable[[Mapping[str, Any]], str]
    states: Callable[[Mapping[str, Any]], Sequence[str | None]]
    ops: tuple[str, ...]
    own: Mapping[str, Any] = field(default_factory=dict)

    def defaults(self) -> dict[str, Any]:
        """Every option with its default."""
        found: dict[str, Any] = {"lr": self.lr}
        for name in self.ops:
            found.update({k: v for k, v in OPS[name].attributes.items() if k not in {BUCKET, CLIP_VALUE, *PLACEMENT}})
        return {**found, **self.own}


def _momentum(options: Mapping[str, Any]) -> bool:
    return bool(options["momentum"])


OPTIMIZERS: Mapping[str, OptimizerRule] = {
    "sgd": OptimizerRule(
        lr=1e-3,
        op=lambda o: "Momentum" if _momentum(o) else "SGD",
        states=lambda o: ["momentum_buffer"] if _momentum(o) else [],
        ops=("SGD", "Momentum"),
        own={"momentum": 0.0},
    ),
    "adam": OptimizerRule(lr=1e-3, op=lambda o: "Adam", states=lambda o: ["exp_avg", "exp_avg_sq"], ops=("Adam",)),
    "adamw": OptimizerRule(lr=1e-3, op=lambda o: "AdamW", states=lambda o: ["exp_avg", "exp_avg_sq"], ops=("AdamW",)),
    "adagrad": OptimizerRule(
        lr=1e-2, op=lambda o: "Adagrad", states=lambda o: ["sum"], ops=("Adagrad",), own={"initial_accumulator_value": 0.0}
    ),
    "rmsprop": OptimizerRule(
        lr=1e-2,
        op=lambda o: "RMSprop",
        states=lambda o: [
            "square_avg",
            "grad_avg" if o["centered"] else None,
            "momentum_buffer" if _momentum(o) else None,
        ],
        ops=("RMSprop",),
    ),
}
"""Name → optimizer, with PyTorch's definitions, option names and defaults."""


@graph_pass("optimizer", requires=("autodiff",))
def optimizer(
    model: ir.Model,
    ctx: Context,
    *,
    name: str = "sgd",
    lr: float | None = None,
    momentum: float | None = None,
    dampening: float | None = None,
    nesterov: bool | None = None,
    weight_decay: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    eps: float | None = None,
    lr_decay: float | None = None,
    initial_accumulator_value: float | None = None,
    alpha: float | None = None,
    centered: bool | None = None,
) -> bool:
    """Put an update node behind every gradient of a parameter, in the order of the parameters in the file.

    Args:
        name: sgd, adam, adamw, adagrad or rmsprop, by PyTorch's definitions.
        lr: learning rate; it becomes the float32 initializer ``graphc.lr``, which schedules may write.
        momentum, dampening, nesterov: of sgd (momentum of rmsprop too).
        weight_decay: L2 penalty added to the gradient; decoupled for adamw.
        beta1, beta2: decay rates of adam's averages.
        eps: term added to denominators.
        lr_decay, initial_accumulator_value: of adagrad.
        alpha, centered: of rmsprop.

    Raises:
        UsageError: an unknown optimizer, an option it does not have or a value out of range, nothing to train, or
            parameters that have an optimizer already.
    """
    given = {
        "lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": weight_decay,
        "beta1": beta1, "beta2": beta2, "eps": eps, "lr_decay": lr_decay,
        "initial_accumulator_value": initial_accumulator_value, "alpha": alpha, "centered": centered,
    }  # fmt: skip
    options = resolve(name, {k: v for k, v in given.items() if v is not None})
    graph = model.graph
    pairs = _gradients(graph)
    chosen = OPTIMIZERS[name]
    declaration = OPS[chosen.op(options)]
    attributes = {k: options[k] for k in declaration.attributes if k in options}
    for flag in ("nesterov", "centered"):
        if flag in attributes:
            attributes[flag] = int(attributes[flag])
    divisor = _divisor(graph)
    rate = scalar(graph, LEARNING_RATE, options["lr"], np.float32)
    op = Builder(graph, scope="update")
    (step,) = op.emit("Increment", [scalar(graph, STEP, 0)], domain=DOMAIN, outputs=[f"{STEP}::next"], name="update/step")
    takes_step = any(formal.name == "step" for formal in declaration.inputs)
    start = options.get("initial_accumulator_value", 0.0)
    for parameter, gradient in pairs:
        states = [None if s is None else _state(graph, parameter, s, start) for s in chosen.states(options)]
        inputs = [parameter, gradient, *states, *([step] if takes_step else []), rate, divisor]
        names = [f"{parameter.name}::next"]
        for formal, state in zip(declaration.outputs[1:], states, strict=True):
            unread = f"{parameter.name}::{formal.name.removeprefix('next_')}::next"
            names.append(unread if state is None else f"{state.name}::next")
        op.emit(declaration.name, inputs, attributes, domain=DOMAIN, outputs=names, name=f"update/{parameter.name}")
    ctx.note(f"optimizer: {name} updates {len(pairs)} parameters")
    return True


def resolve(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of optimizer ``name`` with ``given`` filled in.

    Raises:
        UsageError: an unknown optimizer, an option it does not have, or a value out of range.
    """
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}{nearest(name, OPTIMIZERS)}; known are {', '.join(OPTIMIZERS)}")
    options = OPTIMIZERS[name].defaults()
    for key, value in given.items():
        if key not in options:
            raise UsageError(
                f"optimizer {name!r} has no option {key!r}{nearest(key, options)}; its options are {', '.join(options)}"
            )
        options[key] = value
    for key, value in options.items():
        below_one = key in ("beta1", "beta2")
        if not value >= 0 or (below_one and not value < 1) or not np.isfinite(value):
            raise UsageError(f"{name}: {key}={value} is out of range: it must be at least 0" + " and below 1" * below_one)
    if options.get("nesterov") and (not options["momentum"] or options["dampening"]):
        raise UsageError(f"{name}: nesterov needs a momentum above 0 and no dampening")
    return options


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
    tensor = parameter.const_value
    assert tensor is not None
    assert parameter.dtype is not None
    array = np.zeros(tuple(tensor.shape.numpy()), dtype=parameter.dtype.numpy())  # takes no memory before it is written
    if start:
        array.fill(start)
    return add_initializer(graph, f"{parameter.name}::{name}", array)

"""Divides a pipeline where the model is copied for training and evaluation; builds the evaluation graph.

    legalize, square_relu, train_mode, loss, autodiff, …
    └── the model itself ──┘└──────── training graph ─────

A pass that changes what the model computes belongs to the model itself, so that evaluation and export have it too. One that
stands between passes of training moves to the front; where that is impossible it must leave the forward pass as it is.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir.builder import Builder
from graphc.ir.names import LOSS_TOTAL
from graphc.ir.subgraphs import captured
from graphc.pipeline import PASSES, Context, PassCall, run

IMPORT_PASSES = ("legalize", "dequantize", "rebatch", "initialize")
"""Passes that prepare the model itself, besides those that change its function."""

RunStep = Callable[[PassCall], None]


@dataclass(slots=True)
class Stages:
    """A pipeline divided at the copy.

    Attributes:
        own: steps that belong to the model itself, in the order in which they ran.
        rest: steps that build the training graph.
        changed: whether a step changed what the model computes.
    """

    own: list[PassCall]
    rest: list[PassCall]
    changed: bool = False


def run_on_model(model: ir.Model, steps: Sequence[PassCall], run_step: RunStep) -> Stages:
    """Run the steps that belong to ``model`` itself."""
    count = _leading(steps)
    found = Stages([], list(steps[count:]))

    def changes(step: PassCall) -> bool:
        before = fingerprint(model) if _may_change_function(step) else ""
        run_step(step)
        return bool(before) and fingerprint(model) != before

    for step in steps[:count]:
        found.changed |= changes(step)
        found.own.append(step)
    end = next((k for k, step in enumerate(found.rest) if step.name == "autodiff"), len(found.rest))
    for step in [step for step in found.rest[:end] if _may_change_function(step)]:
        if not set(PASSES[step.name].requires) <= {PASSES[earlier.name].name for earlier in found.own}:
            continue  # it needs a pass of training
        if changes(step):
            found.changed = True
            found.own.append(step)
            found.rest.remove(step)
    return found


def run_on_training(model: ir.Model, steps: Sequence[PassCall], run_step: RunStep) -> None:
    """Run the steps that build the training graph.

    Raises:
        UsageError: one of them changes the forward pass, which evaluation and export would not have.
    """
    previous: list[str] = []
    for step in steps:
        before = fingerprint(model) if _may_change_function(step) else ""
        run_step(step)
        if before and fingerprint(model) != before:
            where = next((name for name in ("autodiff", "loss", *previous[-1:]) if name in previous), "legalize")
            raise UsageError(
                f"the pass {step.name!r} changed the forward pass of the training graph behind {where!r}: evaluation and the"
                " exported model would be those of the model without it"
                f"{', and so are the gradients' if where == 'autodiff' else ''}. Put it behind 'legalize', so that it changes"
                " the model itself; or declare what it does: graph_pass(…, changes='form') for another form of the same"
                " function, changes='training' for what belongs to training alone, such as a term of the loss"
            )
        previous.append(step.name)


def _leading(steps: Sequence[PassCall]) -> int:
    """The number of steps up to the last that concerns the model itself and has no pass of training before it."""
    first = next((k for k, step in enumerate(steps) if PASSES[step.name].changes == "training"), len(steps))
    own = [k for k, step in enumerate(steps[:first]) if step.name in IMPORT_PASSES or _may_change_function(step)]
    return own[-1] + 1 if own else 0


def _may_change_function(step: PassCall) -> bool:
    return PASSES[step.name].changes == "function"


def fingerprint(model: ir.Model) -> str:
    """A hash of the forward pass: all nodes that the marked total of the loss depends on, or else the graph's outputs.

    Comparable between states of one model in this process.
    """
    graph = model.graph
    made = [value for node in graph for value in node.outputs]
    totals = [value for value in made if LOSS_TOTAL in value.metadata_props] or list(graph.outputs)
    known: dict[ir.Value, str] = {}
    wanted = set(totals)
    nodes = []
    for node in reversed(graph):
        if any(value in wanted for value in node.outputs):
            nodes.append(node)
            wanted.update(value for value in (*node.inputs, *captured(node)) if value is not None)
    for node in reversed(nodes):
        parts = [node.domain, node.op_type, node.overload, *_attributes(node.attributes)]
        parts += ["" if v is None else known.get(v) or _source(v) for v in (*node.inputs, *captured(node))]
        own = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        known.update({value: f"{own}.{k}" for k, value in enumerate(node.outputs)})
    return "\n".join(known.get(value) or _source(value) for value in totals)


def _source(value: ir.Value) -> str:
    """An input or initializer, the latter with its tensor: to change weights is to change the function."""
    return f"={value.name}" if value.const_value is None else f"={value.name}#{id(value.const_value)}"


def _attributes(attributes: Mapping[str, ir.Attr]) -> list[str]:
    """The attributes as text, in the order of their names."""
    found = []
    for name, attr in sorted(attributes.items()):
        found += [name, hashlib.sha256(ir.serde.serialize_attribute(attr).SerializeToString(deterministic=True)).hexdigest()]
    return found


class Evaluation:
    """The evaluation graph, simplified on first use: a run that only trains never needs it."""

    def __init__(self, model: ir.Model, ctx: Context) -> None:
        self._model, self._ctx = model, ctx
        self._lock, self._done = threading.Lock(), False

    @property
    def model(self) -> ir.Model:
        with self._lock:  # worker threads share a program
            if not self._done:
                run(
                    self._model,
                    [
                        PassCall("gathers"),
                        PassCall("boxes"),
                        PassCall("early_pools"),
                        PassCall("einsum"),
                        PassCall("attention", {"saves": "logsumexp"}),
                        PassCall("whole_windows"),
                        PassCall("grouped_products"),
                        PassCall("simplify"),
                        PassCall("verify"),
                    ],
                    self._ctx,
                )
                self._done = True
        return self._model

    def __getstate__(self) -> ir.Model:
        return self.model  # a lock cannot be copied or pickled

    def __setstate__(self, model: ir.Model) -> None:
        self.__init__(model, Context())  # type: ignore[misc]
        self._done = True


def evaluation_graph(legalised: ir.Model, loss: PassCall, ctx: Context) -> Evaluation:
    """A copy of the legalised model in inference mode whose outputs are the loss and metrics with their sums."""
    model = legalised.clone()
    inner = Context(done=list(ctx.done))
    run(model, [PassCall("draws"), PassCall("inference_mode"), loss], inner)
    for node in list(model.graph):
        if node.op_type == "Mean" and node.domain == "graphc":
            # Evaluation sums over batches and divides once, so that a short last batch has its due weight.
            for value, part in zip(node.inputs, ("total", "weight"), strict=False):
                if value is not None:
                    op = Builder(model.graph)
                    model.graph.outputs.append(op.Identity(value, _outputs=[f"{node.outputs[0].name}::{part}"]))
    return Evaluation(model, inner)

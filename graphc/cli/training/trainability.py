"""Finds out whether a model trains, by compiling and planning it as ``graphc train`` does; binds and runs nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from graphc import compiler, optim
from graphc.compiler import Program, training_pipeline
from graphc.errors import FeedError, GraphcError, ModelError, NotTrainableError, UsageError
from graphc.ir.bound_inputs import bind_inputs
from graphc.ir.facts import batch_dim, describe_value, dims, shape_of, static_dims
from graphc.ir.names import RESERVED
from graphc.ir.parameters import DECISIONS, Decision
from graphc.ir.subgraphs import captured
from graphc.losses import LOSSES, MSE, Loss
from graphc.options import CompileOptions, axes_of, constants_of, scales_of
from graphc.pipeline import Context, PassCall, run
from graphc.plan.specialise import specialise
from graphc.report.batch_rule import BatchRule, batch_rule
from graphc.report.feed_sizes import likely_shapes
from graphc.report.memory import MemoryReport, memory_of

BATCH = 32
"""Batch of a model that takes any; the default of ``graphc train``."""

OPTIMIZER = "adam:lr=1e-3"
"""Optimizer of the suggested command, which the memory includes."""

LOSSES_TRIED = 4
"""Most losses that are compiled to find one that trains."""

Labels = Mapping[str, tuple[ir.Value, int | None, bool]]
"""Name of a new label → (scores, class axis, whether the label keeps it with size 1)."""


@dataclass(slots=True)
class Trainability:
    """What is known of a model's training; fields of stages that were not reached stay empty.

    Attributes:
        legal: the legalised model.
        found: what the ``check`` pass found for the chosen loss.
        batch: which batches the file takes, and the size that was planned.
        loss, program: the first loss that compiles.
        shapes: shapes of the feeds that were planned.
        guessed: whether some of their sizes were guessed.
        memory: of a training step.
        error: why the model does not train; None: it does.
        stage: the stage that failed, or the last one.
        seconds: stage → time.
        log: what the passes said.
        decisions: by which rule each float constant trains or not.
    """

    legal: ir.Model
    found: dict[str, Any] = field(default_factory=dict)
    batch: BatchRule | None = None
    batch_size: int = BATCH
    loss: Loss | None = None
    program: Program | None = None
    shapes: dict[str, list[int]] = field(default_factory=dict)
    guessed: bool = False
    memory: MemoryReport | None = None
    error: GraphcError | None = None
    stage: str = "legalize"
    seconds: dict[str, float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        return self.error is None

    @property
    def rebatched(self) -> bool:
        """Whether the file is fixed at another batch than the planned one."""
        return self.batch is not None and self.batch.size not in (None, self.batch_size)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Enter a stage, and add its time."""
        self.stage, start = stage, time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def examine(
    model: ir.Model,
    *,
    loss: Loss | None = None,
    batch_size: int | None = None,
    compilation: CompileOptions | None = None,
) -> Trainability:
    """Compile ``model`` with ``loss``, or with the losses that fit it until one trains, and plan a step.

    Args:
        model: as loaded; it is not changed.
        batch_size: samples of the step; None: the batch of the file, or 32.
        compilation: as for ``train``. Sizes of inputs that the model and ``shapes`` leave open are guessed.

    Raises:
        GraphcError: the model cannot be legalised, or ``loss`` or ``compilation`` are wrong.
    """
    options, ctx = compilation or CompileOptions(), Context()
    model = model.clone()
    bind_inputs(model, constants_of(options.inputs), axes_of(options.batch_axis), scales_of(options.scale))
    options = dataclasses.replace(options, inputs=None, batch_axis=None, scale=None)
    choice = {"train": options.train, "freeze": options.freeze}
    result = Trainability(model.clone(), log=ctx.log)
    with result.timed("legalize"):
        run(result.legal, _preparation(options), ctx)
        result.decisions = ctx.values.get(DECISIONS, [])
    with result.timed("batch"):
        result.batch = batch_rule(model)
        fixed = batch_dim(result.legal.graph)
        result.batch_size = batch_size or (fixed if isinstance(fixed, int) else BATCH)
    with result.timed("parameters"):
        run(result.legal, [PassCall("check", choice)], ctx)
        result.found = ctx.values["check"]
    try:
        with result.timed("compile"):
            _compile(model, result, loss, options)
        forward, labels = _with_loss(result, choice)
        with result.timed("plan"):
            _plan(result, forward, labels)
    except GraphcError as error:
        if isinstance(error, UsageError) and (loss is not None or options != CompileOptions()):
            raise
        with contextlib.suppress(GraphcError):
            _with_loss(result, choice)
        result.error = error
    return result


def _preparation(options: CompileOptions) -> list[PassCall]:
    """The passes that prepare the model itself, with its own batch and weights."""
    own = dataclasses.replace(options, batch=None, initialize=None)
    return list(itertools.takewhile(lambda step: step.name != "train_mode", training_pipeline(MSE(), optim.SGD(), own)))


def _compile(model: ir.Model, result: Trainability, loss: Loss | None, options: CompileOptions) -> None:
    """Compile with the first loss that trains.

    Raises:
        GraphcError: none does; the first one's error.
    """
    if not any(parameter["trains"] for parameter in result.found["parameters"]) and loss is None:
        raise NotTrainableError(_why_nothing_trains(result.found["parameters"]))
    losses = [loss] if loss is not None else [LOSSES[a.kind](**a.options()) for a in result.found["losses"][:LOSSES_TRIED]]
    if not losses:
        outputs = ", ".join(map(describe_value, result.legal.graph.outputs))
        raise NotTrainableError(f"no output is or depends on a floating-point tensor that a loss could take: {outputs}")
    if result.rebatched and options.batch is None:
        options = dataclasses.replace(options, batch="batch")
    first: GraphcError | None = None
    for candidate in losses:
        try:
            result.program = compiler.compile(model, loss=candidate, optimizer=optim.parse(OPTIMIZER), **vars(options))
        except GraphcError as error:
            if first is None:
                first, result.loss = error, candidate
            continue
        result.loss = candidate
        return
    if first is not None:
        raise first


def _why_nothing_trains(parameters: Sequence[Mapping[str, Any]]) -> str:
    if not parameters:
        return "nothing to train: the model has no parameters, that is, no floating-point initializers"
    counts: dict[str, int] = {}
    for parameter in parameters:
        counts[parameter["reason"]] = counts.get(parameter["reason"], 0) + 1
    return "nothing to train: " + ", ".join(f"{number} × {reason}" for reason, number in counts.items())


def _with_loss(result: Trainability, choice: Mapping[str, Any]) -> tuple[ir.Model, Labels]:
    """The legalised model with the chosen loss; ``found`` becomes what the ``check`` pass says of the path to that loss."""
    forward, ctx = result.legal.clone(), Context(done=["legalize"], values={DECISIONS: result.decisions})
    if result.rebatched:
        run(forward, [PassCall("rebatch")], ctx)
    if result.loss is not None:
        run(forward, [result.loss.step(), PassCall("check", choice)], ctx)
        found = ctx.values["check"]
        of_file = [parameter for parameter in found["parameters"] if parameter["name"] not in RESERVED]
        result.found = {"parameters": of_file, "missing": found["missing"], "losses": result.found["losses"]}
    return forward, ctx.values.get("labels", {})


def _plan(result: Trainability, forward: ir.Model, labels: Labels) -> None:
    """Plan a step for the first sizes that the model takes, and measure its memory.

    Raises:
        GraphcError: no sizes fit; the error of the first.
    """
    if result.program is None:
        return
    graph, first = result.program.model.graph, None
    inputs = [value for value in graph.inputs if value.name not in labels]
    candidates = list(likely_shapes(inputs, result.batch_size))
    result.guessed = len(candidates) > 1
    for shapes in candidates:
        missing = [value.name for value in inputs if value.name not in shapes]
        if missing:
            raise NotTrainableError(f"the rank of the input {missing[0]!r} is unknown: say --shape {missing[0]}=1,2,3")
        try:
            complete = {**shapes, **_label_shapes(forward, labels, shapes)}
            result.memory = memory_of(result.program.model, complete)
        except (FeedError, ModelError) as error:
            first = first or error
            continue
        result.shapes = complete
        return
    if first is not None:
        tried = "; ".join(_sizes(shapes) for shapes in candidates)
        hint = f" (tried with {tried}; give sizes that the model takes: --shape NAME=1,2,3)" if result.guessed else ""
        first.args = (f"{first}{hint}",)
        raise first


def _sizes(shapes: Mapping[str, Sequence[int]]) -> str:
    return " ".join(f"{name}={','.join(map(str, shape))}" for name, shape in shapes.items())


def _label_shapes(forward: ir.Model, labels: Labels, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Shapes of the inputs that the loss added, where the model's inputs have ``shapes``."""
    found = {}
    for name, (scores, axis, keepdims) in labels.items():
        found[name] = _shape_of(forward, scores, shapes)
        if axis is not None:
            found[name][axis : axis + 1] = [1] if keepdims else []
    return found


def _shape_of(model: ir.Model, value: ir.Value, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """The shape of ``value`` of a model where the model's inputs have ``shapes``; inputs without one must not lead to it."""
    if value.producer() is None:  # an output of the model that is its input or initializer
        return [int(d) for d in shapes.get(value.name or "", shape_of(value) if static_dims(value) is not None else ())]
    copy = model.clone()
    target = next(v for node in copy.graph for v in node.outputs if v.name == value.name)
    copy.graph.outputs[:] = [target]
    wanted = {target}
    for node in reversed(copy.graph):
        if any(out in wanted for out in node.outputs):
            wanted.update(v for v in (*node.inputs, *captured(node)) if v is not None)
        else:
            copy.graph.remove(node)
    copy.graph.inputs[:] = [v for v in copy.graph.inputs if v.name in shapes]
    found = dims(specialise(copy, shapes).graph.outputs[0])
    if found is None:  # it depends on constants that are still computed
        run(copy, [PassCall("simplify")])
        found = dims(specialise(copy, shapes).graph.outputs[0])
    return [d if isinstance(d, int) else 1 for d in found or dims(value) or ()]


def unfed(result: Trainability) -> list[str]:
    """Why the arrays of a data file cannot feed the program: inputs whose first axis is not the sample."""
    if result.program is None:
        return []
    batch, found = batch_dim(result.legal.graph), []
    for value in result.program.model.graph.inputs:
        sizes = dims(value) or ()
        if not sizes:
            found.append(f"{describe_value(value)} has no axis of samples")
        elif isinstance(batch, str) and batch in sizes[1:] and sizes[0] != batch:
            found.append(f"{describe_value(value)} has its samples on axis {sizes.index(batch)}")
        elif isinstance(sizes[0], int) and sizes[0] != batch:
            found.append(f"{describe_value(value)} has {sizes[0]} rows for any number of samples")
        elif isinstance(batch, int) and result.shapes.get(value.name or "", [batch])[0] != batch:
            found.append(f"{describe_value(value)} has no axis of samples: the model is fixed at {batch} and drops that axis")
    return found

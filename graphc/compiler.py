"""Compiles a model to a training program (``graphc.compile``) or adds gradients to it (``graphc.grad``)."""

from __future__ import annotations

import functools
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, get_type_hints

import onnx_ir as ir

from graphc import frontends, parallel, stages
from graphc.backend import check_backend
from graphc.device import Array
from graphc.errors import UnsupportedOpError, UsageError, counted, nearest
from graphc.frontends.annotations import shards as shard_annotations
from graphc.frontends.annotations import stages as stage_annotations
from graphc.ir import DOMAIN
from graphc.ir.bound_inputs import bind_inputs
from graphc.ir.declare import is_update
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import describe_value, is_float
from graphc.ir.names import BUFFER, DETERMINISTIC, GRADIENT_OF, MESH, RESERVED, SCHEDULE
from graphc.ir.ops.collectives import collective_of
from graphc.ir.parameters import DECISIONS, Decision, matches
from graphc.ir.updates import trains
from graphc.losses import Loss
from graphc.mesh import Mesh
from graphc.optim import Optimizer
from graphc.options import CompileOptions, ReadOptions, Shapes, axes_of, constants_of, key_values, scales_of, shape_texts
from graphc.pipeline import PASSES, Context, PassCall, parse, run

ModelSource = Any
"""A path, ``onnx.ModelProto``, ``onnx_ir.Model`` or (with ``example_inputs``) ``torch.nn.Module``."""


@dataclass(frozen=True, kw_only=True)
class CompileArguments(CompileOptions):
    """All arguments of :func:`compile` besides the model.

    Attributes:
        loss: one of :mod:`graphc.losses`.
        optimizer: one of :mod:`graphc.optim`.
        mesh: ``Mesh(data=N)``; None takes the world's size when the trainer starts.
        backend: ``"auto"``, or a name that ``graphc backends`` lists, with options of the backend: ``"cupy:tf32=true"``.
        passes: a pipeline (text or steps) instead of :func:`training_pipeline`.
        example_inputs: inputs with which the ``torch.nn.Module`` is exported.
        dynamic_axes: axes of these inputs that may have any size beside the batch: ``{"tokens": {1: "sequence"}}``.
        dump_dir: folder for the model after each pass.
        after: called with (step, model, seconds) after each pass.
    """

    loss: Loss
    optimizer: Optimizer
    mesh: Mesh | None = None
    backend: str = "auto"
    passes: str | Sequence[PassCall] | None = None
    example_inputs: Sequence[Any] | None = None
    dynamic_axes: Mapping[str, Mapping[int, str] | Sequence[int]] | None = None
    dump_dir: str | Path | None = None
    after: Callable[[PassCall, ir.Model, float], None] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Program:
    """A compiled training program; hand it to :class:`graphc.Trainer`.

    Attributes:
        model: the whole training graph: forward, loss, backward, AllReduces, updates.
        evaluation: builds :attr:`inference`.
        original: the model as given.
        changed: the legalised model, if passes changed what it computes.
        arguments: the arguments of ``compile``, except those that serve one call only.
        pipeline: the passes that built ``model``, as text.
        log: lines that the passes reported.
        imports: the leading passes, which prepared the model itself.
    """

    model: ir.Model
    evaluation: stages.Evaluation
    original: ir.Model
    changed: ir.Model | None
    arguments: CompileArguments = field(repr=False)
    pipeline: str
    log: list[str]
    imports: tuple[PassCall, ...]

    def __repr__(self) -> str:
        graph, kinds = self.model.graph, nodes_by_kind(self.model)
        trained = sum(is_update(node) and trains(node) for node in graph)
        inputs, outputs = (", ".join(map(describe_value, values)) for values in (graph.inputs, graph.outputs))
        mesh = "" if self.mesh is None else f", mesh {self.mesh}"
        return (
            f"Program {graph.name!r} trains {counted(trained, 'parameter')}: {counted(kinds['compute'], 'node')}, "
            f"{counted(kinds['collectives'], 'collective')}, backend {self.backend}{mesh}\n"
            f"  takes    {inputs}\n"
            f"  reports  {outputs}"
        )

    @property
    def mesh(self) -> Mesh | None:
        """The mesh axes, or None: the data axis takes the size of the world."""
        return self.arguments.mesh

    @property
    def backend(self) -> str:
        """Name of the backend and its options, or ``"auto"``."""
        return self.arguments.backend

    def trained(self, values: Mapping[str, Array]) -> ir.Model:
        """The model with trained weights, in inference mode: the file as given, unless passes changed what it computes.

        Args:
            values: name → array.
        """
        if self.changed is None:
            return frontends.write_back(self.original, values, frontends.quantized_parameters(self.inference.graph))
        model = frontends.write_back(self.changed, values)
        decompose_graph(model.graph, lambda node: node.domain != DOMAIN)
        return model

    def recompile(self, **changes: Any) -> Program:
        """Compile the same model with the same arguments, except for ``changes``.

        Raises:
            UsageError: the program has a pipeline of its own, or the changed arguments exclude each other.
        """
        if self.arguments.passes is not None:
            raise UsageError("the program has a pipeline of its own")
        return compile(self.original, **(vars(self.arguments) | changes))

    @property
    def inference(self) -> ir.Model:
        """The evaluation graph: the same forward pass in inference mode with loss and metrics."""
        return self.evaluation.model


def training_pipeline(
    loss: Loss, optimizer: Optimizer, options: CompileOptions | None = None, mesh: Mesh | None = None
) -> list[PassCall]:
    """The default pipeline: each line one pass, in order."""
    options, mesh = options or CompileOptions(), mesh or Mesh()
    low, again = precision_options(options.precision), recompute_options(options.recompute)
    batch, initialize, freeze = options.batch, options.initialize, options.freeze
    seed = {"seed": options.seed} if options.seed else {}
    return [
        # one opset, parameters as initializers, everything typed
        PassCall("legalize", {"train": options.train, "shapes": shape_texts(options.shapes)}),
        # float weights and products in the place of integers
        PassCall("dequantize", {"mode": options.dequantize, "train": options.train}),
        *(
            [PassCall("rebatch", {"batch": batch})] if batch is not None else []
        ),  # a baked batch size becomes another, or a symbol
        *(
            [PassCall("initialize", {"method": initialize, "seed": options.seed})] if initialize else []
        ),  # files without trained weights
        PassCall("draws", seed),  # random numbers from the seed, the step and the sample
        PassCall("train_mode", {"freeze": freeze, **seed}),  # BatchNormalization and Dropout back to training behaviour
        *parallel.forward_steps(options, mesh),  # BatchNormalization over the global batch
        loss.step(),  # Σ loss and Σ weight
        *parallel.tensor_steps(options, mesh),  # weights, and the work on them, divided among ranks
        PassCall("gathers"),  # as slices, where indices are constants in a row
        PassCall("boxes"),  # assignments to slices as choices
        PassCall("early_pools"),  # in front of Relu and Concat, which then have fewer elements
        PassCall("einsum"),  # as products, which kernels and the next pass know
        PassCall("attention"),  # one op, which a backend may compute in cache
        *([PassCall("mixed_precision", low)] if low else []),  # products in a low type, before their gradients exist
        PassCall("whole_windows"),  # convolutions with one window as products
        PassCall("grouped_products"),  # each row of a mixture of experts times the matrices of its own experts
        *parallel.stage_steps(options, mesh),  # every node on a stage of the pipe axis
        PassCall("autodiff", {"train": options.train, "freeze": freeze}),  # the backward subgraph of Σ loss
        *([PassCall("recompute", again)] if again else []),  # drop activations and recompute them in the backward pass
        optimizer.step(),  # one update node a parameter
        *(parallel.master_steps(options) if low else []),  # float32 parameters for updates, low copies for products
        *parallel.reduction_steps(options, mesh),  # between every gradient and its update
        *([PassCall("loss_scaling")] if low and low["dtype"] == "fp16" else []),  # unscale, skip overflows, adapt the scale
        *parallel.gradient_steps(options, mesh),  # micro-batches, clipping, compression, skipping
        PassCall("bucket", {"mb": options.bucket_mb}),  # flat buffers, one AllReduce and one update each
        *parallel.strategy_steps(options, mesh),  # shards of state and updates
        PassCall("schedule"),  # start early, wait late
        PassCall("simplify"),
        PassCall("verify"),
    ]


def precision_options(text: str | None) -> dict[str, Any]:
    """Parse ``"bf16:deny=Conv"`` to options of ``mixed_precision``; none for None and ``fp32``.

    Raises:
        UsageError: an unknown precision or option.
    """
    name, _, rest = (text or "fp32").partition(":")
    if name == "fp32" and not rest:
        return {}
    if name not in ("bf16", "fp16"):
        raise UsageError(f"precision {text!r}{nearest(name, ('fp32', 'bf16', 'fp16'))}; it is fp32, bf16 or fp16")
    return {"dtype": name, **PASSES["mixed_precision"].bind(key_values(rest))}


def recompute_options(text: str | None) -> dict[str, Any]:
    """Parse ``"all"`` or ``"budget_mb=64,batch=32"`` to options of ``recompute``; none for None and ``none``.

    Raises:
        UsageError: an unknown mode or option.
    """
    if text is None or text == "none":
        return {}
    mode, _, rest = text.partition(",")
    found = PASSES["recompute"].bind(key_values(text if "=" in mode else rest))
    return found if "=" in mode else {"mode": mode, **found}


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's cycle collector while graphs are built; may be nested.

    The collector would otherwise traverse all their nodes repeatedly.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


P = ParamSpec("P")


def _with_keywords_of(
    make: Callable[P, CompileArguments],
) -> Callable[[Callable[[ModelSource, CompileArguments], Program]], Callable[Concatenate[ModelSource, P], Program]]:
    """Let a function take the fields of its second argument as keywords."""

    def decorate(
        function: Callable[[ModelSource, CompileArguments], Program],
    ) -> Callable[Concatenate[ModelSource, P], Program]:
        def call(model: ModelSource, *args: P.args, **keywords: P.kwargs) -> Program:
            return function(model, make(*args, **keywords))

        whole, hints = inspect.signature(function), get_type_hints(make)
        first = next(iter(whole.parameters.values()))
        fields = [p.replace(annotation=hints[p.name]) for p in inspect.signature(make).parameters.values()]
        required_first = sorted(fields, key=lambda p: p.default is not p.empty)
        call.__signature__ = whole.replace(parameters=[first, *required_first])  # type: ignore[attr-defined]
        functools.update_wrapper(call, function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        return call  # type: ignore[return-value]  # Concatenate has no way to say that the model may be named

    return decorate


@_with_keywords_of(CompileArguments)
@collection_paused()
def compile(model: ModelSource, arguments: CompileArguments) -> Program:
    """Compile ``model`` into a training program: ``graphc.compile(model, loss=…, optimizer=…, strategy="zero:stage=2")``.

    Args:
        model: path, ``onnx.ModelProto``, ``onnx_ir.Model``, or ``torch.nn.Module`` with ``example_inputs``. Of a PyTorch
            module, parameters with ``requires_grad=False`` are frozen.
        arguments: given as keywords: the fields of :class:`CompileArguments` and :class:`graphc.options.CompileOptions`.

    Raises:
        GraphcError: with the pass, the node and what to do.
    """
    _check_parts(arguments.loss, arguments.optimizer)
    check_backend(arguments.backend)
    parallel.check_tensor(arguments, arguments.mesh)
    parallel.check_mesh(arguments, arguments.mesh)
    original = frontends.load(
        model, example_inputs=arguments.example_inputs, dynamic_axes=arguments.dynamic_axes, reading=arguments
    )
    check_untrained(original)
    freeze, train = ([names] if isinstance(names, str) else names for names in (arguments.freeze, arguments.train))
    if arguments.example_inputs is not None:
        held = original.graph.initializers
        still = [name for name in frontends.frozen(model) if name in held and BUFFER not in held[name].metadata_props]
        freeze = [*(freeze or ()), *still]
    mesh = parallel.settle_nodes(arguments, arguments.mesh)
    once: dict[str, Any] = dict.fromkeys(("example_inputs", "dynamic_axes", "dump_dir", "after"))
    kept = replace(arguments, freeze=freeze, train=train, mesh=mesh, **once)
    if isinstance(arguments.passes, str):
        steps = parse(arguments.passes)
    elif arguments.passes is not None:
        steps = list(arguments.passes)
    else:
        steps = training_pipeline(kept.loss, kept.optimizer, kept, kept.mesh)
    working = original.clone()
    if kept.mesh is not None and kept.mesh.pipe > 1 and not kept.cut and not kept.place:
        placed = stage_annotations.read(original, working)
        if placed:
            kept = replace(kept, place=placed)
            steps = training_pipeline(kept.loss, kept.optimizer, kept, kept.mesh) if arguments.passes is None else steps
    if kept.mesh is not None and kept.mesh.tensor > 1 and not kept.shard and arguments.passes is None:
        asked = shard_annotations.read_shards(original, kept.mesh)
        if asked:
            kept = replace(kept, shard=asked)
            steps = training_pipeline(kept.loss, kept.optimizer, kept, kept.mesh)
    ctx = Context()
    dump = Path(arguments.dump_dir) if arguments.dump_dir is not None else None
    bind_inputs(working, constants_of(arguments.inputs), axes_of(arguments.batch_axis), scales_of(arguments.scale))

    def run_step(step: PassCall) -> None:
        run(working, [step], ctx, after=arguments.after, dump_dir=dump)

    split = stages.run_on_model(working, steps, run_step)
    _check_inputs(working.graph)
    if train and not freeze:
        _warn_of_others(ctx.values.get(DECISIONS, ()), train)
    # no other runtime takes ONNX's Gradient: who exports the trained model gets the nodes that compute it
    gradients = any(node.op_type == "Gradient" and node.domain != "" for node in original.graph)
    changed = working.clone() if split.changed or gradients else None
    evaluation = stages.evaluation_graph(working, next((s for s in split.rest if s.name == "loss"), kept.loss.step()), ctx)
    if kept.mesh is not None:
        working.metadata_props[MESH] = str(kept.mesh)
    if kept.deterministic is not None:
        working.metadata_props[DETERMINISTIC] = kept.deterministic
    stages.run_on_training(working, split.rest, run_step)
    if not any(is_update(node) for node in working.graph):
        raise UsageError("the pipeline leaves nothing to train: it has no 'optimizer' pass")
    if kept.mesh is not None and kept.mesh.pipe > 1 and SCHEDULE not in working.metadata_props:
        raise UsageError(f"the mesh {kept.mesh} needs stages, and the passes have neither 'pipe_stages' nor 'place'")
    frontends.hold(original, {name for name, value in working.graph.initializers.items() if is_float(value)})
    text = ",".join(str(s) for s in (*split.own, *split.rest))
    return Program(working, evaluation, original, changed, kept, text, ctx.log, tuple(split.own))


def _warn_of_others(decisions: Sequence[Decision], train: Sequence[str]) -> None:
    """Warn who names only parameters that train anyway: elsewhere that leaves the others as they are."""
    named, others = ([d for d in decisions if d.trains and matches(d.name, train) == part] for part in (True, False))
    if named and others and not any(decision.asked for decision in named):
        warnings.warn(
            f"train={', '.join(map(repr, train))} changes nothing: what it names trains anyway, and so do"
            f" {counted(len(others), 'other parameter')}; add freeze=['*'] (--freeze '*') to train nothing else",
            stacklevel=5,
        )


def _check_parts(loss: Any, optimizer: Any) -> None:
    for what, given, kind, example in (
        ("loss", loss, Loss, "graphc.losses.MSE(), or graphc.losses.parse('mse')"),
        ("optimizer", optimizer, Optimizer, "graphc.optim.Adam(lr=1e-3), or graphc.optim.parse('adam:lr=1e-3')"),
    ):
        if not isinstance(given, kind):
            raise UsageError(f"{what}={given!r} is not a graphc object; pass one such as {example}")


def _check_inputs(graph: ir.Graph) -> None:
    for value in graph.inputs:
        if not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.STRING:
            raise UnsupportedOpError(
                f"training cannot feed the input {describe_value(value)}: it is not a numeric tensor;"
                " cut the model behind what reads it (onnx.utils.extract_model), or make it a constant"
            )


def check_untrained(model: ir.Model) -> None:
    """Reject training graphs given as models, and values with reserved names.

    Raises:
        UsageError: the model holds updates, or a value with a reserved name.
    """
    again = "give the model that it was compiled from"
    if any(is_update(node) for node in model.graph):
        raise UsageError(f"this is a training graph already, with a backward pass and updates; {again}")
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for node in model.graph for v in node.outputs)]
    taken = sorted({value.name for value in values if value.name in RESERVED})
    if taken:
        raise UsageError(f"the name {taken[0]!r} is reserved: rename it, or, if this is a training graph, {again}")


def grad(
    model: ModelSource,
    *,
    of: str | Sequence[str],
    wrt: str | Sequence[str],
    example_inputs: Sequence[Any] | None = None,
    dynamic_axes: Mapping[str, Mapping[int, str] | Sequence[int]] | None = None,
    standard: bool = True,
    shapes: Shapes = None,
    max_model_bytes: int | None = None,
    external_data: Sequence[str] | None = None,
) -> ir.Model:
    """Add gradients to a model as outputs.

    Args:
        model: as for :func:`compile`.
        of: the value to differentiate (a scalar, otherwise summed), or several.
        wrt: a value or several (inputs, parameters, intermediates); output ``"<name>::grad"`` is added for each, or
            ``"<name>::grad.1"`` if an earlier gradient in a model returned by this function has that name.
        standard: decompose ``graphc`` ops, so that any ONNX runtime can run the result.
        example_inputs, dynamic_axes, shapes, max_model_bytes, external_data: as for :func:`compile`.
    """
    reading = ReadOptions(max_model_bytes=max_model_bytes, external_data=external_data)
    copy = frontends.load(model, example_inputs=example_inputs, dynamic_axes=dynamic_axes, reading=reading).clone()
    targets = [of] if isinstance(of, str) else list(of)
    wrt = [wrt] if isinstance(wrt, str) else wrt
    ctx = run(copy, [PassCall("legalize", {"shapes": shape_texts(shapes)}), PassCall("dequantize")])
    earlier = set(copy.graph)
    run(copy, [PassCall("autodiff", {"of": targets, "wrt": list(wrt)})], ctx)
    new = (v for node in copy.graph if node not in earlier for v in node.outputs)
    made = {v.metadata_props[GRADIENT_OF]: v for v in new if GRADIENT_OF in v.metadata_props}
    copy.graph.outputs.extend(made[name] for name in wrt)
    if standard:
        decompose_graph(copy.graph, lambda node: False)
    run(copy, [PassCall("simplify")])
    return copy


def nodes_by_kind(model: ir.Model) -> Mapping[str, int]:
    """Count the compute, collective and update nodes of a training graph."""
    counts = {"compute": 0, "collectives": 0, "updates": 0}
    for node in model.graph:
        if is_update(node):
            counts["updates"] += 1
        elif collective_of(node) is not None:
            counts["collectives"] += not node.op_type.endswith("Wait")
        elif node.op_type != "Constant":
            counts["compute"] += 1
    return counts

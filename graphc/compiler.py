"""``graphc.compile``: from a model to a training program; ``graphc.grad``: from a model to a model with gradients."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphc import frontends
from graphc.errors import UnsupportedOpError, UsageError, nearest
from graphc.ir.builder import Builder
from graphc.ir.declare import is_update
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import describe_value
from graphc.ir.names import DETERMINISTIC, GRADIENT_OF, MESH, RESERVED
from graphc.ir.ops.collectives import collective_of
from graphc.losses import Loss
from graphc.mesh import Mesh
from graphc.optim import Optimizer
from graphc.parallel import Parallel
from graphc.pipeline import PASSES, Context, PassCall, parse, run

ModelSource = Any
"""A path, ``onnx.ModelProto``, ``onnx_ir.Model`` or (with ``example_inputs``) ``torch.nn.Module``."""

IMPORT_PASSES = ("legalize", "rebatch", "initialize")
"""Passes that prepare the model itself; what follows them makes it a training graph."""

ONCE = ("model", "passes", "example_inputs", "dump_dir", "after")
"""Arguments of :func:`compile` that do not belong to a program."""


class Evaluation:
    """The evaluation graph, simplified when somebody asks for it first: a run that only trains never does."""

    def __init__(self, model: ir.Model, ctx: Context) -> None:
        self._model, self._ctx = model, ctx
        self._lock, self._done = threading.Lock(), False

    @property
    def model(self) -> ir.Model:
        with self._lock:  # worker threads share a program
            if not self._done:
                run(
                    self._model,
                    [PassCall("attention", {"saves": "logsumexp"}), PassCall("simplify"), PassCall("verify")],
                    self._ctx,
                )
                self._done = True
        return self._model

    def __getstate__(self) -> ir.Model:
        return self.model  # a lock cannot be copied, nor sent to another process

    def __setstate__(self, model: ir.Model) -> None:
        self.__init__(model, Context())  # type: ignore[misc]
        self._done = True


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled training program; hand it to :class:`graphc.Trainer`.

    Attributes:
        model: the whole training graph: forward, loss, backward, AllReduces, updates.
        evaluation: what makes :attr:`inference`.
        original: the model as it was given, into which trained weights are written back.
        mesh: the axes of workers, or None: as many on the data axis as the world has.
        backend: name of the backend and its options, or ``"auto"``.
        pipeline: the passes that made ``model``, as text.
        log: what the passes reported.
        imports: the first of those passes, which prepared the model itself.
        again: :func:`compile` of the same model with the same options but for those that it is called with; None: the program
            has a pipeline of its own.
    """

    model: ir.Model
    evaluation: Evaluation
    original: ir.Model
    mesh: Mesh | None = None
    backend: str = "auto"
    pipeline: str = ""
    log: list[str] = field(default_factory=list)
    imports: tuple[PassCall, ...] = ()
    again: Callable[..., Program] | None = field(default=None, repr=False, compare=False)

    @property
    def inference(self) -> ir.Model:
        """The evaluation graph: the same forward pass in inference mode with loss and metrics."""
        return self.evaluation.model


def training_pipeline(
    loss: Loss,
    optimizer: Optimizer,
    *,
    freeze: Sequence[str] | None = None,
    train: Sequence[str] | None = None,
    batch: int | str | None = None,
    initialize: str | None = None,
    seed: int = 0,
    bucket_mb: float = 25.0,
    precision: str | None = None,
    recompute: str | None = None,
    parallel: Parallel | None = None,
) -> list[PassCall]:
    """The default pipeline: each line one pass, in order."""
    parallel = parallel or Parallel()
    low, again = precision_options(precision), recompute_options(recompute)
    return [
        PassCall("legalize"),  # one opset, parameters as initializers, everything typed
        *(
            [PassCall("rebatch", {"batch": batch})] if batch is not None else []
        ),  # a baked batch size becomes another, or a symbol
        *(
            [PassCall("initialize", {"method": initialize, "seed": seed})] if initialize else []
        ),  # files without trained weights
        PassCall("train_mode", {"freeze": freeze}),  # BatchNormalization and Dropout back to training behaviour
        *parallel.forward_steps(),  # BatchNormalization over the global batch
        loss.step(),  # Σ loss and Σ weight
        PassCall("attention"),  # one op, which a backend may compute in cache
        *([PassCall("mixed_precision", low)] if low else []),  # products in a low type, before their gradients exist
        PassCall("autodiff", {"train": train, "freeze": freeze}),  # the backward subgraph of Σ loss
        *([PassCall("recompute", again)] if again else []),  # fewer activations wait for the backward pass
        optimizer.step(),  # one update node a parameter
        *(parallel.master_steps() if low else []),  # float32 parameters for updates alone, low copies for products
        PassCall("allreduce"),  # between every gradient and its update
        *([PassCall("loss_scaling")] if low and low["dtype"] == "fp16" else []),  # unscale, skip overflows, adapt the scale
        *parallel.gradient_steps(),  # micro-batches, clipping, compression, skipping
        PassCall("bucket", {"mb": bucket_mb}),  # flat buffers, one AllReduce and one update each
        *parallel.strategy_steps(),  # who holds and updates what
        PassCall("schedule"),  # start early, wait late
        PassCall("simplify"),
        PassCall("verify"),
    ]


def precision_options(text: str | None) -> dict[str, Any]:
    """``"bf16:deny=Conv"`` as options of ``mixed_precision``; nothing for None and ``fp32``.

    Raises:
        UsageError: an unknown precision or option.
    """
    name, _, rest = (text or "fp32").partition(":")
    if name == "fp32" and not rest:
        return {}
    if name not in ("bf16", "fp16"):
        raise UsageError(f"precision {text!r}{nearest(name, ('fp32', 'bf16', 'fp16'))}; it is fp32, bf16 or fp16")
    return {"dtype": name, **_options("mixed_precision", rest)}


def recompute_options(text: str | None) -> dict[str, Any]:
    """``"all"`` or ``"budget_mb=64,batch=32"`` as options of ``recompute``; nothing for None and ``none``.

    Raises:
        UsageError: an unknown mode or option.
    """
    if text is None or text == "none":
        return {}
    mode, _, rest = text.partition(",")
    found = _options("recompute", text if "=" in mode else rest)
    return found if "=" in mode else {"mode": mode, **found}


def _options(name: str, text: str) -> dict[str, Any]:
    """``"key=value,key=value"`` as the bound options of a pass."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    return PASSES[name].bind({key.strip(): value.strip() for key, _, value in pairs})


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's cycle collector while graphs are built; may be nested.

    The collector would walk over all their nodes again and again.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@collection_paused()
def compile(
    model: ModelSource,
    *,
    loss: Loss,
    optimizer: Optimizer,
    mesh: Mesh | None = None,
    backend: str = "auto",
    passes: str | Sequence[PassCall] | None = None,
    freeze: Sequence[str] | None = None,
    train: Sequence[str] | None = None,
    batch: int | str | None = None,
    initialize: str | None = None,
    seed: int = 0,
    bucket_mb: float = 25.0,
    precision: str | None = None,
    recompute: str | None = None,
    strategy: str = "mirrored",
    accumulate: int = 1,
    sync_batchnorm: bool = False,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    compress: str | None = None,
    deterministic: str | None = None,
    nonfinite: str = "stop",
    example_inputs: Sequence[Any] | None = None,
    dump_dir: str | Path | None = None,
    after: Callable[[PassCall, ir.Model, float], None] | None = None,
) -> Program:
    """Compile ``model`` into a training program.

    Args:
        model: path, ``onnx.ModelProto``, ``onnx_ir.Model``, or ``torch.nn.Module`` with ``example_inputs``.
        loss: one of :mod:`graphc.losses`.
        optimizer: one of :mod:`graphc.optim`.
        mesh: ``Mesh(data=N)``; None takes the world's size when the trainer starts.
        backend: ``"auto"``, or a name that ``graphc backends`` lists, with options of the backend: ``"cupy:tf32=true"``.
        passes: a pipeline (text or steps) instead of :func:`training_pipeline`.
        freeze, train: glob patterns over parameter names; of a PyTorch module, parameters with ``requires_grad=False`` are
            frozen as well.
        batch: new batch size, or a symbol's name, for a model exported with a fixed one.
        initialize: ``he``, ``glorot``, ``normal``, ``uniform`` or ``zeros`` for a file without trained weights.
        seed: of initialisation and random ops.
        bucket_mb: size of a gradient bucket in megabytes.
        precision: ``bf16`` or ``fp16`` (``fp32`` and None: as the file has it), with options of the ``mixed_precision`` pass:
            ``"bf16:deny=Conv|head/*"``.
        recompute: ``cheap``, ``all`` or options of the ``recompute`` pass: ``"budget_mb=64,batch=32"``.
        strategy, accumulate, sync_batchnorm, clip_norm, clip_value, compress, deterministic, nonfinite: how workers divide
            the work; see :class:`graphc.parallel.Parallel`.
        dump_dir: folder for the model after each pass.
        after: called with (step, model, seconds) after each pass.

    Raises:
        GraphcError: with the pass, the node and what to do.
    """
    freeze, train = ([names] if isinstance(names, str) else names for names in (freeze, train))
    options = {name: value for name, value in locals().items() if name not in ONCE}
    _check_parts(loss, optimizer)
    original = frontends.load(model, example_inputs=example_inputs)
    check_untrained(original)
    if example_inputs is not None:
        held = [name for name in frontends.frozen(model) if name in original.graph.initializers]
        freeze = options["freeze"] = [*(freeze or ()), *held]
    if passes is not None:
        steps = parse(passes) if isinstance(passes, str) else list(passes)
    else:
        steps = training_pipeline(
            loss,
            optimizer,
            freeze=freeze,
            train=train,
            batch=batch,
            initialize=initialize,
            seed=seed,
            bucket_mb=bucket_mb,
            precision=precision,
            recompute=recompute,
            parallel=Parallel(strategy, accumulate, sync_batchnorm, clip_norm, clip_value, compress, deterministic, nonfinite),
        )
    ctx = Context()
    dump = Path(dump_dir) if dump_dir is not None else None
    working = original.clone()
    cut = next((k for k, s in enumerate(steps) if s.name not in IMPORT_PASSES), len(steps))
    run(working, steps[:cut], ctx, after=after)
    _check_inputs(working.graph)
    evaluation = evaluation_graph(working, loss, ctx)
    if mesh is not None:
        working.metadata_props[MESH] = str(mesh)
    if deterministic is not None:
        working.metadata_props[DETERMINISTIC] = deterministic
    run(working, steps[cut:], ctx, after=after, dump_dir=dump)
    if not any(is_update(node) for node in working.graph):
        raise UsageError("the pipeline leaves nothing to train: it has no 'optimizer' pass")
    text = ",".join(str(s) for s in steps)
    again = functools.partial(compile, original, **options) if passes is None else None
    return Program(working, evaluation, original, mesh, backend, text, ctx.log, tuple(steps[:cut]), again)


def _check_parts(loss: Any, optimizer: Any) -> None:
    for what, given, kind, example in (
        ("loss", loss, Loss, "graphc.losses.MSE(), or graphc.losses.parse('mse')"),
        ("optimizer", optimizer, Optimizer, "graphc.optim.Adam(lr=1e-3), or graphc.optim.parse('adam:lr=1e-3')"),
    ):
        if not isinstance(given, kind):
            raise UsageError(f"{what}={given!r} is none of graphc's; give an object such as {example}")


def _check_inputs(graph: ir.Graph) -> None:
    for value in graph.inputs:
        if not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.STRING:
            raise UnsupportedOpError(
                f"training cannot feed the input {describe_value(value)}: it is no tensor of numbers;"
                " cut the model behind what reads it (onnx.utils.extract_model), or make it a constant"
            )


def check_untrained(model: ir.Model) -> None:
    """Refuse a training graph where a model is wanted, and names that a training graph keeps for itself.

    Raises:
        UsageError: the model holds updates, or a value with a reserved name.
    """
    again = "give the model that it was compiled from"
    if any(is_update(node) for node in model.graph):
        raise UsageError(f"this is a training graph already, with a backward pass and updates; {again}")
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for node in model.graph for v in node.outputs)]
    taken = sorted({value.name for value in values if value.name in RESERVED})
    if taken:
        raise UsageError(f"graphc keeps the name {taken[0]!r} for itself: rename it, or, if this is a training graph, {again}")


def evaluation_graph(legalised: ir.Model, loss: Loss, ctx: Context) -> Evaluation:
    """A copy of the legalised model in inference mode whose outputs are the loss and metrics with their sums."""
    model = legalised.clone()
    inner = Context(done=list(ctx.done))
    run(model, [PassCall("inference_mode"), loss.step()], inner)
    for node in list(model.graph):
        if node.op_type == "Mean" and node.domain == "graphc":
            # Evaluation adds sums over batches and divides once, so a short last batch weighs what it should.
            for value, part in zip(node.inputs, ("total", "weight"), strict=False):
                if value is not None:
                    op = Builder(model.graph)
                    model.graph.outputs.append(op.Identity(value, _outputs=[f"{node.outputs[0].name}::{part}"]))
    return Evaluation(model, inner)


def grad(
    model: ModelSource,
    *,
    of: str | Sequence[str],
    wrt: str | Sequence[str],
    example_inputs: Sequence[Any] | None = None,
    standard: bool = True,
) -> ir.Model:
    """A model that also returns gradients.

    Args:
        model: as for :func:`compile`.
        of: the value to differentiate (a scalar, or summed when it is not), or several.
        wrt: a value or several (inputs, parameters, intermediates); output ``"<name>::grad"`` is added for each, or
            ``"<name>::grad.1"`` where that name is taken: by an earlier gradient in a model that this function made.
        standard: decompose ``graphc`` ops, so that any ONNX runtime can run the result.
    """
    copy = frontends.load(model, example_inputs=example_inputs).clone()
    targets = [of] if isinstance(of, str) else list(of)
    wrt = [wrt] if isinstance(wrt, str) else wrt
    ctx = run(copy, [PassCall("legalize")])
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
    """How many nodes of a training graph are compute, collectives and updates."""
    counts = {"compute": 0, "collectives": 0, "updates": 0}
    for node in model.graph:
        if is_update(node):
            counts["updates"] += 1
        elif collective_of(node) is not None:
            counts["collectives"] += not node.op_type.endswith("Wait")
        elif node.op_type != "Constant":
            counts["compute"] += 1
    return counts

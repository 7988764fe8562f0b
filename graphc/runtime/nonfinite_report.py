"""Explains what stopped a step: the first NaN or infinity, found by replaying it, or a lost GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import STANDARD, Backend, Capabilities, host_backend
from graphc.device import Array, Memory
from graphc.distributed.communicator import Communicator
from graphc.distributed.host_staged import StagedCommunicator
from graphc.errors import DeviceError, DeviceMemoryError, NonFiniteError, UnsupportedOpError
from graphc.ir.declare import is_update
from graphc.ir.facts import constant, inputs_of, is_float, required, static_dims
from graphc.ir.ops.losses import label_checks
from graphc.ir.subgraphs import captured
from graphc.plan.segment_model import segment_model
from graphc.plan.specialise import prepare
from graphc.plan.steps import PlanStep
from graphc.runtime.executor import Executor
from graphc.runtime.state import State


def first_nonfinite(
    model: ir.Model, executor: Executor, feeds: Mapping[str, Array], state: State, backend: Backend
) -> str | None:
    """Find the first non-finite value in graph order: a feed, a parameter, or an intermediate of this rank.

    None when this rank's replay is finite throughout (the fault lies on another rank, or in a sum over ranks).
    """
    memory = backend.memory
    for name, array in [*feeds.items(), *state.arrays.items()]:
        if array.dtype.kind == "f" and not np.isfinite(memory.fetch(array)).all():
            return name
    shapes = {name: buffer.shape for name, buffer in executor.inputs.items()}
    native: Capabilities = STANDARD
    try:
        graph = prepare(model, shapes).graph
    except UnsupportedOpError:  # an op that only a kernel computes
        native = _WithKernels(backend)
        graph = prepare(model, shapes, native).graph
    nodes = [n for n in graph if not is_update(n) and n.op_type != "Constant"]
    made = {out for n in nodes for out in n.outputs}
    nodes = [n for n in nodes if all(v in made or v.producer() is None or constant(v) is not None for v in _operands(n))]
    sources = {v.name or "": feeds[v.name or ""] if v.is_graph_input() else state.array(v.name or "") for v in _read_by(nodes)}
    try:
        return _replay(nodes, sources, backend, native)
    except DeviceMemoryError:  # keeping all values needs more memory than a step
        host = host_backend(threads=1)
        try:
            return _replay(nodes, {name: memory.fetch(array) for name, array in sources.items()}, host, native)
        finally:
            host.close()


class _WithKernels(Capabilities):
    """A runtime of standard ops, and the kernels of a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def prefers_native(self, node: ir.Node) -> bool:
        return self.backend.prefers_native(node)


def _read_by(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """What nodes read that none of them makes."""
    made = {out for n in nodes for out in n.outputs}
    return list(dict.fromkeys(v for n in nodes for v in _operands(n) if v not in made and constant(v) is None))


def _operands(node: ir.Node) -> list[ir.Value]:
    return [*inputs_of(node), *captured(node)]


def explain(
    model: ir.Model,
    runs: Iterable[tuple[Executor, Mapping[str, Array]]],
    state: State,
    backend: Backend,
    comm: Communicator,
    step: int,
) -> NonFiniteError:
    """Explain what stops the run on all workers; each of them calls this with the plans and feeds of its own step."""
    tensor, nothing = None, True
    for executor, feeds in runs:
        nothing = nothing and _all_ignored(model.graph, feeds)
        tensor = tensor or first_nonfinite(model, executor, feeds, state, backend)
    everyone = comm.allgather_object((tensor, nothing)) if comm.size > 1 else [(tensor, nothing)]
    rank, first = next(((r, t) for r, (t, _) in enumerate(everyone) if t is not None), (comm.rank, None))
    because = "every label of the batch is the one that is ignored, so that there is nothing to average"
    advice = because if all(found for _, found in everyone) else _advice(model.graph, first, step)
    return nonfinite_error(step, first, f"rank {rank}", "in the gradients", advice)


def _all_ignored(graph: ir.Graph, feeds: Mapping[str, Array]) -> bool:
    """Whether a loss reads labels and ignores all of them."""
    labels = [(feeds.get(name), ignore) for name, (_, _, ignore) in label_checks(graph).items()]
    return bool(labels) and all(
        ignore is not None and isinstance(array, np.ndarray) and bool((array == ignore).all()) for array, ignore in labels
    )


_STEADIER = "a smaller learning rate or gradient clipping may help"


_NO_UPDATE_YET = (
    "no update has changed a weight yet: look at the data and at what this op gets, such as a division by zero, the logarithm"
    " or root of a number that is not positive, or numbers too large for their type"
)


def _advice(graph: ir.Graph, tensor: str | None, step: int) -> str:
    if any(value.name == tensor for value in graph.inputs):
        return "it is in the data"
    if tensor in graph.initializers:
        since = " or in a checkpoint" if step == 0 else ", in a checkpoint, or since an update"
        return f"it was there before the step: in the model's file{since}"
    return _STEADIER if step else _NO_UPDATE_YET


def nonfinite_error(step: int, tensor: str | None, who: str, elsewhere: str, advice: str | None = None) -> NonFiniteError:
    """What stops a run: the ``tensor`` in which :func:`first_nonfinite` found it on ``who``, or ``elsewhere``."""
    advice = advice or (_STEADIER if step else _NO_UPDATE_YET)
    where = f"first in tensor {tensor!r} on {who}" if tensor else f"{elsewhere}, and not again on replay"
    return NonFiniteError(
        f"a NaN or infinity appeared in step {step}, {where}; the state is that of the last good step ({advice})",
        step=step,
        tensor=tensor,
    )


def _replay(nodes: Sequence[ir.Node], sources: Mapping[str, Array], backend: Backend, native: Capabilities) -> str | None:
    """Name of the first output of ``nodes`` that is not finite; ``sources`` lie in the backend's memory, or in the host's."""
    memory = backend.memory
    arrays: dict[str, Array] = {}
    for name, array in sources.items():
        arrays[name] = np.ascontiguousarray(array).reshape(array.shape) if isinstance(array, np.ndarray) else array
        if isinstance(array, np.ndarray) and not memory.on_host:
            arrays[name] = _new(memory, array.shape, array.dtype)
            memory.copy(arrays[name], array)

    def place(value: ir.Value) -> Array:
        name, known = value.name or "", constant(value)
        if name not in arrays:
            arrays[name] = _new(memory, static_dims(value) or (), required(value.dtype).numpy())
            if known is not None:
                memory.copy(arrays[name], np.ascontiguousarray(known).reshape(known.shape))
        return arrays[name]

    for alone, group in itertools.groupby(nodes, native.prefers_native):
        for piece in ([node] for node in group) if alone else [list(group)]:
            if alone:
                (node,) = piece
                inputs = [None if v is None else place(v) for v in node.inputs]
                backend.bind_kernel(node, inputs, [place(v) for v in node.outputs], {})()
            else:
                reads = _read_by(piece)
                kept = [v for n in piece for v in n.outputs if v.dtype is not None and static_dims(v) is not None]
                writes = [v for v in kept if is_float(v) or any(user not in piece for user, _ in v.uses())]
                step = PlanStep("segment", "replay", piece, reads, writes)
                results = {v.name or "": place(v) for v in writes}
                backend.bind_segment(segment_model(step), {v.name or "": place(v) for v in reads}, results)()
            for value in (v for n in piece for v in n.outputs if is_float(v) and (v.name or "") in arrays):
                if not np.isfinite(memory.fetch(arrays[value.name or ""])).all():
                    return value.name
    return None


def _new(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return memory.zeros(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def explain_lost(error: DeviceError, comm: Communicator, step: int, saved: tuple[Path, int] | None) -> str:
    """Say which rank lost the GPU, when, what was running, and what to resume from; ``saved``: the last checkpoint, its
    steps.
    """
    during = f" {error.during}" if error.during else ""
    if isinstance(comm, StagedCommunicator) and (collective := comm.under_way()):
        during += f", with {collective!r} under way"
    left = "no checkpoint was saved or restored in this run"
    if saved is not None:
        left = f"the last checkpoint is {saved[0]}, after step {saved[1]}"
    return f"rank {comm.rank} lost its GPU in step {step}{during}: {error}; {left}"

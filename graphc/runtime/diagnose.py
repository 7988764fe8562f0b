"""Finding the first NaN or infinity of a step, by running it again with every intermediate value kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Backend, host_backend
from graphc.device import Array, Memory
from graphc.errors import DeviceMemoryError, NonFiniteError
from graphc.ir.declare import is_update
from graphc.ir.facts import constant, is_float, static_dims
from graphc.plan import prepare
from graphc.runtime.executor import Executor
from graphc.runtime.nodes import segment_model
from graphc.runtime.state import State
from graphc.steps import Step


def first_nonfinite(
    model: ir.Model, executor: Executor, feeds: Mapping[str, Array], state: State, backend: Backend
) -> str | None:
    """Name of the first value in graph order that is not finite: a feed, a parameter, or an intermediate of this rank.

    None when this rank's replay is finite throughout (the fault lies on another rank, or in a sum over ranks).
    """
    memory = backend.memory
    for name, array in [*feeds.items(), *state.arrays.items()]:
        if array.dtype.kind == "f" and not np.isfinite(memory.fetch(array)).all():
            return name
    shapes = {name: buffer.shape for name, buffer in executor.inputs.items()}
    graph = prepare(model, shapes).graph
    nodes = [n for n in graph if not is_update(n) and n.op_type != "Constant"]
    made = {out for n in nodes for out in n.outputs}
    nodes = [
        n for n in nodes if all(v is None or v in made or v.producer() is None or constant(v) is not None for v in n.inputs)
    ]
    made = {out for n in nodes for out in n.outputs}
    reads = list(dict.fromkeys(v for n in nodes for v in n.inputs if v is not None and v not in made and constant(v) is None))
    step = Step("segment", "replay", nodes, reads, [out for n in nodes for out in n.outputs if is_float(out)])
    sources = {v.name or "": feeds[v.name or ""] if v.is_graph_input() else state.array(v.name or "") for v in reads}
    try:
        return _replay(step, sources, backend)
    except DeviceMemoryError:  # all values at once need more than a step does
        host = host_backend(threads=1)
        try:
            return _replay(step, {name: memory.fetch(array) for name, array in sources.items()}, host)
        finally:
            host.close()


def nonfinite_error(step: int, tensor: str | None, who: str, elsewhere: str) -> NonFiniteError:
    """What stops a run: the ``tensor`` in which :func:`first_nonfinite` found it on ``who``, or ``elsewhere``."""
    where = f"first in tensor {tensor!r} on {who}" if tensor else f"{elsewhere}, and not again on replay"
    return NonFiniteError(
        f"a NaN or infinity appeared in step {step}, {where}; the state is that of the last good step"
        " (a smaller learning rate or gradient clipping may help)",
        step=step,
        tensor=tensor,
    )


def _replay(step: Step, sources: Mapping[str, Array], backend: Backend) -> str | None:
    """Name of the first output of ``step`` that is not finite; ``sources`` lie in the backend's memory, or in the host's."""
    memory = backend.memory
    inputs: dict[str, Array] = {}
    for name, array in sources.items():
        inputs[name] = np.ascontiguousarray(array).reshape(array.shape) if isinstance(array, np.ndarray) else array
        if isinstance(array, np.ndarray) and not memory.on_host:
            inputs[name] = _new(memory, array.shape, array.dtype)
            memory.copy(inputs[name], array)
    values = [(v.name or "", v) for v in step.outputs if v.dtype is not None]
    results = {name: _new(memory, static_dims(v) or (), v.dtype.numpy()) for name, v in values if v.dtype is not None}
    backend.bind_segment(segment_model(step), inputs, results)()
    return next((name for name, array in results.items() if not np.isfinite(memory.fetch(array)).all()), None)


def _new(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return memory.zeros(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

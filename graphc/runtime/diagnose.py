"""Finding the first NaN or infinity of a step, by running it again with every intermediate value kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphc.backend import Array, Backend, Memory
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
    watched = [out for n in nodes for out in n.outputs if is_float(out)]
    step = Step("segment", "replay", nodes, reads, watched)
    results = {v.name or "": _new(memory, static_dims(v) or (), v.dtype.numpy()) for v in watched if v.dtype is not None}
    sources = {v.name or "": executor.inputs[v.name or ""] if v.is_graph_input() else state.array(v.name or "") for v in reads}
    for name, array in feeds.items():
        memory.copy(executor.inputs[name], array)
    backend.bind_segment(segment_model(step), sources, results)()
    return next((name for name, array in results.items() if not np.isfinite(memory.fetch(array)).all()), None)


def _new(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    return memory.zeros(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

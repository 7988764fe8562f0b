"""cuDNN through its graph API: what is asked for is described first, then built, timed and bound.

A description (:class:`Description`) says everything about one call: shapes, strides, types; it can be checked without a GPU.
The library proposes plans for it; the fastest is found once by running them and kept on disk by description, device and
version of the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from graphc.backend import Run
from graphc.errors import MissingExtraError, UnsupportedOpError

if TYPE_CHECKING:
    from graphc.backends.cupy.cuda import CudaDevice

WORKSPACE = 256 << 20
"""Bytes of workspace that all calls share; plans that want more are not considered."""

CANDIDATES = 24
"""Plans that are timed, in the library's order."""

REPEATS = 3

TYPES = {
    ir.DataType.FLOAT: "FLOAT",
    ir.DataType.DOUBLE: "DOUBLE",
    ir.DataType.FLOAT16: "HALF",
    ir.DataType.BFLOAT16: "BFLOAT16",
    ir.DataType.BOOL: "BOOLEAN",
}
"""Names in ``cudnn.data_type`` by element type."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand as the library is told of it: sizes and distances in elements, axis by axis."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: ir.DataType

    @staticmethod
    def dense(dims: Sequence[int], dtype: ir.DataType, order: Sequence[int] | None = None) -> Tensor:
        """Without gaps; ``order`` lists the axes from the slowest to the fastest, by default as they stand."""
        strides, step = [0] * len(dims), 1
        for axis in reversed(range(len(dims)) if order is None else list(order)):
            strides[axis] = step
            step *= dims[axis]
        return Tensor(tuple(dims), tuple(strides), dtype)


class Description(Protocol):
    """One call. Its ``repr`` is its identity."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Operands and results by name."""

    def emit(self, cudnn: Any, graph: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Build the call over the library's tensors of the operands; returns its results by name."""

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of what is read."""


def build(cudnn: Any, description: Description, **options: Any) -> tuple[Any, dict[str, int]]:
    """The library's graph, validated, and the id of each tensor by name.

    Args:
        options: of ``cudnn.pygraph``: the handle, or the properties of a device that need not be there.
    """
    kinds = cudnn.data_type
    double = any(t.dtype == ir.DataType.DOUBLE for t in description.tensors.values())
    wide = kinds.DOUBLE if double else kinds.FLOAT
    graph = cudnn.pygraph(intermediate_data_type=wide, compute_data_type=wide, **options)
    ids = {name: k + 1 for k, name in enumerate(description.tensors)}
    held = {}
    for name in description.operands:
        tensor = description.tensors[name]
        kind = getattr(kinds, TYPES[tensor.dtype])
        held[name] = graph.tensor(name=name, dim=list(tensor.dims), stride=list(tensor.strides), data_type=kind, uid=ids[name])
    for name, result in description.emit(cudnn, graph, held).items():
        tensor = description.tensors[name]
        result.set_output(True).set_dim(list(tensor.dims)).set_stride(list(tensor.strides))
        result.set_data_type(getattr(kinds, TYPES[tensor.dtype])).set_uid(ids[name])
    graph.validate()
    graph.build_operation_graph()
    return graph, ids


def propose(cudnn: Any, graph: Any, description: Description, *, deterministic: bool, tf32: bool) -> list[int]:
    """The plans that the library's heuristics name for ``description``, by index, those that always work at the end.

    Which of them break a rule (rounding to TF32, sums in half precision, other results in every run) shows when they are built.
    """
    notes = cudnn.numerical_note
    barred = [notes.REDUCED_PRECISION_REDUCTION]
    if deterministic:
        barred.append(notes.NONDETERMINISTIC)
    if not tf32 and any(t.dtype == ir.DataType.FLOAT for t in description.tensors.values()):
        barred += [notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS]
    try:
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError:
        return []
    graph.deselect_numeric_notes(barred)
    graph.deselect_workspace_greater_than(WORKSPACE)
    return [k for k in range(graph.get_execution_plan_count()) if graph.get_plan_name_at_index(k).startswith("eng")]


def first_plan(cudnn: Any, graph: Any, plans: Sequence[int]) -> int | None:
    """The first of ``plans`` that builds, now built."""
    return next((k for k in plans if _builds(cudnn, graph, k)), None)


def _builds(cudnn: Any, graph: Any, index: int) -> bool:
    try:
        graph.build_plan_at_index(index)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
        return False  # barred by a note, or more workspace than there is
    return bool(graph.get_workspace_size_plan_at_index(index) <= WORKSPACE)


class Dnn:
    """Binds calls on one device.

    Args:
        tf32: float32 operands may be rounded to TF32.
        deterministic: only plans whose results are the same in every run, and the first of them, since times are not.
    """

    def __init__(self, device: CudaDevice, *, tf32: bool = True, deterministic: bool = False) -> None:
        try:
            import cudnn
        except ImportError as error:
            raise MissingExtraError(
                f"the cupy backend needs cudnn-frontend ({error}); run: pip install 'graphc[gpu]'"
            ) from error
        self._cudnn: Any = cudnn
        self._device, self._tf32, self._deterministic = device, tf32, deterministic
        self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=device.stream.ptr)
        self._workspace: Any = device.zeros(WORKSPACE)
        self._chosen: dict[str, Any] = {}

    def bind(self, description: Description, arrays: Mapping[str, Any]) -> Run:
        """A closure that queues the call over ``arrays``, one for each tensor of the description.

        Raises:
            UnsupportedOpError: the library has no plan for it.
        """
        pointers, workspace, handle = {}, self._workspace.data.ptr, self._handle
        graph, ids = build(self._cudnn, description, handle=handle)
        for name, array in arrays.items():
            pointers[ids[name]] = array.data.ptr
        index = self._plan(graph, description, pointers)
        execute = graph.execute_plan_at_index

        def run() -> None:
            execute(pointers, workspace, index, handle)

        return run

    # Choosing a plan ----------------------------------------------------------------------------------------------------

    def _plan(self, graph: Any, description: Description, pointers: Mapping[int, int]) -> int:
        """The index of the fastest plan, built: as it was chosen in this run or an earlier one, or timed now."""
        key = repr((description, self._tf32, self._deterministic))
        if not self._chosen:
            self._chosen = self._read()
        known = self._chosen.get(key)
        if known is not None:
            knobs = {getattr(self._cudnn.knob_type, name): value for name, value in known[1].items()}
            graph.create_execution_plan(known[0], knobs)
            index: int = graph.get_execution_plan_count() - 1
            graph.build_plan_at_index(index)
            return index
        plans = propose(self._cudnn, graph, description, deterministic=self._deterministic, tf32=self._tf32)
        best = first_plan(self._cudnn, graph, plans) if self._deterministic else self._fastest(graph, plans, pointers)
        if best is None:
            raise UnsupportedOpError(f"cuDNN has no plan for {description}")
        engine, knobs = graph.get_engine_and_knobs_at_index(best)
        self._chosen[key] = [engine, {knob.name: value for knob, value in knobs.items()}]
        self._write()
        return best

    def _fastest(self, graph: Any, plans: Sequence[int], pointers: Mapping[int, int]) -> int | None:
        best, least, timed = None, float("inf"), 0
        for index in plans:
            if timed == CANDIDATES:
                break
            if not _builds(self._cudnn, graph, index):
                continue
            timed += 1
            spent = self._time(graph, index, pointers)
            if spent < least:
                best, least = index, spent
        return best

    def _time(self, graph: Any, index: int, pointers: Mapping[int, int]) -> float:
        """Milliseconds; infinite where the plan does not run."""
        cuda, stream, workspace = self._device.cupy.cuda, self._device.stream, self._workspace.data.ptr
        begin, end = cuda.Event(), cuda.Event()
        try:
            graph.execute_plan_at_index(pointers, workspace, index, self._handle)
            begin.record(stream)
            for _ in range(REPEATS):
                graph.execute_plan_at_index(pointers, workspace, index, self._handle)
        except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError):
            return float("inf")
        end.record(stream)
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end))

    # On disk ------------------------------------------------------------------------------------------------------------

    def _file(self) -> Any:
        from graphc.backends.cupy.cuda import cache_folder

        name = self._device.cupy.cuda.runtime.getDeviceProperties(self._device.device.id)["name"].decode().replace(" ", "-")
        return cache_folder() / f"cudnn-{name}-{self._cudnn.backend_version()}.json"

    def _read(self) -> dict[str, Any]:
        path = self._file()
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _write(self) -> None:
        path = self._file()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps({**self._read(), **self._chosen}))
        partial.rename(path)

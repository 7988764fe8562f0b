"""cuDNN through its graph API: calls are described, then built, timed and bound.

A :class:`Description` says everything about one call: shapes, strides, types; it can be checked without a GPU. The library
proposes plans for it. The fastest is found once by running them, and kept on disk by description, device and library version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.backends.cupy.libraries.tuning_cache import Choices
from graphc.cache_folder import cache_path
from graphc.device import Run
from graphc.errors import GraphcError, MissingExtraError

WORKSPACE = 256 << 20
"""Bytes of the workspace that all calls share; plans that need more are used only when no other exists."""

CANDIDATES = 24
"""How many plans are timed, in the library's order."""

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
    """An operand as described to the library: sizes and strides in elements, axis by axis."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: ir.DataType

    @staticmethod
    def dense(dims: Sequence[int], dtype: ir.DataType, order: Sequence[int] | None = None) -> Tensor:
        """A tensor without gaps; ``order`` lists the axes from slowest to fastest, by default as they stand."""
        strides, step = [0] * len(dims), 1
        for axis in reversed(range(len(dims)) if order is None else list(order)):
            strides[axis] = step
            step *= dims[axis]
        return Tensor(tuple(dims), tuple(strides), dtype)


class Description(Protocol):
    """One call, identified by its ``repr``."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Operands and results by name."""

    def emit(self, cudnn: Any, graph: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Build the call over the library's operand tensors; returns its results by name."""

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the tensors that the call reads."""


def identities(description: Description) -> dict[str, int]:
    """The library's id of each tensor."""
    return {name: k + 1 for k, name in enumerate(description.tensors)}


def build(cudnn: Any, description: Description, **options: Any) -> tuple[Any, dict[str, int]]:
    """The library's graph, validated, and the id of each tensor by name.

    Args:
        options: for ``cudnn.pygraph``: the handle, or the properties of a device that may be absent.
    """
    kinds = cudnn.data_type
    double = any(t.dtype == ir.DataType.DOUBLE for t in description.tensors.values())
    wide = kinds.DOUBLE if double else kinds.FLOAT
    graph = cudnn.pygraph(intermediate_data_type=wide, compute_data_type=wide, **options)
    ids = identities(description)
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
    """Indices of the plans that the library's heuristics propose; the fallback plans come last.

    Building a plan shows whether it breaks a rule: rounds to TF32, sums in half precision, or gives other results in every run.
    """
    try:
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError:
        return []
    notes = cudnn.numerical_note
    graph.deselect_numeric_notes([getattr(notes, name) for name in barred(description, deterministic=deterministic, tf32=tf32)])
    return [k for k in range(graph.get_execution_plan_count()) if graph.get_plan_name_at_index(k).startswith("eng")]


def barred(description: Description, *, deterministic: bool, tf32: bool) -> list[str]:
    """Names in ``cudnn.numerical_note`` of everything that plans for ``description`` must not do.

    Only float32 operands can be rounded to TF32. Other float32 tensors, such as the numbers that attention saves for its
    gradient, do not affect the products.
    """
    found = ["REDUCED_PRECISION_REDUCTION"]
    if deterministic:
        found.append("NONDETERMINISTIC")
    if not tf32 and description.tensors[description.operands[0]].dtype == ir.DataType.FLOAT:
        found += ["TENSOR_CORE", "DOWN_CONVERT_INPUTS"]
    return found


def usable(cudnn: Any, graph: Any, plans: Sequence[int], limit: int = WORKSPACE) -> Iterator[int]:
    """The ``plans`` that are not barred, build, and need at most ``limit`` bytes of workspace."""
    for index in plans:
        try:
            graph.build_plan_at_index(index)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
            continue
        if graph.get_workspace_size_plan_at_index(index) <= limit:
            yield index


def named(graph: Any, plans: Sequence[int], name: str | None) -> list[int]:
    """The ``plans`` with the recorded name; names identify plans, since some engine knobs cannot be set again."""
    return [index for index in plans if graph.get_plan_name_at_index(index) == name]


@dataclass(frozen=True, slots=True)
class Built:
    """A call with its plan and workspace size; nodes with equal descriptions share it."""

    graph: Any
    ids: Mapping[str, int]
    nbytes: int


class Dnn:
    """Binds calls on one device, within its options."""

    def __init__(self, device: CudaDevice) -> None:
        try:
            import cudnn
        except ImportError as error:
            raise MissingExtraError(
                f"the cupy backend needs cudnn-frontend ({error}); run: pip install 'graphc[gpu]'"
            ) from error
        self._cudnn: Any = cudnn
        self._device, self._tf32 = weakref.proxy(device), device.options.tf32  # the device holds this object
        self.deterministic = device.options.deterministic
        self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=device.stream.ptr)
        self._workspaces: list[Any] = [device.zeros(WORKSPACE)]
        self._choices = Choices(None if self.deterministic else self._file())
        self._built: dict[Description, Built] = {}

    def bind(self, description: Description, arrays: Mapping[str, Any]) -> Run:
        """A closure that queues the call over ``arrays``, one for each tensor of the description.

        Raises:
            GraphcError: the library has no plan for it.
        """
        built = self._built.get(description)
        if built is None:
            built = self._built[description] = self._build(description, arrays)
        pointers = {built.ids[name]: int(array.data.ptr) for name, array in arrays.items()}
        return functools.partial(built.graph.execute, pointers, self._room(built.nbytes), self._handle)

    def _room(self, nbytes: int) -> int:
        """Address of a workspace of ``nbytes``; earlier workspaces stay, because bound calls use them."""
        if nbytes > self._workspaces[-1].nbytes:
            self._workspaces.append(self._device.zeros(nbytes))
        return int(self._workspaces[-1].data.ptr)

    # Choosing a plan ----------------------------------------------------------------------------------------------------

    def _build(self, description: Description, arrays: Mapping[str, Any]) -> Built:
        """Build the call with its fastest plan, recorded by an earlier run or timed now."""
        key = f"{'tf32 ' * self._tf32}{description!r}"
        found, known = self._load(description, key), self._choices.get(key)
        if found is not None:
            return found
        found = None if known is None else self._with_plan(description, known)
        if found is None:
            name = self._choose(description, arrays)
            found = self._with_plan(description, name)
            self._choices.put(key, name)
        if found is None:
            raise GraphcError(f"cuDNN cannot build plan {name} for {description} again")
        self._keep(found, key)
        return found

    def _with_plan(self, description: Description, name: str) -> Built | None:
        """Build the call with this plan alone, since other plans would stay loaded; None if the library no longer has it."""
        graph, ids, plans = self._proposals(description)
        plan = next(usable(self._cudnn, graph, named(graph, plans, name), sys.maxsize), None)
        return None if plan is None else Built(graph, ids, int(graph.get_workspace_size_plan_at_index(plan)))

    def _choose(self, description: Description, arrays: Mapping[str, Any]) -> str:
        """The name of the fastest plan; when deterministic, of the first."""
        graph, ids, plans = self._proposals(description)
        pointers = {ids[name]: int(array.data.ptr) for name, array in arrays.items()}
        small = usable(self._cudnn, graph, plans)
        plan = next(small, None) if self.deterministic else self._fastest(graph, small, pointers)
        if plan is None:
            plan = next(usable(self._cudnn, graph, plans, sys.maxsize), None)
        if plan is None:
            raise GraphcError(f"cuDNN has no plan for {description}")
        return str(graph.get_plan_name_at_index(plan))

    def _proposals(self, description: Description) -> tuple[Any, Mapping[str, int], list[int]]:
        graph, ids = build(self._cudnn, description, handle=self._handle)
        plans = propose(self._cudnn, graph, description, deterministic=self.deterministic, tf32=self._tf32)
        return graph, ids, plans

    def _fastest(self, graph: Any, plans: Iterable[int], pointers: Mapping[int, int]) -> int | None:
        spent = {index: self._time(graph, index, pointers) for index in itertools.islice(plans, CANDIDATES)}
        ran = [index for index, time in spent.items() if time < math.inf]
        return min(ran, key=lambda index: spent[index], default=None)

    def _time(self, graph: Any, index: int, pointers: Mapping[int, int]) -> float:
        """Milliseconds for all repeats; infinite if the plan does not run."""
        cuda, stream = self._device.cupy.cuda, self._device.stream
        run = functools.partial(graph.execute_plan_at_index, pointers, self._room(0), index, self._handle)
        begin, end = cuda.Event(), cuda.Event()
        try:
            run()
            begin.record(stream)
            for _ in range(REPEATS):
                run()
        except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError):
            return math.inf
        end.record(stream)
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end))

    # On disk: the choices, and each plan with its compiled kernel, which takes a second or two to compile ------------------

    def _file(self) -> Path:
        return cache_path("cudnn", self._device.name, str(self._cudnn.backend_version()), suffix=".json")

    def _plan_file(self, key: str) -> Path | None:
        path = self._choices.path
        return None if path is None else path.with_suffix("") / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.plan"

    def _load(self, description: Description, key: str) -> Built | None:
        """Load the stored call; None if there is none, or it does not fit this library or device."""
        path = self._plan_file(key)
        if path is None or self._choices.get(key) is None or not path.exists():
            return None
        graph = self._cudnn.pygraph(handle=self._handle)
        try:
            graph.deserialize(self._handle, path.read_bytes())
            return Built(graph, identities(description), int(graph.get_workspace_size()))
        except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, OSError):
            return None

    def _keep(self, built: Built, key: str) -> None:
        path = self._plan_file(key)
        if path is None:
            return
        with contextlib.suppress(OSError, RuntimeError, self._cudnn.cudnnGraphNotSupportedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.tmp")
            partial.write_bytes(bytes(built.graph.serialize()))
            partial.replace(path)

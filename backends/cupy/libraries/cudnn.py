"""cuDNN through its graph API: calls are described, then built, timed and bound.

A :class:`Description` says everything about one call: shapes, strides, types; it can be checked without a GPU. The library
proposes plans for it. The fastest is found once by timing them on the device, and kept on disk by description, device and
library version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.backends.cupy.device.device_timer import DeviceTimer
from graphc.backends.cupy.libraries.noise import noise, sets_for
from graphc.backends.cupy.libraries.tuning_cache import Choices
from graphc.cache_folder import cache_path
from graphc.device import Run
from graphc.errors import DeviceError, DeviceMemoryError, GraphcError, MissingExtraError

WORKSPACE = 256 << 20
"""Bytes of the workspace that all calls share; plans that need more are used only when no other exists."""

CANDIDATES, FRUITLESS = 24, 6
"""How many plans are timed, in the library's order; and after how many that were not faster than the best no other is.

Of 205 calls that an H100 timed (most of them ResNet-50's) 187 had their best among the first five. The rest of 24 plans would
make the calls 0.6 % faster, and tuning more than twice as long.
"""

PATIENCE = 3.0
"""Seconds of building and timing plans of one call, after which no further plan is tried."""

MODES = ("A", "FALLBACK")
"""The library's heuristics; each is asked only if those before it have no plan that can be used."""

TYPES = {
    ir.DataType.FLOAT: "FLOAT",
    ir.DataType.DOUBLE: "DOUBLE",
    ir.DataType.FLOAT16: "HALF",
    ir.DataType.BFLOAT16: "BFLOAT16",
    ir.DataType.BOOL: "BOOLEAN",
    ir.DataType.INT32: "INT32",
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

    @property
    def extent(self) -> int:
        """Elements from the first to the last."""
        return 1 + sum((size - 1) * step for size, step in zip(self.dims, self.strides, strict=True))


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

    @property
    def repeatable(self) -> bool:
        """Whether plans that sum in another order every time are barred even if the backend is not deterministic."""

    @property
    def variants(self) -> Sequence[Description]:
        """Calls that compute the same in other ways, whose plans are tried too."""


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


def propose(
    cudnn: Any, graph: Any, description: Description, *, deterministic: bool, tf32: bool, mode: str = MODES[0]
) -> list[int]:
    """Indices of the plans that one of the library's heuristics proposes.

    Building a plan shows whether it breaks a rule: rounds to TF32, sums in half precision, or gives other results in every run.
    """
    try:
        graph.create_execution_plans([getattr(cudnn.heur_mode, mode)])
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
    if deterministic or description.repeatable:
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


@dataclass(frozen=True, slots=True)
class Built:
    """A call with its plan, the plan's name and workspace size; nodes with equal descriptions share it."""

    graph: Any
    ids: Mapping[str, int]
    nbytes: int
    name: str = ""


class Dnn:
    """Binds calls on one device, within its options.

    Attributes:
        plans_read: plans that came from disk.
    """

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
        self.plans_read = 0

    def bind(self, description: Description, arrays: Mapping[str, Any]) -> Run:
        """A closure that queues the call over ``arrays``, one for each tensor of the description.

        Raises:
            GraphcError: the library has no plan for it.
        """
        built = self._built.get(description)
        if built is None:
            built = self._built[description] = self._build(description, arrays)
        return self._run(built, {name: int(array.data.ptr) for name, array in arrays.items()})

    def _run(self, built: Built, places: Mapping[str, int]) -> Run:
        """A closure that queues the call over the tensors at these addresses."""
        pointers = {built.ids[name]: place for name, place in places.items()}
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
        found, known = self._load(description, key, arrays), self._choices.get(key)
        if found is not None:
            self.plans_read += 1
            return found
        if known is not None:
            found = next(self._plans(description, only=known), None)
        if found is None:
            found = self._choose(description, arrays)
            kept = self._choices.put(key, found.name, replaced=known)
            if kept != found.name:  # what another process has chosen in the meantime
                found = next(self._plans(description, only=kept), found)
        self._keep(found, key)
        return found

    def _choose(self, description: Description, arrays: Mapping[str, Any]) -> Built:
        """The fastest plan; when deterministic, the first. A plan with a larger workspace only if there is no other."""
        for limit in (WORKSPACE, sys.maxsize):
            plans = self._plans(description, limit)
            found = next(plans, None) if self.deterministic or limit > WORKSPACE else self._fastest(description, plans, arrays)
            if found is not None:
                return found
        raise GraphcError(f"cuDNN has no plan for {description}")

    def _plans(self, description: Description, limit: int = sys.maxsize, only: str | None = None) -> Iterator[Built]:
        """Plans that can be used, each in a graph of its own: a graph keeps loaded whatever it has built.

        Args:
            limit: bytes of workspace that a plan may need.
            only: the name of the plan; names identify plans, since some engine knobs cannot be set again.
        """
        variants = () if self.deterministic else description.variants
        for number, variant in enumerate((description, *variants)):
            prefix = f"{number} " if number else ""
            for mode in MODES:
                position, any_found = 0, False
                while True:
                    graph, ids = build(self._cudnn, variant, handle=self._handle)
                    rules = {"deterministic": self.deterministic, "tf32": self._tf32}
                    proposed = propose(self._cudnn, graph, variant, **rules, mode=mode)
                    names = {index: prefix + str(graph.get_plan_name_at_index(index)) for index in proposed}
                    wanted = [index for index in proposed[position:] if only in (None, names[index])]
                    index = next(usable(self._cudnn, graph, wanted, limit), None)
                    if index is None:
                        break
                    any_found, position = True, proposed.index(index) + 1
                    yield Built(graph, ids, int(graph.get_workspace_size_plan_at_index(index)), names[index])
                if any_found:
                    break

    def _fastest(self, description: Description, plans: Iterator[Built], arrays: Mapping[str, Any]) -> Built | None:
        """The fastest of the first plans that run; the graphs of the others are dropped."""
        memory, sets = self._operands(description, arrays)
        best, fastest, fruitless, begin = None, math.inf, 0, time.monotonic()
        for plan in itertools.islice(plans, CANDIDATES):
            spent = self._time(plan, description, sets, fastest)
            fruitless = 0 if spent < fastest else fruitless + 1
            if spent < fastest:
                best, fastest = plan, spent
            if best is not None and (fruitless >= FRUITLESS or time.monotonic() - begin > PATIENCE):
                break
        del memory
        self._device.trim()
        return best

    def _time(
        self, plan: Built, description: Description, sets: Sequence[Mapping[str, int]], fastest: float = math.inf
    ) -> float:
        """Seconds of a call; infinite if the plan does not run."""
        calls = [self._run(plan, places) for places in sets]
        try:
            return float(self._device.library(DeviceTimer).trial(f"cuDNN's {plan.name} for {description}", calls, fastest))
        except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError):
            return math.inf

    def _operands(self, description: Description, arrays: Mapping[str, Any]) -> tuple[Any, list[dict[str, int]]]:
        """Memory filled with noise, and the addresses of sets of tensors in it; without room, the ``arrays`` themselves.

        Whole numbers are lengths, which noise would make addresses beyond the operands.
        """
        given = {name: int(array.data.ptr) for name, array in arrays.items()}
        forms = {name: t for name, t in description.tensors.items() if t.dtype != ir.DataType.INT32}
        sizes = [(t.extent * int(t.dtype.itemsize), t.dtype) for t in forms.values()]
        sets = sets_for(sum(size for size, _ in sizes))
        try:
            memory, places = noise(self._device, sizes * sets)
        except DeviceMemoryError:
            return None, [given]
        starts = range(0, len(places), len(forms))
        return memory, [given | dict(zip(forms, places[k : k + len(forms)], strict=True)) for k in starts]

    # On disk: the choices, and each plan with its compiled kernel, which takes a second or two to compile ------------------

    def _file(self) -> Path:
        return cache_path("cudnn", self._device.name, str(self._cudnn.backend_version()), suffix=".json")

    def _plan_file(self, key: str) -> Path | None:
        path = self._choices.path
        return None if path is None else path.with_suffix("") / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.plan"

    def _load(self, description: Description, key: str, arrays: Mapping[str, Any]) -> Built | None:
        """Load the stored call; None if there is none, or it does not fit this library or device, or does not run."""
        path, name = self._plan_file(key), self._choices.get(key)
        if path is None or name is None or not path.exists():
            return None
        graph = self._cudnn.pygraph(handle=self._handle)
        try:
            graph.deserialize(self._handle, path.read_bytes())
            found = Built(graph, identities(description), int(graph.get_workspace_size()), name)
        except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, OSError):
            return None
        places = {name: int(array.data.ptr) for name, array in arrays.items()}
        try:
            return found if self._time(found, description, [places], 0.0) < math.inf else None
        except DeviceError:
            path.unlink(missing_ok=True)  # so that the next process builds it anew
            raise

    def _keep(self, built: Built, key: str) -> None:
        path = self._plan_file(key)
        if path is None:
            return
        with contextlib.suppress(OSError, RuntimeError, self._cudnn.cudnnGraphNotSupportedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.tmp")
            partial.write_bytes(bytes(built.graph.serialize()))
            partial.replace(path)

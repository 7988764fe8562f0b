"""Products through cuBLASLt's bindings: descriptors, choice of algorithm, and capturable calls.

The fastest of the library's proposals is taken. Each is timed once on the device, on noise that is not in the cache, and the
result is kept on disk under the product's description. The measured time also decides whether an epilogue is faster than a
kernel of its own.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.device.cuda_device import CudaDevice
from graphc.backends.cupy.device.device_timer import DeviceTimer
from graphc.backends.cupy.libraries import gemm_kernel
from graphc.backends.cupy.libraries.gemm import (
    DOMAIN,
    PRODUCT_OPS,
    TYPES,
    GemmCall,
    Matrix,
    MatrixLayout,
    Product,
    by_rule,
    call_of,
    is_product,
    product_of,
)
from graphc.backends.cupy.libraries.noise import noise, sets_for
from graphc.backends.cupy.libraries.registry import library
from graphc.backends.cupy.libraries.tuning_cache import Choices
from graphc.cache_folder import cache_path
from graphc.device import ALIGNMENT, Run
from graphc.errors import DeviceMemoryError, MissingExtraError

WORKSPACE = 32 << 20
"""Bytes of workspace, as NVIDIA advises for Hopper."""

PROPOSALS = 8
"""How many proposed algorithms are measured."""

COMPUTE_TYPE = 2
"""``CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE``: partial sums go to memory and a separate step adds them in a fixed order."""

REFUSALS = (7, 8, 15)
"""``CUBLAS_STATUS_INVALID_VALUE``, ``…_ARCH_MISMATCH`` and ``…_NOT_SUPPORTED``; other errors come from the device."""

BYTES_PER_SECOND = 3.5e12
LAUNCH = 2e-6
FLOPS_PER_SECOND = 6e14
"""Cost of a kernel that replaces an epilogue (bandwidth of an H200, launch time), and the rate of unmeasured products."""


@dataclass(frozen=True, slots=True)
class Pointers:
    """Addresses of the operands and results; 0 for an absent one."""

    a: int
    b: int
    c: int
    d: int
    bias: int
    aux: int


NOWHERE = 1 << 20
"""A placeholder address for queries that read nothing; aligned like real memory."""


@library(*PRODUCT_OPS, f"{DOMAIN}::Product", dtypes=TYPES, when=is_product, workspace=("cuBLASLt", WORKSPACE))
def bind_product(device: CudaDevice, node: ir.Node, inputs: Sequence[Any], outputs: Sequence[Any]) -> Run:
    """Bind a product to cuBLASLt."""
    return device.library(Products).bind(node, inputs, outputs)


def version_of_products() -> str:
    """The version of cuBLASLt; empty without its bindings, whose absence the first product reports."""
    try:
        from nvmath.bindings import cublasLt
    except ImportError:
        return ""
    return str(cublasLt.get_version())


class Products:
    """Binds and measures products on one device, within its options."""

    def __init__(self, device: CudaDevice) -> None:
        try:
            from nvmath.bindings import cublas, cublasLt
        except ImportError as error:
            raise MissingExtraError(
                f"the cupy backend needs nvmath-python ({error}); run: pip install 'graphc[gpu]'"
            ) from error
        self._lt, self._compute = cublasLt, cublas.ComputeType
        self._device, options = weakref.proxy(device), device.options  # the device holds this object
        self._tf32, self._deterministic = options.tf32, options.deterministic
        self._handle = cublasLt.create()
        self._workspace: Any = device.zeros(WORKSPACE)
        self._choices = Choices(None if self._deterministic else self._file())

    def bind(self, node: ir.Node, inputs: Sequence[Any], outputs: Sequence[Any]) -> Run:
        """A closure that queues the product; all descriptors are built here.

        A product for which the library has no algorithm runs as a generated kernel, and a warning says so.
        """
        product, given = product_of(node), [*inputs, *[None] * (5 - len(inputs))]
        results = list(outputs)
        d = results.pop(0)
        aux = results.pop(0) if product.keeps_aux else given[4]
        bias = results.pop(0) if product.bias_gradient else given[3]
        pointers = Pointers(*(0 if x is None else int(x.data.ptr) for x in (given[0], given[1], given[2], d, bias, aux)))
        plan = MatmulPlan(self._lt, self._compute, product, pointers, self._tf32)
        chosen = self._choose(product, alignments(product, pointers))
        if chosen is None:
            warnings.warn(f"cuBLASLt has no algorithm for {node.name}: {product.text()}; a slower kernel runs it", stacklevel=2)
            return gemm_kernel.bind_product(self._device, product, inputs, outputs)
        algorithm = np.array(chosen["algorithm"], dtype=np.uint64)
        calls = [(*plan.arguments(self._handle, k), *self._tail(algorithm)) for k in range(product.rounds)]
        matmul = self._lt.matmul

        def run(held: tuple[MatmulPlan, Any] = (plan, algorithm)) -> None:  # the library reads both at every call
            for call in calls:
                matmul(*call)

        return run

    def pays(self, joined: Sequence[Product], apart: Sequence[Product], saved: int) -> bool:
        """Whether ``joined`` takes less time than ``apart`` plus a kernel that moves ``saved`` bytes."""
        if self._deterministic:  # times vary between runs, and the summation order of a bias gradient is not documented
            allowed = by_rule(joined, apart, saved) and not any(p.bias_gradient for p in joined)
            return allowed and all(self.seconds(p) < math.inf for p in joined)
        kernel = saved / BYTES_PER_SECOND + LAUNCH if saved else 0.0
        spent = sum(map(self.seconds, joined))
        return spent < math.inf and spent <= 1.02 * sum(map(self.seconds, apart)) + kernel

    def seconds(self, product: Product) -> float:
        """Seconds that one product takes; infinite if the library has no algorithm for it."""
        chosen = self._choose(product, alignments(product, None))
        return math.inf if chosen is None else product.rounds * float(chosen["seconds"])

    def _tail(self, algorithm: Any) -> tuple[int, ...]:
        return algorithm.ctypes.data, self._workspace.data.ptr, WORKSPACE, self._device.stream.ptr

    # Choosing an algorithm --------------------------------------------------------------------------------------------

    def _choose(self, product: Product, aligned: Sequence[int]) -> dict[str, Any] | None:
        flags = f"{'tf32 ' * self._tf32}{'fixed ' * self._deterministic}"
        key = f"{flags}{product.text()} at {','.join(map(str, aligned))}"
        found = self._choices.get(key)
        if found is None or not _is_choice(found):
            found = self._choices.put(key, self._measure(product, aligned), replaced=found)
        return found if found["algorithm"] else None

    def _measure(self, product: Product, aligned: Sequence[int]) -> dict[str, Any]:
        """The fastest proposal and its seconds; the library's first when deterministic or short of memory."""
        bias, aux = NOWHERE + aligned[4], NOWHERE + aligned[5]  # the library checks these two addresses
        nowhere = Pointers(NOWHERE, NOWHERE, NOWHERE, NOWHERE, bias, aux)
        plan = MatmulPlan(self._lt, self._compute, product, nowhere, self._tf32)
        proposals = self._proposals(plan, aligned)
        best: dict[str, Any] = {"algorithm": [], "seconds": 0.0}
        if not proposals:
            return best
        try:
            memory, places = (None, list[Pointers]()) if self._deterministic else self._noise(product)
        except DeviceMemoryError:
            memory = None
        if memory is None:
            return {"algorithm": proposals[0].tolist(), "seconds": product.flops / product.rounds / FLOPS_PER_SECOND}
        plans = [MatmulPlan(self._lt, self._compute, product, place, self._tf32) for place in places]
        timer, fastest = self._device.library(DeviceTimer), math.inf
        for algorithm in proposals:
            calls = [
                functools.partial(self._lt.matmul, *plan.arguments(self._handle, 0), *self._tail(algorithm)) for plan in plans
            ]
            try:
                spent = timer.trial(f"an algorithm of cuBLASLt for {product.text()}", calls, fastest)
            except self._lt.cuBLASLtError as error:  # a proposed algorithm may fail to run
                if error.status not in REFUSALS:
                    raise
                continue
            if spent < fastest:
                fastest, best = spent, {"algorithm": algorithm.tolist(), "seconds": spent}
        del memory
        self._device.trim()
        return best

    def _proposals(self, plan: MatmulPlan, aligned: Sequence[int]) -> list[Any]:
        """The library's proposals in which blocks that share a sum store their parts in the compute type.

        Blocks that add to the result in place would do so in the order in which they finish.
        """
        lt = self._lt
        preference = lt.matmul_preference_create()
        names = lt.MatmulPreferenceAttribute
        values = {names.MAX_WORKSPACE_BYTES: WORKSPACE}
        values.update(zip([names[f"MIN_ALIGNMENT_{x}_BYTES"] for x in "ABCD"], aligned[:4], strict=True))
        values[names.REDUCTION_SCHEME_MASK] = COMPUTE_TYPE
        for attribute, value in values.items():
            held = np.array([value], dtype=lt.get_matmul_preference_attribute_dtype(int(attribute)))
            lt.matmul_preference_set_attribute(preference, int(attribute), held.ctypes.data, held.nbytes)
        found = np.zeros(PROPOSALS, dtype=lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, dtype=np.int32)
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, plan.description, *plan.layouts, preference, PROPOSALS, found.ctypes.data, count.ctypes.data
            )
        except lt.cuBLASLtError:  # not supported
            return []
        finally:
            lt.matmul_preference_destroy(preference)
        return [np.array(found["algo"]["data_"][k], dtype=np.uint64) for k in range(int(count[0])) if not found["state"][k]]

    def _noise(self, p: Product) -> tuple[Any, list[Pointers]]:
        """Memory filled with noise, and the addresses of each set of operands in it."""
        sizes = [
            (_extent(p.a, p) * p.dtype.itemsize, p.dtype),
            (_extent(p.b, p) * p.dtype.itemsize, p.dtype),
            (0 if p.c is None else _extent(p.c, p) * p.result.itemsize, p.result),
            (_extent(p.d, p) * p.result.itemsize, p.result),
            (max(p.m, p.n) * p.result.itemsize, p.result),
            (0 if p.aux is None else p.m * p.aux.row_step * p.result.itemsize, p.result),
        ]
        sets = sets_for(sum(int(size) for size, _ in sizes))
        memory, addresses = noise(self._device, [(int(size), dtype) for size, dtype in sizes] * sets)
        given = [at if size else 0 for at, (size, _) in zip(addresses, sizes * sets, strict=True)]
        return memory, [Pointers(*given[k : k + len(sizes)]) for k in range(0, len(given), len(sizes))]

    def _file(self) -> Any:
        return cache_path("products", self._device.name, str(self._lt.get_version()), suffix=".json")


class MatmulPlan:
    """The library's descriptors of one product.

    Attributes:
        description: the descriptor of the product.
        layouts: the layouts of A, B, C and D.
    """

    def __init__(self, lt: Any, compute: Any, p: Product, at: Pointers, tf32: bool) -> None:
        self._lt, self._product, self._at = lt, p, at
        self.description, self.layouts = 0, list[int]()
        double = p.dtype == ir.DataType.DOUBLE
        call = call_of(p)
        self.description = lt.matmul_desc_create(int(compute_type(compute, p.dtype, tf32)), 1 if double else 0)
        names = lt.MatmulDescAttribute
        for name, value in description_attributes(lt, call, at).items():
            held = np.array([value], dtype=lt.get_matmul_desc_attribute_dtype(int(names[name])))
            lt.matmul_desc_set_attribute(self.description, int(names[name]), held.ctypes.data, held.nbytes)
        self.layouts = [self._layout(x) for x in (call.first, call.second, call.addend, call.result)]
        scale = np.float64 if double else np.float32
        self._alpha, self._beta = np.array(p.alpha, scale), np.array(call.beta, scale)

    def __del__(self) -> None:
        for layout in self.layouts:
            self._lt.matrix_layout_destroy(layout)
        if self.description:
            self._lt.matmul_desc_destroy(self.description)

    def _layout(self, shape: MatrixLayout) -> int:
        lt = self._lt
        layout: int = lt.matrix_layout_create(shape.kind, shape.rows, shape.columns, shape.ld)
        if shape.batch > 1:
            names = lt.MatrixLayoutAttribute
            for attribute, value in ((names.BATCH_COUNT, shape.batch), (names.STRIDED_BATCH_OFFSET, shape.stride)):
                held = np.array([value], dtype=lt.get_matrix_layout_attribute_dtype(int(attribute)))
                lt.matrix_layout_set_attribute(layout, int(attribute), held.ctypes.data, held.nbytes)
        return layout

    def arguments(self, handle: int, k: int) -> tuple[int, ...]:
        """The arguments of call ``k``, up to the algorithm."""
        p, at = self._product, self._at
        first, second, addend, result = self.layouts
        a, b, d = (
            base + (m.offset + k * m.round_step) * int(t.itemsize)
            for base, m, t in ((at.a, p.a, p.dtype), (at.b, p.b, p.dtype), (at.d, p.d, p.result))
        )
        c = d if p.c is None else at.c
        factors = self._alpha.ctypes.data, self._beta.ctypes.data
        return (handle, self.description, factors[0], b, first, a, second, factors[1], c, addend, d, result)


def description_attributes(lt: Any, call: GemmCall, at: Pointers) -> dict[str, int]:
    """Every attribute of the descriptor by name, pointers included."""
    found = {**call.attributes, "EPILOGUE": int(lt.Epilogue[call.epilogue])}
    if "BIAS_DATA_TYPE" in found:
        found["BIAS_POINTER"] = at.bias
    if "EPILOGUE_AUX_LD" in found:
        found["EPILOGUE_AUX_POINTER"] = at.aux
    return found


def compute_type(compute: Any, dtype: ir.DataType, tf32: bool) -> Any:
    """The accumulation type: float32 for half precision, and for float32 itself unless TF32 is allowed."""
    if dtype == ir.DataType.DOUBLE:
        return compute.COMPUTE_64F
    return compute.COMPUTE_32F_FAST_TF32 if dtype == ir.DataType.FLOAT and tf32 else compute.COMPUTE_32F


def alignments(p: Product, at: Pointers | None) -> tuple[int, ...]:
    """Alignment in bytes of the library's A, B, C, D, bias and aux; without pointers, that of planned memory."""
    found = []
    for name, m, dtype in (("b", p.b, p.dtype), ("a", p.a, p.dtype), ("c", p.c, p.result), ("d", p.d, p.result)):
        size = int(dtype.itemsize)
        matrix = p.d if m is None else m
        base = 0 if at is None else getattr(at, name if m is not None else "d")
        found.append(math.gcd(ALIGNMENT, base, matrix.offset * size, matrix.round_step * size))
    vectors = (0, 0) if at is None else (at.bias, at.aux)
    return *found, *(math.gcd(ALIGNMENT, base) for base in vectors)


def _extent(m: Matrix, p: Product) -> int:
    """Elements from the matrix's value to its last element in the first round."""
    last = (m.rows - 1) * m.row_step + (m.columns - 1) * m.column_step + (p.batch - 1) * m.batch_step
    return m.offset + last + 1


def _is_choice(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("algorithm"), list) and "seconds" in found

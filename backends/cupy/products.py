"""Matrix products through cuBLASLt: Gemm and MatMul, batched, with the bias in the epilogue.

cuBLASLt counts columns first. A row-major C = A·B is the column-major Cᵀ = Bᵀ·Aᵀ, so the operands change places and nothing
is copied. Of the algorithms that the library proposes the fastest is taken, measured once and kept on disk by shape.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Run
from graphc.backends.cupy.nodes import library
from graphc.backends.cupy.views import shape_of
from graphc.errors import MissingExtraError

if TYPE_CHECKING:
    from graphc.backends.cupy.cuda import CudaDevice

WORKSPACE = 32 << 20
"""Bytes of workspace, as NVIDIA advises for Hopper."""

PROPOSALS = 8
"""Algorithms that are measured."""

TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
CUDA_TYPES = {ir.DataType.FLOAT: 0, ir.DataType.DOUBLE: 1, ir.DataType.FLOAT16: 2, ir.DataType.BFLOAT16: 14}
"""``cudaDataType_t`` by element type."""


@dataclass(frozen=True, slots=True)
class Product:
    """d = alpha · op(a) · op(b) + beta · d, row-major, ``batch`` times.

    Attributes:
        m, n, k: rows and columns of d, and what is summed over.
        strides: elements from one matrix of a batch to the next of a, b and d; 0 where all share one.
        bias: whether a vector of n elements is added to every row.
    """

    m: int
    n: int
    k: int
    batch: int
    strides: tuple[int, int, int]
    transposed: tuple[bool, bool]
    dtype: ir.DataType
    alpha: float = 1.0
    beta: float = 0.0
    bias: bool = False


def is_product(node: ir.Node) -> bool:
    """Whether cuBLASLt runs the node."""
    if node.domain != "" or node.op_type not in ("Gemm", "MatMul") or node.outputs[0].dtype not in TYPES:
        return False
    return node.op_type == "Gemm" or batch_of(shape_of(node.inputs[0]), shape_of(node.inputs[1])) is not None


@library("Gemm", "MatMul", dtypes=TYPES, when=is_product, workspace=("cuBLASLt", WORKSPACE))
def bind_product(device: CudaDevice, node: ir.Node, inputs: Sequence[Any], outputs: Sequence[Any]) -> Run:
    """A product by cuBLASLt."""
    return device.library(Products).bind(node, inputs, outputs)


def batch_of(a: Sequence[int], b: Sequence[int]) -> tuple[int, int, int] | None:
    """(batch, stride of a, stride of b in matrices) of a MatMul; None where neither operand's batch is whole."""
    if len(a) < 2 or len(b) < 2:
        return None
    outer = np.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    count = int(np.prod(outer, dtype=np.int64))
    steps = []
    for shape in (a, b):
        own = int(np.prod(shape[:-2], dtype=np.int64))
        if own not in (1, count):
            return None
        steps.append(1 if own == count and count > 1 else 0)
    return count, steps[0], steps[1]


def product_of(node: ir.Node) -> tuple[Product, ir.Value | None]:
    """The product that a node is, and its third operand where that is no bias but has to be in d before."""
    a, b = shape_of(node.inputs[0]), shape_of(node.inputs[1])
    dtype = node.outputs[0].dtype
    assert dtype is not None
    if node.op_type == "MatMul":
        found = batch_of(a, b)
        assert found is not None
        batch, step_a, step_b = found
        m, n, k = a[-2], b[-1], a[-1]
        if batch > 1 and step_b == 0:  # one matrix for all rows of the batch
            return Product(m * batch, n, k, 1, (0, 0, 0), (False, False), dtype), None
        return Product(m, n, k, batch, (step_a * m * k, step_b * k * n, m * n), (False, False), dtype), None
    ta, tb = (bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB"))
    m, k = (a[1], a[0]) if ta else a
    n = b[0] if tb else b[1]
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    c = node.inputs[2] if len(node.inputs) > 2 else None
    if c is None or beta == 0.0:
        return Product(m, n, k, 1, (0, 0, 0), (ta, tb), dtype, alpha), None
    row = shape_of(c)
    if beta == 1.0 and int(np.prod(row, dtype=np.int64)) == n and row[-1:] == (n,):
        return Product(m, n, k, 1, (0, 0, 0), (ta, tb), dtype, alpha, bias=True), None
    return Product(m, n, k, 1, (0, 0, 0), (ta, tb), dtype, alpha, beta), c


@dataclass(frozen=True, slots=True)
class Layout:
    """A matrix as the library counts it: ``rows`` × ``columns``, column by column, ``batch`` of them ``stride`` apart.

    Attributes:
        transposed: whether the library turns it before it multiplies.
    """

    rows: int
    columns: int
    batch: int
    stride: int
    transposed: bool = False


def layouts(p: Product) -> tuple[Layout, Layout, Layout]:
    """The library's first operand (b), its second (a) and its result (d): row-major matrices, read column by column."""
    ta, tb = p.transposed
    first = Layout(*((p.k, p.n) if tb else (p.n, p.k)), p.batch, p.strides[1], tb)
    second = Layout(*((p.m, p.k) if ta else (p.k, p.m)), p.batch, p.strides[0], ta)
    return first, second, Layout(p.n, p.m, p.batch, p.strides[2])


class Products:
    """Binds products on one device."""

    def __init__(self, device: CudaDevice, *, tf32: bool = True) -> None:
        try:
            from nvmath.bindings import cublas, cublasLt
        except ImportError as error:
            raise MissingExtraError(
                f"the cupy backend needs nvmath-python ({error}); run: pip install 'graphc[gpu]'"
            ) from error
        self._lt, self._compute = cublasLt, cublas.ComputeType
        self._device, self._tf32 = device, tf32
        self._handle = cublasLt.create()
        self._workspace: Any = device.zeros(WORKSPACE)
        self._chosen: dict[str, Any] = {}
        self._scalars: list[Any] = []

    def bind(self, node: ir.Node, inputs: Sequence[Any], outputs: Sequence[Any]) -> Run:
        """A closure that runs the node; all descriptors are made here."""
        product, addend = product_of(node)
        a, b = inputs[0], inputs[1]
        d = outputs[0]
        bias = inputs[2] if product.bias else None
        arguments = self._arguments(product, a, b, d, bias)
        matmul, stream = self._lt.matmul, self._device.stream.ptr

        def run() -> None:
            matmul(*arguments, stream)

        if addend is None:
            return run
        source = inputs[2]
        cupy = self._device.cupy
        whole = cupy.broadcast_to(source, d.shape)

        def run_on_addend() -> None:
            cupy.copyto(d, whole)
            matmul(*arguments, stream)

        return run_on_addend

    def _arguments(self, p: Product, a: Any, b: Any, d: Any, bias: Any) -> tuple[Any, ...]:
        lt = self._lt
        kind = CUDA_TYPES[p.dtype]
        double = p.dtype == ir.DataType.DOUBLE
        if double:
            compute = self._compute.COMPUTE_64F
        elif p.dtype == ir.DataType.FLOAT and self._tf32:
            compute = self._compute.COMPUTE_32F_FAST_TF32
        else:
            compute = self._compute.COMPUTE_32F
        description = lt.matmul_desc_create(int(compute), 1 if double else 0)
        attribute = lt.MatmulDescAttribute
        shapes = layouts(p)
        self._set_description(description, attribute.TRANSA, int(shapes[0].transposed))
        self._set_description(description, attribute.TRANSB, int(shapes[1].transposed))
        if bias is not None:
            self._set_description(description, attribute.EPILOGUE, int(lt.Epilogue.BIAS))
            self._set_description(description, attribute.BIAS_POINTER, bias.data.ptr)
            self._set_description(description, attribute.BIAS_DATA_TYPE, kind)
        first, second, result = (self._layout(kind, shape) for shape in shapes)
        scale = np.float64 if double else np.float32
        alpha, beta = np.array(p.alpha, scale), np.array(p.beta, scale)
        self._scalars += [alpha, beta]  # the library reads them at every call
        pointers = (b.data.ptr, first, a.data.ptr, second)
        head = (self._handle, description, alpha.ctypes.data, *pointers, beta.ctypes.data)
        target = (d.data.ptr, result, d.data.ptr, result)
        algorithm = self._algorithm(p, head, target, (description, first, second, result))
        return (*head, *target, algorithm.ctypes.data, self._workspace.data.ptr, WORKSPACE)

    def _set_description(self, description: int, attribute: Any, value: int) -> None:
        held = np.array([value], dtype=self._lt.get_matmul_desc_attribute_dtype(int(attribute)))
        self._lt.matmul_desc_set_attribute(description, int(attribute), held.ctypes.data, held.nbytes)

    def _layout(self, kind: int, shape: Layout) -> int:
        lt = self._lt
        layout: int = lt.matrix_layout_create(kind, shape.rows, shape.columns, shape.rows)
        if shape.batch > 1:
            names = lt.MatrixLayoutAttribute
            for attribute, value in ((names.BATCH_COUNT, shape.batch), (names.STRIDED_BATCH_OFFSET, shape.stride)):
                held = np.array([value], dtype=lt.get_matrix_layout_attribute_dtype(int(attribute)))
                lt.matrix_layout_set_attribute(layout, int(attribute), held.ctypes.data, held.nbytes)
        return layout

    def _algorithm(self, p: Product, head: tuple[Any, ...], target: tuple[Any, ...], plan: tuple[int, ...]) -> Any:
        """The fastest of the library's proposals: from this run, from disk, or measured now."""
        key = repr((p, self._tf32))
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self._from_disk(key)
        if found is None:
            found = self._chosen[key] = self._measure(head, target, plan)
            self._to_disk()
        return found

    def _measure(self, head: tuple[Any, ...], target: tuple[Any, ...], plan: tuple[int, ...]) -> Any:
        lt, cuda = self._lt, self._device.cupy.cuda
        description, first, second, result = plan
        preference = lt.matmul_preference_create()
        attribute = lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
        limit = np.array([WORKSPACE], dtype=lt.get_matmul_preference_attribute_dtype(int(attribute)))
        lt.matmul_preference_set_attribute(preference, int(attribute), limit.ctypes.data, limit.nbytes)
        proposals = np.zeros(PROPOSALS, dtype=lt.matmul_heuristic_result_dtype)
        count = np.zeros(1, dtype=np.int32)
        lt.matmul_algo_get_heuristic(
            self._handle, description, first, second, result, result, preference, PROPOSALS, proposals.ctypes.data,
            count.ctypes.data,
        )  # fmt: skip
        lt.matmul_preference_destroy(preference)
        best, least = None, np.inf
        stream = self._device.stream
        for k in range(int(count[0])):
            algorithm = np.ascontiguousarray(proposals["algo"][k])
            arguments = (*head, *target, algorithm.ctypes.data, self._workspace.data.ptr, WORKSPACE, stream.ptr)
            lt.matmul(*arguments)
            begin, end = cuda.Event(), cuda.Event()
            begin.record(stream)
            for _ in range(5):
                lt.matmul(*arguments)
            end.record(stream)
            end.synchronize()
            spent = cuda.get_elapsed_time(begin, end)
            if spent < least:
                best, least = algorithm, spent
        return best

    def _file(self) -> Any:
        from graphc.backends.cupy.cuda import cache_folder

        name = self._device.cupy.cuda.runtime.getDeviceProperties(self._device.device.id)["name"].decode().replace(" ", "-")
        return cache_folder() / f"products-{name}-{self._lt.get_version()}.json"

    def _from_disk(self, key: str) -> Any:
        path = self._file()
        held = json.loads(path.read_text()) if path.exists() else {}
        if key not in held:
            return None
        return np.array([(held[key],)], dtype=self._lt.matmul_algo_dtype)[0:1]

    def _to_disk(self) -> None:
        path = self._file()
        path.parent.mkdir(parents=True, exist_ok=True)
        held = json.loads(path.read_text()) if path.exists() else {}
        for key, algorithm in self._chosen.items():
            if algorithm is not None:
                held[key] = np.ascontiguousarray(algorithm).view(np.uint64).reshape(-1).tolist()
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(held))
        partial.rename(path)

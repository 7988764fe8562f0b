"""Matrix products as cuBLASLt describes them: layouts, epilogue, and the call.

    d = epilogue(alpha · a · b + c + bias)          row-major, ``batch`` times

cuBLASLt is column-major. A row-major D = A·B is the column-major Dᵀ = Bᵀ·Aᵀ, so the operands change places and nothing
is copied; the library transposes an operand whose rows lie side by side. :class:`GemmCall` holds layouts and attributes
by the library's own names, so a machine without the library can print and evaluate them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import onnx_ir as ir

from graphc.backends.fusion.indexing import row_major
from graphc.ir.facts import required, shape_of, size_of

DOMAIN = "graphc.cupy"
"""Domain of the nodes that stand for products inside a segment; they never leave it."""

PRODUCT_OPS = ("Gemm", "MatMul")
"""Standard ops that become product nodes."""

PRODUCT = "product"
"""Key of a product's description in the node's ``meta``."""

TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
CUDA_TYPES = {ir.DataType.FLOAT: 0, ir.DataType.DOUBLE: 1, ir.DataType.FLOAT16: 2, ir.DataType.BFLOAT16: 14}
"""``cudaDataType_t`` by element type."""

ROUNDS = 16
"""Most library calls per product when no single stride describes its batch."""

FORWARD = {"": "", "relu": "RELU", "gelu": "GELU"}
BACKWARD = {"relu_grad": "DRELU", "gelu_grad": "DGELU"}

MASK_BITS, AUX_ELEMENTS = 128, 8
"""Divisor of the leading dimension of a ReLU mask (in bits) and of a GELU operand (in elements)."""

SMALL_K = 128
"""Fewest summed elements for which an epilogue that writes or reads a second matrix saves time."""


@dataclass(frozen=True, slots=True)
class Strided:
    """Elements of a value in memory: index i is at ``offset`` + Σ i · ``steps`` (elements)."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def contiguous(shape: Sequence[int]) -> Strided:
        return Strided(tuple(shape), tuple(row_major(shape)))

    def turned(self) -> Strided:
        """The same elements with the last two dimensions exchanged."""
        return Strided(_swap(self.shape), _swap(self.steps), self.offset)


def _swap(items: tuple[int, ...]) -> tuple[int, ...]:
    return (*items[:-2], items[-1], items[-2])


@dataclass(frozen=True, slots=True)
class Matrix:
    """``rows`` × ``columns``; element (r, c) of matrix b in round i is at offset + i·round_step + b·batch_step + r·row_step + …

    One of ``row_step`` and ``column_step`` is 1, the other the leading dimension.
    """

    rows: int
    columns: int
    row_step: int
    column_step: int
    batch_step: int = 0
    round_step: int = 0
    offset: int = 0

    def turned(self) -> Matrix:
        """The transpose of a usable matrix. Of one row or column, the step that leads nowhere changes."""
        other = replace(self, rows=self.columns, columns=self.rows, row_step=self.column_step, column_step=self.row_step)
        return required(other.usable())

    def usable(self) -> Matrix | None:
        """The same matrix with steps that the library accepts; None if there are none."""
        row, column = self.row_step, self.column_step
        if self.columns == 1:
            row, column = (1 if self.rows == 1 else row), 1
        elif self.rows == 1:
            row, column = (self.columns, 1) if column == 1 else (1, column)
        if column == 1 and row >= self.columns:
            return replace(self, row_step=row, column_step=1)
        if row == 1 and column >= self.rows:
            return replace(self, row_step=1, column_step=column)
        return None


@dataclass(frozen=True, slots=True)
class Product:
    """d = epilogue(alpha · a · b + c + bias).

    Attributes:
        dtype: element type of a and b.
        result: element type of c, bias, d and bias gradient.
        batch: matrices per call.
        rounds: number of calls.
        c: the added matrix, if a whole matrix is added.
        bias: whether a vector of n elements is added to every row.
        epilogue: ``relu``, ``gelu`` (the tanh form), or their gradients: the product times the slope at ``aux``.
        aux: the operand of ``gelu``, or the mask of ``relu`` (a row of bits each): forward epilogues write it if it is given,
            gradients read it.
        bias_gradient: an additional result: ``d``: the sum of the rows of the result; ``b``: of b; ``a``: of the columns of a.
    """

    a: Matrix
    b: Matrix
    d: Matrix
    dtype: ir.DataType
    result: ir.DataType
    batch: int = 1
    rounds: int = 1
    alpha: float = 1.0
    c: Matrix | None = None
    bias: bool = False
    epilogue: str = ""
    aux: Matrix | None = None
    bias_gradient: str = ""

    @property
    def m(self) -> int:
        return self.d.rows

    @property
    def n(self) -> int:
        return self.d.columns

    @property
    def k(self) -> int:
        return self.a.columns

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch * self.rounds

    @property
    def keeps_aux(self) -> bool:
        """Whether ``aux`` is a result."""
        return self.aux is not None and self.epilogue in FORWARD

    @property
    def plain(self) -> bool:
        """Whether the result is scaled by ``alpha`` and otherwise unchanged."""
        return self.c is None and not self.bias and not self.epilogue and not self.bias_gradient

    def text(self) -> str:
        """The product in one line, the same for equal products: the key of its measured time."""
        matrices = [f"{n}{_steps(m)}" for n, m in (("a", self.a), ("b", self.b), ("c", self.c), ("d", self.d)) if m]
        extra = [self.epilogue, "bias" * self.bias, f"aux{_steps(self.aux)}" if self.aux else ""]
        extra += [f"sum-{self.bias_gradient}" if self.bias_gradient else "", f"alpha{self.alpha:g}" * (self.alpha != 1.0)]
        types = f"{self.dtype.name}>{self.result.name}"
        return " ".join(filter(None, [types, f"{self.batch}x{self.m}x{self.n}x{self.k}", *matrices, *extra])).lower()


def _steps(m: Matrix) -> str:
    return f"({m.row_step},{m.column_step},{m.batch_step})"


def matmul(a: Strided, b: Strided, d: Strided, dtype: ir.DataType, result: ir.DataType) -> tuple[Product, bool] | None:
    """[…, m, k] · […, k, n] with broadcast batch dimensions, written to ``d``; None if strides cannot describe it.

    Returns:
        The product, and whether its operands are exchanged and transposed, as for a result whose rows lie side by side.
    """
    size_m, size_n, size_k = a.shape[-2], b.shape[-1], a.shape[-1]
    outer = d.shape[:-2]
    steps = [_batch_steps(x, len(outer)) for x in (a, b, d)]
    dims = _merged([(size, *(s[k] for s in steps)) for k, size in enumerate(outer) if size > 1])
    while dims and dims[-1][2] == 0 and dims[-1][1] == size_m * a.steps[-2] and dims[-1][3] == size_m * d.steps[-2]:
        size_m *= dims.pop()[0]  # one matrix b for all: the batch counts as more rows
    if not dims:
        dims = [(1, 0, 0, 0)]
    if len(dims) > 2:
        return None
    (rounds, *over), (batch, *inside) = dims if len(dims) == 2 else [(1, 0, 0, 0), dims[0]]
    if rounds > ROUNDS or (batch > 1 and inside[2] == 0):
        return None
    first = Matrix(size_m, size_k, a.steps[-2], a.steps[-1], inside[0], over[0], a.offset).usable()
    second = Matrix(size_k, size_n, b.steps[-2], b.steps[-1], inside[1], over[1], b.offset).usable()
    target = Matrix(size_m, size_n, d.steps[-2], d.steps[-1], inside[2], over[2], d.offset).usable()
    if first is None or second is None or target is None:
        return None
    exchanged = target.column_step != 1
    if exchanged:
        first, second, target = second.turned(), first.turned(), target.turned()
    return Product(first, second, target, dtype, result, batch, rounds), exchanged


def _batch_steps(x: Strided, count: int) -> list[int]:
    """The steps of the ``count`` batch dimensions; 0 for a broadcast operand."""
    own = [0 if size == 1 else step for size, step in zip(x.shape[:-2], x.steps[:-2], strict=True)]
    return [0] * (count - len(own)) + own


def _merged(dims: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """(size, steps…) of the batch dimensions, merging neighbours with matching strides in all operands."""
    found: list[tuple[int, ...]] = []
    for size, *steps in dims:
        if found and all(outer == inner * size for outer, inner in zip(found[-1][1:], steps, strict=True)):
            found[-1] = (found[-1][0] * size, *steps)
        else:
            found.append((size, *steps))
    return found


def is_product(node: ir.Node) -> bool:
    """Whether the library can run this Gemm or MatMul, or the node is a product already."""
    if node.domain == DOMAIN:
        return True
    if node.domain != "" or node.op_type not in PRODUCT_OPS or node.outputs[0].dtype not in TYPES:
        return False
    return min(size_of(node.inputs[0]), size_of(node.inputs[1])) > 0 and shape_of(node.inputs[0])[-1] > 0


def by_rule(joined: Sequence[Product], apart: Sequence[Product], saved: int) -> bool:
    """Choose the epilogue without measuring: no GPU is there, or every run must choose the same."""
    return all(p.dtype != ir.DataType.DOUBLE and (p.aux is None or p.k >= SMALL_K) for p in joined)


def product_of(node: ir.Node) -> Product:
    """The description of a product's node."""
    found: Product = node.meta[PRODUCT]
    return found


Choose: TypeAlias = Callable[[Sequence[Product], Sequence[Product], int], bool]
"""(products with the epilogue, products without it, bytes that a kernel would move instead) → whether to take the epilogue."""


# The library's description ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A column-major matrix: ``rows`` × ``columns``, columns ``ld`` apart, ``batch`` of them ``stride`` apart."""

    rows: int
    columns: int
    ld: int
    batch: int
    stride: int
    kind: int


@dataclass(frozen=True, slots=True)
class GemmCall:
    """One product in the library's terms.

    Attributes:
        first, second, addend, result: its A (our b), B (our a), C and D.
        attributes: attributes of the descriptor by name in ``cublasLtMatmulDescAttributes_t``, without pointers.
        epilogue: name in ``cublasLtEpilogue_t``.
        beta: factor of C.
    """

    first: MatrixLayout
    second: MatrixLayout
    addend: MatrixLayout
    result: MatrixLayout
    attributes: Mapping[str, int]
    epilogue: str
    beta: float


def call_of(p: Product) -> GemmCall:
    """The layouts and attributes with which the library computes ``p``."""
    epilogue = _epilogue(p)
    attributes = {"TRANSA": int(_is_turned(p.b)), "TRANSB": int(_is_turned(p.a))}
    kind = CUDA_TYPES[p.result]
    if p.bias or p.bias_gradient:
        attributes["BIAS_DATA_TYPE"] = kind
    if p.aux is not None:
        attributes["EPILOGUE_AUX_LD"] = p.aux.row_step
    result = _layout(p.d, p.batch, kind)
    addend = result if p.c is None else _layout(p.c, p.batch, kind)
    first, second = (_layout(x, p.batch, CUDA_TYPES[p.dtype]) for x in (p.b, p.a))
    return GemmCall(first, second, addend, result, attributes, epilogue, 0.0 if p.c is None else 1.0)


def _is_turned(m: Matrix) -> bool:
    """Whether the library must transpose this operand: its rows lie side by side."""
    return m.column_step != 1


def _layout(m: Matrix, batch: int, kind: int) -> MatrixLayout:
    if _is_turned(m):
        return MatrixLayout(m.rows, m.columns, m.column_step, batch, m.batch_step, kind)
    return MatrixLayout(m.columns, m.rows, m.row_step, batch, m.batch_step, kind)


def _epilogue(p: Product) -> str:
    if p.bias_gradient in ("a", "b"):
        return {"b": "BGRADA", "a": "BGRADB"}[p.bias_gradient]
    if p.epilogue in BACKWARD:
        return BACKWARD[p.epilogue] + ("_BGRAD" if p.bias_gradient else "")
    words = [FORWARD[p.epilogue], "AUX" if p.aux is not None else "", "BIAS" if p.bias else ""]
    return "_".join(filter(None, words)) or "DEFAULT"


def mask_row(columns: int) -> int:
    """Bits per row of a ReLU mask."""
    return -(-columns // MASK_BITS) * MASK_BITS

"""Rewrites onnxruntime's quantised ops (``com.microsoft``) as standard ops.

    before   y = com.microsoft.QLinearAdd(a, …, b, …)        q = com.microsoft.MatMulNBits(x, bytes, scales)
    after    y = QuantizeLinear(DequantizeLinear(a) + DequantizeLinear(b))
             q = MatMul(x, Transpose(DequantizeLinear(W, scales, block_size=32)))

onnxruntime.quantization and the graph optimizer write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import dims, dtype_of, rank, static_dims
from graphc.ir.opset_adapters import Adapter, take
from graphc.ir.quantized import MIDDLE, PACKED, Packed
from graphc.ir.state import add_initializer

Values = Sequence[ir.Value | None]


def _padded(node: ir.Node, count: int) -> list[ir.Value | None]:
    return [*node.inputs, *[None] * count][:count]


def _real(op: Builder, quantised: Values, axis: int | None = None) -> ir.Value:
    """(q - zero) · scale of the three values; ``axis`` counts where the scale has one."""
    q, scale, zero = quantised
    several = scale is not None and rank(scale) > 0 and dims(scale) != (1,)
    return op.DequantizeLinear(q, scale, zero, axis=axis if several else None)  # type: ignore[no-any-return]


def _rounded(op: Builder, y: ir.Value, scale: ir.Value | None, zero: ir.Value | None) -> list[ir.Value]:
    if zero is None:
        zero = op.const(np.zeros((), np.uint8))
    return [op.QuantizeLinear(y, scale, zero)]


def _linear(op_type: str, operands: int) -> Adapter:
    """An op over ``operands`` quantised tensors, each with scale and zero point, and a scale and zero point of the result."""

    def rule(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
        values = _padded(node, 3 * operands + 2)
        reals = [_real(op, values[3 * k : 3 * k + 3]) for k in range(operands)]
        (y,) = op.emit(op_type, reals, dict(node.attributes))
        return _rounded(op, y, *values[-2:])

    return rule


def _pooling(op_type: str) -> Adapter:
    rule = _linear(op_type, 1)

    def refusing(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
        return None if take(node, "channels_last", 0) else rule(op, node)

    return refusing


def _softmax(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    values = _padded(node, 5)
    axis, opset = int(take(node, "axis", -1)), int(take(node, "opset", 13))
    real = _real(op, values[:3])
    if opset >= 13:
        return _rounded(op, op.Softmax(real, axis=axis), *values[3:])
    flat = op.Softmax(op.Flatten(real, axis=axis % rank(real)), axis=1)
    return _rounded(op, op.reshape_like(flat, real), *values[3:])


def _concat(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    scale, zero, *inputs = node.inputs
    reals = [_real(op, inputs[k : k + 3]) for k in range(0, len(inputs), 3)]
    return _rounded(op, op.Concat(*reals, axis=int(take(node, "axis"))), scale, zero)


def _where(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    condition, x, x_scale, x_zero, y, y_scale, y_zero, scale, zero = _padded(node, 9)
    value = op.Where(condition, _real(op, (x, x_scale, x_zero)), _real(op, (y, y_scale, y_zero)))
    return _rounded(op, value, scale, zero)


def _reduce_mean(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    values = _padded(node, 5)
    axes, keep = take(node, "axes"), int(take(node, "keepdims", 1))
    y = op.ReduceMean(_real(op, values[:3]), None if axes is None else list(axes), keepdims=keep)
    return _rounded(op, y, *values[3:])


def _gemm(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    """y = α·a'·b' + c, where the scale of c is α · that of a · that of b; a float result has no scale"""
    a, a_scale, a_zero, b, b_scale, b_zero, c, scale, zero = _padded(node, 9)
    options = {name: int(take(node, name, 0)) for name in ("transA", "transB")}
    alpha = float(take(node, "alpha", 1.0))
    bias: Any = None
    if c is not None:
        product = op.Mul(a_scale, b_scale)
        bias = _real(op, (c, product if alpha == 1.0 else op.Mul(product, alpha), None), axis=0)
    y = op.Gemm(
        _real(op, (a, a_scale, a_zero)), _real(op, (b, b_scale, b_zero), 1 - options["transB"]), bias, alpha=alpha, **options
    )
    return [y] if scale is None else _rounded(op, y, scale, zero)


def _integer_product(op: Builder, a: Values, b: Values, bias: ir.Value | None) -> list[ir.Value]:
    """a · b of integers, each with scale and zero point, as a float matrix."""
    (qa, a_scale, a_zero), (qb, b_scale, b_zero) = a, b
    product = op.Cast(op.MatMulInteger(qa, qb, a_zero, b_zero), to=int(dtype_of(b_scale)))
    y = op.Mul(product, op.Mul(a_scale, b_scale))
    return [y if bias is None else op.Add(y, bias)]


def _matmul_integer_to_float(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    a, b, a_scale, b_scale, a_zero, b_zero, bias = _padded(node, 7)
    return _integer_product(op, (a, a_scale, a_zero), (b, b_scale, b_zero), bias)


def _dynamic_quantize_matmul(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
    a, b, b_scale, b_zero, bias = _padded(node, 5)
    return _integer_product(op, op.DynamicQuantizeLinear(a, _outputs=3), (b, b_scale, b_zero), bias)


def _dynamic_quantize_lstm(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """An LSTM whose weights are transposed and quantised, for each direction or for each column."""
    x, w, r, b, lengths, h, c, p, w_scale, w_zero, r_scale, r_zero = _padded(node, 12)
    weights = []
    for q, scale, zero in ((w, w_scale, w_zero), (r, r_scale, r_zero)):
        sizes = static_dims(q) if q is not None else None
        count = static_dims(scale) if scale is not None else None
        if q is None or sizes is None or count is None:
            return None
        shape, options = [sizes[0]], {"axis": 0}
        if len(count) == 2 and count[1] > 1:  # one block as long as a column
            shape, options = [sizes[0], 1, sizes[2]], {"axis": 1, "block_size": sizes[1]}
        parts = [None if v is None else op.Reshape(v, shape) for v in (scale, zero)]
        weights.append(op.Transpose(op.DequantizeLinear(q, *parts, **options), perm=[0, 2, 1]))
    return op.emit("LSTM", [x, *weights, b, lengths, h, c, p], dict(node.attributes), outputs=len(node.outputs))


def _unpacked(
    op: Builder, stored: ir.Value | None, bits: int, rows: tuple[int, ...], shape: tuple[int, ...]
) -> ir.Value | None:
    """An initializer of the integers that a constant holds several in a byte of; exports find it by its metadata."""
    tensor = None if stored is None else ir.convenience.get_const_tensor(stored)
    if stored is None or tensor is None:
        return None
    packed = Packed(stored.name or "", bits, rows, shape)
    array = packed.unpack(np.asarray(tensor.numpy()).view(np.uint8))
    value = add_initializer(op.graph, op.unique(f"{stored.name}.unpacked", value=True), array)
    value.metadata_props[PACKED] = packed.to_json()
    return value


def _middle(op: Builder, bits: int, shape: tuple[int, ...]) -> ir.Value:
    """The zero point that a file need not name: the middle of the range."""
    array = np.full(shape, 2 ** (bits - 1), np.uint8)
    (value,) = op.emit("Constant", [], {"value": ir.Tensor(array)})
    value.metadata_props[MIDDLE] = str(2 ** (bits - 1))
    return value


def _matmul_nbits(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """y = x·Wᵀ (+ bias), where the rows of W lie in blocks of ``bits``-bit integers with a scale each"""
    x, b, scales, zeros, order, bias = _padded(node, 6)
    columns, rows, size = (int(take(node, name)) for name in ("K", "N", "block_size"))
    bits = int(take(node, "bits", 4))
    blocks = -(-columns // size)
    if order is not None or take(node, "weight_prepacked", 0) or bits not in (2, 4, 8) or size * bits % 8:
        return None
    w = _unpacked(op, b, bits, (rows, blocks, size * bits // 8), (rows, blocks * size))
    if w is None or (zeros is not None and dtype_of(zeros) != ir.DataType.UINT8):
        return None
    zero: ir.Value | None = _middle(op, bits, (rows, blocks))
    if zeros is not None:
        zero = _unpacked(op, zeros, bits, (rows, -(-blocks * bits // 8)), (rows, blocks))
    if zero is None:
        return None
    real = op.DequantizeLinear(w, op.Reshape(scales, [rows, blocks]), zero, axis=1, block_size=size)
    if blocks * size != columns:
        real = op.Slice(real, [0], [columns], [1])
    y = op.MatMul(x, op.Transpose(real, perm=[1, 0]))
    return [y if bias is None else op.Add(y, bias)]


def _gather_block_quantized(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    data, indices, scales, zeros = _padded(node, 4)
    shape = None if data is None else static_dims(data)
    if data is None or scales is None or shape is None or static_dims(scales) is None:
        return None
    axis = int(take(node, "quantize_axis", 1)) % len(shape)
    gather, size, bits = int(take(node, "gather_axis", 0)), int(take(node, "block_size", 128)), int(take(node, "bits", 4))
    if dtype_of(data) == ir.DataType.UINT8:
        per_byte, blocks = 8 // bits, static_dims(scales) or ()
        values = _unpacked(op, data, bits, shape, (*shape[:-1], shape[-1] * per_byte))
        if zeros is not None:
            zeros = _unpacked(op, zeros, bits, static_dims(zeros) or (), blocks)
        else:
            zeros = _middle(op, bits, blocks)
        if values is None or zeros is None:
            return None
        data = values
    real = op.DequantizeLinear(data, scales, zeros, axis=axis, block_size=size)
    return [op.Gather(real, indices, axis=gather)]


def _linear_quantization(op_type: str) -> Adapter:
    """QuantizeLinear and DequantizeLinear of types that the standard took later; without an axis they are of a whole tensor."""

    def rule(op: Builder, node: ir.Node) -> Sequence[ir.Value]:
        (y,) = op.emit(op_type, list(node.inputs), {"axis": take(node, "axis")})
        return [y]

    return rule


QUANTIZED_OPS: dict[str, Adapter] = {
    "DequantizeLinear": _linear_quantization("DequantizeLinear"),
    "DynamicQuantizeLSTM": _dynamic_quantize_lstm,
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "GatherBlockQuantized": _gather_block_quantized,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "MatMulNBits": _matmul_nbits,
    "QGemm": _gemm,
    "QLinearAdd": _linear("Add", 2),
    "QLinearAveragePool": _pooling("AveragePool"),
    "QLinearConcat": _concat,
    "QLinearGlobalAveragePool": _pooling("GlobalAveragePool"),
    "QLinearLeakyRelu": _linear("LeakyRelu", 1),
    "QLinearMul": _linear("Mul", 2),
    "QLinearReduceMean": _reduce_mean,
    "QLinearSigmoid": _linear("Sigmoid", 1),
    "QLinearSoftmax": _softmax,
    "QLinearWhere": _where,
    "QuantizeLinear": _linear_quantization("QuantizeLinear"),
}
"""Quantised ``com.microsoft`` op → its standard form."""

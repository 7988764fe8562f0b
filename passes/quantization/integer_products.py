"""Integer matrix products and convolutions as float ones.

    before   x ─► DynamicQuantizeLinear ─► MatMulInteger(·, W:int8) ─► Cast ─► Mul(scale of x · scale of W)
    after    x ─► MatMul(·, W:float32)

The scales stand behind the product in the file. Those of the operands are folded into them; other factors stay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import dtype_of, input_of, is_float, producer_of, rank
from graphc.passes.quantization.real_values import QUANTISERS, RealValues, first_of, same_constant, source_of
from graphc.passes.quantization.weights import factors, tensor_of

INTEGER_PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
"""Integer product → the float op that computes it."""

_Factors = list[tuple[ir.Value, tuple[int, ...] | None]]


@dataclass
class _Operand:
    """An operand of an integer product: the integers, their zero point, and the scale where its quantiser names one."""

    integers: ir.Value
    zero: ir.Value | None
    quantiser: ir.Node | None = None

    @property
    def constant(self) -> bool:
        return tensor_of(source_of(self.integers)) is not None

    @property
    def scale(self) -> ir.Value | None:
        if self.quantiser is None:
            return None
        return self.quantiser.outputs[1] if self.quantiser.op_type == "DynamicQuantizeLinear" else input_of(self.quantiser, 1)


@dataclass
class _Tail:
    """The nodes behind a product that scale it: the last value of the chain, and the factors on the way."""

    value: ir.Value
    factors: _Factors


def replace_product(op: Builder, node: ir.Node, reals: RealValues) -> list[str]:
    """Replace an integer product by a float one; returns the names of weights whose scale was not found.

    Every Cast to float behind it becomes the end of a chain of its own.
    """
    operands = [_operand(node, 0), _operand(node, 1)]
    lost: list[str] = []
    for cast in [user for user in node.outputs[0].consumers() if user.op_type == "Cast" and not user.domain]:
        if not is_float(cast.outputs[0]):
            continue
        tail = _tail(cast.outputs[0], operands)
        left = list(tail.factors)
        values = []
        for k, operand in enumerate(operands):
            value = _take_operand(op, node, k, operand, left, cast.outputs[0], reals, lost)
            values.append(value)
        dtype = dtype_of(cast.outputs[0])
        values = [v if v.dtype == dtype else op.Cast(v, to=int(dtype)) for v in values]
        (product,) = op.emit(INTEGER_PRODUCTS[node.op_type], values, dict(node.attributes))
        producer = tail.value.producer()
        before, op.before = op.before, producer
        for value, _ in left:
            product = op.Mul(product, op.cast_like(value, product))
        op.before = before
        tail.value.replace_all_uses_with(product, replace_graph_outputs=True)
        _keep_name(tail.value, product, op)
    return lost


def _keep_name(old: ir.Value, new: ir.Value, op: Builder) -> None:
    name = old.name or ""
    old.name = op.unique(f"{name}.integer", value=True)
    new.name = name


def _operand(node: ir.Node, index: int) -> _Operand:
    integers, zero = input_of(node, index), first_of(node.inputs, 2 + index)
    quantiser = source_of(integers).producer()
    if quantiser is None or quantiser.op_type not in QUANTISERS or quantiser.domain:
        return _Operand(integers, zero)
    own = first_of(quantiser.outputs if quantiser.op_type == "DynamicQuantizeLinear" else quantiser.inputs, 2)
    return _Operand(integers, zero, quantiser if same_constant(own, zero) else None)


def _tail(value: ir.Value, operands: list[_Operand]) -> _Tail:
    """Follow the multiplications behind a product until the scales of both operands are found."""
    found: _Factors = []
    while not _complete(found, operands):
        users = list(value.consumers())
        if len(users) != 1 or value.is_graph_output() or users[0].op_type != "Mul" or users[0].domain:
            break
        other = next((v for v in users[0].inputs if v is not None and v is not value), None)
        more = factors(other) if other is not None else []
        if not more or not all(shape is not None or any(v is o.scale for o in operands) for v, shape in more):
            break
        found += more
        value = users[0].outputs[0]
    return _Tail(value, found)


def _complete(found: _Factors, operands: list[_Operand]) -> bool:
    for operand in operands:
        if operand.constant and not any(shape is not None for _, shape in found):
            return False
        if operand.scale is not None and not any(v is operand.scale for v, _ in found):
            return False
    return True


def _take_operand(
    op: Builder,
    node: ir.Node,
    index: int,
    operand: _Operand,
    left: _Factors,
    like: ir.Value,
    reals: RealValues,
    lost: list[str],
) -> ir.Value:
    """The real numbers of an operand; takes the factors that are its scale out of ``left``."""
    if operand.quantiser is not None and operand.scale is not None:
        taken = next((factor for factor in left if factor[0] is operand.scale), None)
        if taken is not None:
            left.remove(taken)
            return reals.real(operand.integers, operand.scale, operand.zero)
    elif operand.constant:
        weight = _weight(op, node, index, operand, left, like, reals)
        if weight is not None:
            return weight
        lost.append(operand.integers.name or "")
    one = op.const(np.ones((), dtype_of(like).numpy()))
    zero = operand.zero
    if zero is None or rank(zero) == 0:
        return reals.real(operand.integers, one, zero)
    axis = (rank(operand.integers) - (1 if index else 2)) if node.op_type == "MatMulInteger" else 0
    return reals.real(operand.integers, op.Expand(one, op.shape(zero)), zero, attributes={"axis": axis})


def _weight(
    op: Builder, node: ir.Node, index: int, operand: _Operand, left: _Factors, like: ir.Value, reals: RealValues
) -> ir.Value | None:
    """The float parameter of a constant operand, with all constant factors as its scale."""
    scales = [factor for factor in left if factor[1] is not None]
    if not scales:
        return None
    constant, count, result = tensor_of(operand.integers) is not None, rank(operand.integers), rank(like)
    axis, from_end = (0, result - 1) if node.op_type == "ConvInteger" else ((count - 1, 1) if index else (count - 2, 2))

    def align(shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if all(d == 1 for d in shape):
            return ()
        if not constant or len(shape) < from_end or np.prod(shape) != shape[-from_end]:
            return None
        return tuple(shape[-from_end] if k == axis else 1 for k in range(count))

    def align_zero(shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if all(d == 1 for d in shape):
            return ()
        return tuple(shape[0] if k == axis else 1 for k in range(count)) if constant and len(shape) == 1 else None

    source = source_of(operand.integers)
    value = reals.weights.parameter(source, scales, operand.zero, dtype=dtype_of(like), align=align, align_zero=align_zero)
    value = None if value is None else _moved_again(op, operand.integers, source, value)
    if value is not None:
        for factor in scales:
            left.remove(factor)
    return value


def _moved_again(op: Builder, moved_value: ir.Value, source: ir.Value, real: ir.Value) -> ir.Value:
    """Move ``real`` as ``source`` was moved to ``moved_value``."""
    if moved_value is source:
        return real
    node = producer_of(moved_value)
    inputs = [*node.inputs]
    inputs[0] = _moved_again(op, input_of(node, 0), source, real)
    outputs = op.emit(node.op_type, inputs, dict(node.attributes), outputs=len(node.outputs))
    return outputs[list(node.outputs).index(moved_value)]

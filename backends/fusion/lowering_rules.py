"""Expressions of a kernel that are more than arithmetic on the elements at one place: reads at computed places, random words.

DropoutMask: the mask of element i is a function of i, the seed and the step, so that a dropout costs no memory
GeluGrad: the slope in one function, which shares what its terms have in common
MaxPoolTapsGrad: the few windows that an element is in are asked whether it was their maximum
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import onnx_ir as ir

from graphc.backends.fusion import expressions
from graphc.backends.fusion.indexing import Linear, Map, flatten
from graphc.backends.fusion.kernel_source import NotFusibleError
from graphc.backends.fusion.sign_bits import BITS
from graphc.backends.fusion.views import RESHAPES, integers
from graphc.ir.declare import declaration_of
from graphc.ir.facts import constant, shape_of
from graphc.ir.ops.convolution import Window
from graphc.ir.ops.random import dropout_scale, dropout_threshold

WORDS = 4
"""What one block of Philox gives."""


class Lowering(Protocol):
    """The lowering of one kernel, as far as a rule may use it. ``guard`` names the condition under which anything is read."""

    def element(self, value: ir.Value | None, index: Map, guard: str | None) -> str:
        """The name or literal that holds element ``index`` of ``value``."""

    def number(self, value: ir.Value) -> str:
        """The only element of a value in memory, as text for any place in the kernel."""

    def is_read(self, value: ir.Value) -> bool:
        """Whether this kernel reads ``value`` from memory; otherwise it computes it."""

    def text(self, linear: Linear) -> str:
        """``linear`` as part of the kernel's text."""

    def guarded(self, when: Sequence[tuple[Linear, int, int]], guard: str | None) -> str | None:
        """The name of the condition that low ≤ linear < high in each of ``when``; None where that is always so."""

    def place(self, indices: ir.Value | None, at: Map, size: int, guard: str | None) -> Linear:
        """An index in [0, ``size``) that element ``at`` of ``indices`` holds; a negative one counts from the end."""

    def class_of(self, at: Map, index: str, size: int, guard: str | None) -> str:
        """The name of the place that ``index`` chooses of ``size``, as whole number of the kernel's width."""

    def of_vector(
        self, kind: str, offset: Linear, index: Map, guard: str | None, multiple: int, text: Callable[[str], str]
    ) -> str | None:
        """The name of a ``kind`` for all elements of a vector, made from the number of the first; None: no such vector."""


def gather_nd(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """An element of the slice that an index tuple names."""
    data, indices = node.inputs[0], node.inputs[1]
    shape, places = shape_of(data), shape_of(indices)
    batch, depth = node.attributes.get_int("batch_dims", 0), places[-1]
    outer = index[: len(places) - 1]
    chosen = [g.place(indices, (*outer, Linear.of(k)), shape[batch + k], guard) for k in range(depth)]
    return g.element(data, (*index[:batch], *chosen, *index[len(places) - 1 :]), guard)


def dropout_mask(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """0 where the Philox word of the element is below the threshold, else 1 ÷ (1 − ratio).

    Philox gives words by fours. A vector of neighbours asks for all of theirs at once; an element by itself throws three away.
    """
    declaration = declaration_of(node)
    assert declaration is not None
    values, out = declaration.attribute_values(node), node.outputs[0]
    assert out.dtype is not None
    each = int(np.prod(shape_of(out)[1:], dtype=np.int64))
    threshold, tag = dropout_threshold(values["ratio"]), zlib.crc32(values["tag"].encode())
    place = flatten(index, shape_of(out))

    def drawn(function: str, first: str, scalars: Sequence[str]) -> str:
        seed, step, offset = scalars
        return f"{function}((unsigned long long)({offset} * {each}LL + (long long){first}), {step}, {seed}, {tag}u)"

    plain = [_scalar(g, v) for v in node.inputs[1:4]]
    known = [text for text in plain if text is not None]
    words = None
    if len(known) == len(plain) and each % WORDS == 0:
        words = g.of_vector(
            "Pack<unsigned int, VECTOR>", place, index, guard, WORDS, lambda first: drawn("philox_words<VECTOR>", first, known)
        )
    if words is not None:
        word = f"{words}.at[v]"
    else:
        word = drawn("philox_word", g.text(place), [g.element(v, (), guard) for v in node.inputs[1:4]])
    kept, zero = np.asarray(dropout_scale(values["ratio"]), out.dtype.numpy()), expressions.literal(out.dtype, 0)
    if threshold > 0xFFFFFFFF:
        return zero
    return f"({word} < {threshold}u ? {zero} : {expressions.literal(out.dtype, kept)})"


def _scalar(g: Lowering, value: ir.Value | None) -> str | None:
    """A constant, a number in memory or a product of such, as text for any place in the kernel; None: something else."""
    assert value is not None
    known, node = constant(value), value.producer()
    if known is not None:
        return expressions.literal(ir.DataType.INT64, known.reshape(-1)[0])
    if g.is_read(value):
        return g.number(value)
    if node is None or node.domain or node.op_type not in (*RESHAPES, "Mul"):
        return None
    factors = [_scalar(g, v) for v in node.inputs[: 2 if node.op_type == "Mul" else 1]]
    return None if None in factors else f"({' * '.join(factor for factor in factors if factor)})"


def pooled_gradient(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """Σ dy over the windows whose maximum is this element: at most ⌈kernel ÷ stride⌉ of them along each axis."""
    declaration = declaration_of(node)
    assert declaration is not None
    batch, *places, channel = index
    window = Window.of(declaration.attribute_values(node), shape_of(node.outputs[0])[1:-1])
    assert window.begin is not None
    axes = list(zip(places, window.begin, window.kernel, window.strides, strict=True))
    terms = []
    for back in itertools.product(*(range(-(-kernel // stride)) for _, _, kernel, stride in axes)):
        at = [(place + begin) // stride + -k for (place, begin, _, stride), k in zip(axes, back, strict=True)]
        taps = tuple((place + begin) % stride + stride * k for (place, begin, _, stride), k in zip(axes, back, strict=True))
        when = [(o, 0, size) for o, size in zip(at, shape_of(node.inputs[0])[1:-1], strict=True)]
        when += [(tap, 0, kernel) for tap, kernel in zip(taps, window.kernel, strict=True)]
        inside = g.guarded(when, guard) or guard
        slope, noted = (g.element(node.inputs[k], (batch, *at, channel), inside) for k in range(2))
        terms.append(f"({noted} == {g.text(flatten(taps, window.kernel) + 1)} ? {slope} : 0)")  # what is not read is 0
    return f"({' + '.join(terms)})"


def triangle(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """Trilu: elements on one side of a diagonal, zero elsewhere."""
    given, dtype = node.inputs[1] if len(node.inputs) > 1 else None, node.outputs[0].dtype
    assert dtype is not None
    shift = "0" if given is None else g.element(given, (Linear(),) * len(shape_of(given)), guard)
    sign = ">=" if node.attributes.get_int("upper", 1) else "<="
    row, column = g.text(index[-2]), g.text(index[-1])
    value = g.element(node.inputs[0], index, guard)
    return f"({column} {sign} {row} + {shift} ? {value} : {expressions.literal(dtype, 0)})"


def diagonal(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """EyeLike."""
    shift, dtype = node.attributes.get_int("k", 0), node.outputs[0].dtype
    assert dtype is not None
    one, zero = expressions.literal(dtype, 1), expressions.literal(dtype, 0)
    return f"({g.text(index[1])} == {g.text(index[0])} + {shift} ? {one} : {zero})"


def gelu_gradient(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """dy · Gelu'(x), with constants that the type of x does not round."""
    slope = "gelu_tanh_slope" if node.attributes.get_string("approximate", "none") == "tanh" else "gelu_slope"
    dy, x = (g.element(v, index, guard) for v in node.inputs)
    return f"({dy} * {slope}({x}))"


def unpacked(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """An element of a mask that is held as bits; of the mask itself where this kernel makes the bits."""
    (bits,), (*outer, last) = node.inputs, index
    assert bits is not None
    producer = bits.producer()
    if producer is not None and not g.is_read(bits):
        return g.element(producer.inputs[0], index, guard)
    byte = g.element(bits, (*outer, last // BITS), guard)
    return f"((({byte} >> ({g.text(last % BITS)})) & 1) != 0)"


def bit_cast(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """The same bits as another type of the same width."""
    source, target = node.inputs[0], node.outputs[0]
    assert source is not None
    assert source.dtype is not None
    assert target.dtype is not None
    value = expressions.stored(source.dtype, g.element(source, index, guard))
    bits = f"same_bits<{expressions.STORAGE[target.dtype]}>({value})"
    return expressions.load(target.dtype, bits)


def cast(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """An element as another type."""
    source, target = node.inputs[0], node.outputs[0].dtype
    assert source is not None
    assert source.dtype is not None
    assert target is not None
    return expressions.cast(source.dtype, target, g.element(source, index, guard), node)


def one_hot(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """One of two values, by the class of a place."""
    depth, values = integers(node, 1), node.inputs[2]
    if depth is None:
        raise NotFusibleError("the depth of OneHot is not constant")
    axis = node.attributes.get_int("axis", -1) % len(index)
    place = g.element(node.inputs[0], (*index[:axis], *index[axis + 1 :]), guard)
    off, on = (g.element(values, (Linear.of(k),), guard) for k in range(2))
    chosen = g.class_of((*index[:axis], *index[axis + 1 :]), place, depth[0], guard)
    return f"({chosen} == {g.text(index[axis])} ? {on} : {off})"

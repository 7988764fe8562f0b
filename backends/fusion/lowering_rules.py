"""Lowering rules beyond elementwise arithmetic: reads at computed indices, random words.

DropoutMask and Uniform: element i is a function of i, the seed and the step, so that a dropout costs no memory
GeluGrad: one function computes the slope, so that its terms share subexpressions
MaxPoolTapsGrad: each element checks the few windows that contain it for whether it is their maximum
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
from graphc.backends.fusion.packed_masks import BITS
from graphc.backends.fusion.views import integers
from graphc.ir.declare import required_declaration
from graphc.ir.facts import constant, dtype_of, input_of, shape_of
from graphc.ir.ops.convolution import Window
from graphc.ir.ops.random import dropout_scale, dropout_threshold

WORDS = 4
"""Words in one Philox block."""


class Lowering(Protocol):
    """The part of a kernel's lowering that rules may use.

    ``guard`` names the condition under which a value is read.
    """

    def element(self, value: ir.Value | None, index: Map, guard: str | None) -> str:
        """The name or literal of element ``index`` of ``value``."""

    def number(self, value: ir.Value) -> str:
        """The only element of a value in memory, as text that is valid anywhere in the kernel."""

    def is_read(self, value: ir.Value) -> bool:
        """Whether this kernel reads ``value`` from memory instead of computing it."""

    def is_reshape(self, node: ir.Node) -> bool:
        """Whether the node's result shares its operand's memory."""

    def text(self, linear: Linear) -> str:
        """``linear`` as part of the kernel's text."""

    def guarded(self, when: Sequence[tuple[Linear, int, int]], guard: str | None) -> str | None:
        """The name of the condition low ≤ linear < high for each of ``when``; None if it always holds."""

    def place(self, indices: ir.Value | None, at: Map, size: int, guard: str | None) -> Linear:
        """The index in [0, ``size``) in element ``at`` of ``indices``; a negative one counts from the end."""

    def here(self, indices: ir.Value | None, axis: int) -> Linear | None:
        """The known value of ``indices`` along ``axis``, while an element is scattered there."""

    def scattered_here(
        self, updates: ir.Value | None, at: Map, key: tuple[ir.Value | None, int], here: Linear, guard: str | None
    ) -> str:
        """The element of ``updates`` for the one place ``here`` that takes it; ``key``: the indices and their axis."""

    def class_of(self, at: Map, index: str, size: int, guard: str | None) -> str:
        """The name of the class ``index`` among ``size`` classes, as an integer of the kernel's index width."""

    def of_vector(
        self, kind: str, offset: Linear, index: Map, guard: str | None, multiple: int, text: Callable[[str], str]
    ) -> str | None:
        """The name of a ``kind`` computed once for a vector, from the offset of its first element; None if that is not
        possible.
        """


def gather(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """An element of input 0 at the index along ``axis`` that input 1 holds."""
    data, indices = node.inputs[0], node.inputs[1]
    shape, places = shape_of(data), shape_of(indices)
    axis = node.attributes.get_int("axis", 0) % len(shape)
    chosen = g.place(indices, index[axis : axis + len(places)], shape[axis], guard)
    return g.element(data, (*index[:axis], chosen, *index[axis + len(places) :]), guard)


def gather_elements(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """An element of input 0 at the index along ``axis`` that the same element of input 1 holds."""
    data, indices = node.inputs[0], node.inputs[1]
    shape = shape_of(data)
    axis = node.attributes.get_int("axis", 0) % len(shape)
    here = g.here(indices, axis)
    chosen = g.place(indices, index, shape[axis], guard) if here is None else here
    return g.element(data, (*index[:axis], chosen, *index[axis + 1 :]), guard)


def scatter_elements(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """ScatterElements of one element a row; all others are input 0's."""
    data, indices, updates = node.inputs
    axis = node.attributes.get_int("axis", 0) % len(index)
    wanted = tuple(1 if k == axis else size for k, size in enumerate(shape_of(data)))
    reduction = node.attributes.get_string("reduction", "none")
    if shape_of(indices) != wanted or reduction not in ("none", "add"):
        raise NotFusibleError("ScatterElements updates several elements a row")
    at = (*index[:axis], Linear(), *index[axis + 1 :])
    place, old = g.element(indices, at, guard), g.element(data, index, guard)
    new = g.scattered_here(updates, at, (indices, axis), index[axis], guard)
    chosen = g.class_of(at, place, shape_of(data)[axis], guard)
    changed = f"({old} + {new})" if reduction == "add" else new
    return f"({chosen} == {g.text(index[axis])} ? {changed} : {old})"


def gather_nd(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """GatherND: an element of the slice at an index tuple."""
    data, indices = node.inputs[0], node.inputs[1]
    shape, places = shape_of(data), shape_of(indices)
    batch, depth = node.attributes.get_int("batch_dims", 0), places[-1]
    outer = index[: len(places) - 1]
    chosen = [g.place(indices, (*outer, Linear.of(k)), shape[batch + k], guard) for k in range(depth)]
    return g.element(data, (*index[:batch], *chosen, *index[len(places) - 1 :]), guard)


def dropout_mask(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """0 if the element's Philox word is below the threshold, else 1 ÷ (1 − ratio)."""
    ratio, dtype = required_declaration(node).attribute_values(node)["ratio"], dtype_of(node.outputs[0])
    threshold = dropout_threshold(ratio)
    kept, zero = np.asarray(dropout_scale(ratio), dtype.numpy()), expressions.literal(dtype, 0)
    if threshold > 0xFFFFFFFF:
        return zero
    return f"({_word(g, node, index, guard)} < {threshold}u ? {zero} : {expressions.literal(dtype, kept)})"


def uniform(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """The upper 24 bits of the element's Philox word, of 2²⁴."""
    return f"((float)({_word(g, node, index, guard)} >> 8) * 5.9604644775390625e-08f)"


def _word(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """The element's Philox word.

    Philox generates four words at once. A vector of neighbours uses all four; a single element discards three.
    """
    out = node.outputs[0]
    each = int(np.prod(shape_of(out)[1:], dtype=np.int64))
    tag = zlib.crc32(required_declaration(node).attribute_values(node)["tag"].encode())
    place = flatten(index, shape_of(out))

    def drawn(function: str, first: str, scalars: Sequence[str]) -> str:
        seed, step, offset = scalars
        return f"{function}((unsigned long long)({offset} * {each}LL + (long long){first}), {step}, {seed}, {tag}u)"

    plain = [_scalar(g, input_of(node, k)) for k in (1, 2, 3)]
    known = [text for text in plain if text is not None]
    words = None
    if len(known) == len(plain) and each % WORDS == 0:
        words = g.of_vector(
            "Pack<unsigned int, VECTOR>", place, index, guard, WORDS, lambda first: drawn("philox_words<VECTOR>", first, known)
        )
    if words is not None:
        return f"{words}.at[v]"
    return drawn("philox_word", g.text(place), [g.element(v, (), guard) for v in node.inputs[1:4]])


def _scalar(g: Lowering, value: ir.Value) -> str | None:
    """A constant, a number in memory or a product of these, as text that is valid anywhere in the kernel; else None."""
    known, node = constant(value), value.producer()
    if known is not None:
        return expressions.literal(ir.DataType.INT64, known.reshape(-1)[0])
    if g.is_read(value):
        return g.number(value)
    if node is None:
        return None
    product = node.op_type == "Mul" and not node.domain
    if not product and not g.is_reshape(node):
        return None
    factors = [_scalar(g, input_of(node, k)) for k in range(2 if product else 1)]
    return None if None in factors else f"({' * '.join(factor for factor in factors if factor)})"


def pooled_gradient(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """Σ dy over the windows whose maximum is this element: at most ⌈kernel ÷ stride⌉ of them along each axis."""
    batch, *places, channel = index
    window = Window.of(required_declaration(node).attribute_values(node), shape_of(node.outputs[0])[1:-1])
    axes = list(zip(places, window.padding[0], window.kernel, window.strides, strict=True))
    terms = []
    for back in itertools.product(*(range(-(-kernel // stride)) for _, _, kernel, stride in axes)):
        at = [(place + begin) // stride + -k for (place, begin, _, stride), k in zip(axes, back, strict=True)]
        taps = tuple((place + begin) % stride + stride * k for (place, begin, _, stride), k in zip(axes, back, strict=True))
        when = [(o, 0, size) for o, size in zip(at, shape_of(node.inputs[0])[1:-1], strict=True)]
        when += [(tap, 0, kernel) for tap, kernel in zip(taps, window.kernel, strict=True)]
        inside = g.guarded(when, guard) or guard
        slope, noted = (g.element(node.inputs[k], (batch, *at, channel), inside) for k in range(2))
        terms.append(f"({noted} == {g.text(flatten(taps, window.kernel) + 1)} ? {slope} : 0)")  # an unread operand is 0
    return f"({' + '.join(terms)})"


def triangle(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """Trilu: elements on one side of a diagonal, zero elsewhere."""
    given, dtype = node.inputs[1] if len(node.inputs) > 1 else None, dtype_of(node.outputs[0])
    shift = "0" if given is None else g.element(given, (Linear(),) * len(shape_of(given)), guard)
    sign = ">=" if node.attributes.get_int("upper", 1) else "<="
    row, column = g.text(index[-2]), g.text(index[-1])
    value = g.element(node.inputs[0], index, guard)
    return f"({column} {sign} {row} + {shift} ? {value} : {expressions.literal(dtype, 0)})"


def diagonal(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """EyeLike: 1 on a diagonal, 0 elsewhere."""
    shift, dtype = node.attributes.get_int("k", 0), dtype_of(node.outputs[0])
    one, zero = expressions.literal(dtype, 1), expressions.literal(dtype, 0)
    return f"({g.text(index[1])} == {g.text(index[0])} + {shift} ? {one} : {zero})"


def gelu_gradient(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """dy · Gelu'(x); the constants are not rounded to x's type."""
    slope = "gelu_tanh_slope" if node.attributes.get_string("approximate", "none") == "tanh" else "gelu_slope"
    dy, x = (g.element(v, index, guard) for v in node.inputs)
    return f"({dy} * {slope}({x}))"


def unpacked(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """An element of a bit mask; of the mask itself in the kernel that packs it."""
    bits, (*outer, last) = input_of(node), index
    producer = bits.producer()
    if producer is not None and not g.is_read(bits):
        return g.element(producer.inputs[0], index, guard)
    byte = g.element(bits, (*outer, last // BITS), guard)
    return f"((({byte} >> ({g.text(last % BITS)})) & 1) != 0)"


def bit_cast(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """BitCast: the same bits as another type of the same width."""
    source, target = dtype_of(node.inputs[0]), dtype_of(node.outputs[0])
    value = expressions.stored(source, g.element(node.inputs[0], index, guard))
    return expressions.load(target, f"same_bits<{expressions.STORAGE[target]}>({value})")


def cast(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """Cast: an element as another type."""
    source, target = node.inputs[0], dtype_of(node.outputs[0])
    return expressions.cast(dtype_of(source), target, g.element(source, index, guard), node)


def one_hot(g: Lowering, node: ir.Node, index: Map, guard: str | None) -> str:
    """OneHot: one of two values, by the class of a place."""
    depth, values = integers(node, 1), node.inputs[2]
    if depth is None:
        raise NotFusibleError("the depth of OneHot is not constant")
    axis = node.attributes.get_int("axis", -1) % len(index)
    place = g.element(node.inputs[0], (*index[:axis], *index[axis + 1 :]), guard)
    off, on = (g.element(values, (Linear.of(k),), guard) for k in range(2))
    chosen = g.class_of((*index[:axis], *index[axis + 1 :]), place, depth[0], guard)
    return f"({chosen} == {g.text(index[axis])} ? {on} : {off})"

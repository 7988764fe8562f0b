"""Expressions of a kernel that are more than arithmetic on the elements at one place: reads at computed places, random words.

DropoutMask: the mask of element i is a function of i, the seed and the step, so that a dropout costs no memory
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy import expressions
from graphc.backends.cupy.indexing import Linear, Map, flatten
from graphc.backends.cupy.views import shape_of
from graphc.ir.declare import declaration_of
from graphc.ir.ops.random import dropout_scale, dropout_threshold

if TYPE_CHECKING:
    from graphc.backends.cupy.values import Values


def gather_nd(g: Values, node: ir.Node, index: Map, guard: str | None) -> str:
    """An element of the slice that an index tuple names."""
    data, indices = node.inputs[0], node.inputs[1]
    shape, places = shape_of(data), shape_of(indices)
    batch, depth = node.attributes.get_int("batch_dims", 0), places[-1]
    outer = index[: len(places) - 1]
    chosen = [g.place(indices, (*outer, Linear.of(k)), shape[batch + k], guard) for k in range(depth)]
    return g.element(data, (*index[:batch], *chosen, *index[len(places) - 1 :]), guard)


def dropout_mask(g: Values, node: ir.Node, index: Map, guard: str | None) -> str:
    """0 where the Philox word of the element is below the threshold, else 1 ÷ (1 − ratio)."""
    declaration = declaration_of(node)
    assert declaration is not None
    values, out = declaration.attribute_values(node), node.outputs[0]
    assert out.dtype is not None
    seed, step, offset = (g.element(node.inputs[k], (), guard) for k in (1, 2, 3))
    each = int(np.prod(shape_of(out)[1:], dtype=np.int64))
    threshold, tag = dropout_threshold(values["ratio"]), zlib.crc32(values["tag"].encode())
    number = f"(unsigned long long)({offset} * {each}LL + (long long){g.text(flatten(index, shape_of(out)))})"
    word = f"philox_word({number}, {step}, {seed}, {tag}u)"
    kept = np.asarray(dropout_scale(values["ratio"]), out.dtype.numpy())
    zero = expressions.literal(out.dtype, 0)
    return f"((unsigned long long){word} < {threshold}ULL ? {zero} : {expressions.literal(out.dtype, kept)})"


def bit_cast(g: Values, node: ir.Node, index: Map, guard: str | None) -> str:
    """The same bits as another type of the same width."""
    source, target = node.inputs[0], node.outputs[0]
    assert source is not None
    assert source.dtype is not None
    assert target.dtype is not None
    value = expressions.stored(source.dtype, g.element(source, index, guard))
    bits = f"same_bits<{expressions.STORAGE[target.dtype]}>({value})"
    return expressions.load(target.dtype, bits)

"""Scatters without atomics: every run gives the same bits.

    few updates a line     one thread a line (all elements that differ in the axis only) applies its updates in order
    else                   updates are sorted by destination; threads sum runs of equal destinations, first within chunks of
                           about √n updates, then across the edges of chunks

The gradient of an embedding is the second case: for 16,384 tokens into 50,257 × 768 it writes the zeros (154 MB), sorts 16,384
indices by counting (some 50 µs), and reads every token's gradient once. If it is added to another gradient of the same weights,
it is accumulated there, without zeros:

    Add(Cast(Product), ScatterND(0, i, g))   becomes   ScatterND(Product in float32, i, g), in place
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.kernels.sorting import sorted_order
from graphc.backends.cupy.kernels.text import computed, given, load, store
from graphc.backends.cupy.libraries.registry import STORED, Launch, node_kernel, temporary
from graphc.backends.fusion.expressions import literal
from graphc.backends.fusion.graph_queries import INTO, direct_user, stand_in
from graphc.backends.fusion.grouping import fusible
from graphc.backends.fusion.op_kernels import op_kernel
from graphc.ir.facts import constant, dtype_of, input_of, producer_of, shape_of, size_of

LINES = 2048
"""Lines from which one thread a line keeps a device busy."""

BUSY = 1 << 18
"""Threads that keep a device busy: chunks are long enough to leave about this number, from √n ÷ 4 to 2 √n."""

MOST = 1 << 31

COMBINE: Mapping[str, str] = {"add": "Sum", "mul": "Prod", "max": "Maximum", "min": "Minimum"}


def fill_of(value: ir.Value | None) -> np.ndarray | None:
    """The number that fills all of ``value``; None if it is not known."""
    producer = value.producer() if value is not None else None
    while producer is not None and producer.domain == "" and producer.op_type in ("Expand", "Reshape", "Identity"):
        value = producer.inputs[0]
        producer = value.producer() if value is not None else None
    known = constant(value)
    return known.reshape(()) if known is not None and known.size == 1 else None


def omit_fills(graph: ir.Graph) -> None:
    """Replace a constant-filled operand of a scatter by its number, so that the operand is never written to memory."""
    for node in graph:
        if node.domain == "" and node.op_type in ("ScatterND", "ScatterElements") and fill_of(node.inputs[0]) is not None:
            value = input_of(node)
            while constant(value) is None:
                value = input_of(producer_of(value))
            if size_of(value) == 1 and not fusible(node):
                node.replace_input_with(0, value)


def scatter_into_sums(graph: ir.Graph) -> None:
    """Accumulate a scatter's sums in place in the value that they are added to."""
    for node in [n for n in graph if n.domain == "" and n.op_type == "ScatterND"]:
        fill, y = fill_of(node.inputs[0]), node.outputs[0]
        add = direct_user(y)
        if node.attributes.get_string("reduction", "none") != "add" or fill is None or fill != 0 or fusible(node):
            continue
        if add is None or add.op_type != "Add" or add.domain:
            continue
        base = add.inputs[1] if add.inputs[0] is y else add.inputs[0]
        if base is None or shape_of(base) != shape_of(y) or direct_user(base) is not add or not _is_free(base):
            continue
        node.replace_input_with(0, base)
        stand_in(add.outputs[0], y)
        graph.remove(add, safe=True)
        node.meta[INTO] = True
    graph.sort()


def _is_free(value: ir.Value) -> bool:
    """Whether this segment computes the memory of ``value``, and reads it only as ``value``."""
    producer = value.producer()
    if producer is None or constant(value) is not None:
        return False
    if not op_kernel(producer).same_memory:
        return True
    source = producer.inputs[0]
    return source is not None and direct_user(source) is producer and _is_free(source)


def _start(node: ir.Node) -> list[Launch]:
    """The launch that initialises the result before the first update; none for an update in place."""
    data, y = input_of(node), node.outputs[0]
    if INTO in node.meta:
        return []
    fill = fill_of(data)
    if fill is not None:
        return [Launch(store(y, "y", "row", literal(dtype_of(y), fill)), {}, {"y": y}, size_of(y))]
    return [Launch("y[row] = data[row];", {"data": data}, {"y": y}, size_of(y))]


def _clamped(index: str, size: int) -> str:
    return f"(INDEX)clamp_index({index} < 0 ? {index} + {size} : {index}, {size})"


def _combined(value: ir.Value, reduction: str, old: str, new: str) -> str:
    if reduction == "none":
        return new
    return f"{COMBINE[reduction]}::of({old}, {new})"


def _not_fusible(node: ir.Node) -> bool:
    return not fusible(node)


def _is_counted(node: ir.Node) -> bool:
    """Whether 32-bit numbers suffice for the result's slices; updates are sorted by them."""
    depth = shape_of(node.inputs[1])[-1]
    return _not_fusible(node) and math.prod(shape_of(node.outputs[0])[:depth]) < MOST


@node_kernel("ScatterND", dtypes=STORED, when=_is_counted)
def scatter_nd(node: ir.Node) -> Sequence[Launch]:
    """ScatterND: write or combine slices of the updates at index tuples of y."""
    indices, updates, y = input_of(node, 1), input_of(node, 2), node.outputs[0]
    shape, depth = shape_of(y), shape_of(indices)[-1]
    inner = int(np.prod(shape[depth:], dtype=np.int64))
    count = size_of(indices) // max(1, depth)
    start = _start(node)
    if not size_of(updates):
        return start
    place = "0"
    for k in range(depth):
        part = f"(long long)indices[(INDEX)row * {depth} + {k}]"
        place = f"({place}) * {shape[k]} + {_clamped(part, shape[k])}"
    keys = temporary(ir.DataType.INT32, [count], f"{y.name}.places")
    find = Launch(f"places[row] = (int)({place});", {"indices": indices}, {"places": keys}, count)
    return [*start, find, *_apply(node, keys, updates, y, inner)]


@node_kernel("ScatterElements", dtypes=STORED, when=_not_fusible)
def scatter_elements(node: ir.Node) -> Sequence[Launch]:
    """ScatterElements: write or combine updates at indices along one axis of y."""
    indices, updates, y = input_of(node, 1), input_of(node, 2), node.outputs[0]
    shape, axis = shape_of(y), node.attributes.get_int("axis", 0) % len(shape_of(y))
    start = _start(node)
    if not size_of(updates):
        return start
    given_shape = shape_of(indices)
    each, lines = given_shape[axis], size_of(indices) // given_shape[axis]
    strides = [int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape))]
    few = lines < LINES and each > 64 and size_of(y) < MOST
    if few and node.attributes.get_string("reduction", "none") != "none":
        keys = temporary(ir.DataType.INT32, [size_of(indices)], f"{y.name}.places")
        part = _clamped("(long long)indices[row]", shape[axis])
        body = f"{_places(given_shape, strides, axis)}\nplaces[row] = (int)(base + {part} * {strides[axis]});"
        find = Launch(body, {"indices": indices}, {"places": keys}, size_of(indices))
        return [*start, find, *_apply(node, keys, updates, y, 1)]
    return [*start, _by_lines(node, indices, updates, y, axis, strides)]


def _places(shape: Sequence[int], strides: Sequence[int], axis: int, *, lines: bool = False) -> str:
    """Statements that define ``base``: the offset in y of element ``row`` of an array of ``shape``, without ``axis``.

    Args:
        lines: ``row`` counts lines, which have no index along ``axis``.
    """
    text, rest = ["INDEX base = 0;"], "row"
    for k in reversed(range(len(shape))):
        if k == axis and lines:
            continue
        text.append(f"const INDEX i{k} = {rest} % {shape[k]}, rest{k} = {rest} / {shape[k]};")
        text += [f"base += i{k} * {strides[k]};"] if k != axis else []
        rest = f"rest{k}"
    return "\n".join(text)


def _by_lines(node: ir.Node, indices: ir.Value, updates: ir.Value, y: ir.Value, axis: int, strides: Sequence[int]) -> Launch:
    """One thread a line applies its updates in order."""
    shape, size = shape_of(indices), shape_of(y)[axis]
    own = [int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape))]
    outer = "\n".join(f"from += i{k} * {own[k]};" for k in range(len(shape)) if k != axis)
    reduction = node.attributes.get_string("reduction", "none")
    new = load(updates, "updates", "at")
    result = _combined(y, reduction, load(y, "y", "to"), new)
    body = f"""{_places(shape, strides, axis, lines=True)}
INDEX from = 0;
{outer}
for (INDEX k = 0; k < {shape[axis]}; ++k) {{
const INDEX at = from + k * {own[axis]};
const long long index = (long long)indices[at];
const INDEX to = base + {_clamped("index", size)} * {strides[axis]};
{store(y, "y", "to", result)}
}}"""
    lines = size_of(indices) // shape[axis]
    return Launch(body, given(indices=indices, updates=updates), {}, lines, updates={"y": y})


def _apply(node: ir.Node, keys: ir.Value, updates: ir.Value, y: ir.Value, inner: int) -> list[Launch]:
    """Apply slice k of ``updates`` to slice ``keys[k]`` of y; a slice has ``inner`` elements."""
    count, reduction = size_of(keys), node.attributes.get_string("reduction", "none")
    if reduction == "none":
        body = f"y[(INDEX)places[row / {inner}] * {inner} + row % {inner}] = updates[row];"
        return [Launch(body, given(places=keys, updates=updates), {}, count * inner, updates={"y": y})]
    launches, order = sorted_order(keys, str(y.name))
    root = 1 << math.ceil(math.log2(max(1, count)) / 2)
    chunk = max(16, min(root, max(root // 4, count * inner // BUSY)))
    chunks = -(-count // chunk)
    kind, combine = computed(y), COMBINE[reduction]
    wide = ir.DataType.FLOAT if kind == "float" else dtype_of(y)
    edges = {
        name: temporary(wide, [chunks * inner], f"{y.name}.{name}") for name in ("head", "tail")
    }  # sums of the run that continues from the previous chunk, and of the run that continues into the next
    common = f"""const INDEX c = row / {inner}, column = row % {inner};
const int begin = (int)c * {chunk}, end = begin + {chunk} < {count} ? begin + {chunk} : {count};"""
    old = load(y, "y", f"(INDEX)place * {inner} + column")
    put = store(y, "y", f"(INDEX)place * {inner} + column", f"{combine}::of({old}, total)")
    sums = f"""{common}
int place = places[order[begin]];
bool open = begin > 0 && places[order[begin - 1]] == place;
{kind} total = {load(updates, "updates", f"(INDEX)order[begin] * {inner} + column")};
for (int k = begin + 1; k < end; ++k) {{
const int at = order[k], next = places[at];
const {kind} value = {load(updates, "updates", f"(INDEX)at * {inner} + column")};
if (next == place) {{ total = {combine}::of(total, value); continue; }}
if (open) head[row] = total; else {{ {put} }}
open = false;
place = next;
total = value;
}}
if (open) head[row] = total;
else if (end < {count} && places[order[end]] == place) tail[row] = total;
else {{ {put} }}"""
    join = f"""{common}
if (end >= {count}) continue;
const int place = places[order[end - 1]];
if (places[order[end]] != place || (begin > 0 && places[order[begin - 1]] == place)) continue;
{kind} total = tail[row];
for (INDEX k = c + 1; k < {chunks} && places[order[(int)k * {chunk}]] == place; ++k)
total = {combine}::of(total, head[k * {inner} + column]);
{put}"""
    reads = {"places": keys, "order": order}
    flowing, edge = size_of(updates) * int(dtype_of(updates).itemsize), chunks * inner * 4
    return [
        *launches,
        Launch(sums, {**reads, "updates": updates}, edges, chunks * inner, updates={"y": y}, moved=3 * flowing + 2 * edge),
        Launch(join, {**reads, **edges}, {}, chunks * inner, updates={"y": y}, moved=4 * edge),
    ]

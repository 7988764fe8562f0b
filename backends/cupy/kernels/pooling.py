"""Pooling and its gradients, one thread an element of the result.

A gradient gathers from the windows that read its element, so no two threads write to one place and sums have a fixed order.
Tensors are N × C × spatial axes, or have their channels last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.cupy.kernels.text import (
    attributes_of,
    computed,
    flattened,
    indices,
    load,
    over_taps,
    over_windows,
    store,
    unflattened,
)
from graphc.backends.cupy.libraries.registry import FLOATS, STORED, Launch, node_kernel
from graphc.backends.fusion.expressions import literal
from graphc.backends.fusion.graph_queries import wanted
from graphc.ir.facts import dtype_of, input_of, shape_of, size_of
from graphc.ir.ops.channels_last import PREFIX
from graphc.ir.ops.convolution import Window


def _has_window(node: ir.Node) -> bool:
    return len(shape_of(node.outputs[0])) > 2


@dataclass(frozen=True, slots=True)
class Grid:
    """The layout of a pooling node's tensors: planes of spatial axes or, if ``channels`` is not 0, channels last.

    Attributes:
        size, out: spatial sizes of the tensor under the window and of the result.
    """

    size: tuple[int, ...]
    out: tuple[int, ...]
    channels: int
    window: Window

    @staticmethod
    def of(node: ir.Node, x: ir.Value | None, y: ir.Value | None) -> Grid:
        last = node.op_type.startswith(PREFIX)
        size, out = (shape[1:-1] if last else shape[2:] for shape in (shape_of(x), shape_of(y)))
        window = Window.of(attributes_of(node), size)
        return Grid(size, out, shape_of(x)[-1] if last else 0, window)

    def taken_apart(self, sizes: Sequence[int], letter: str) -> str:
        """Statements that split the row into ``plane``, an index per spatial axis, and the channel."""
        names = ["plane", *indices(letter, len(sizes))]
        if self.channels:
            return unflattened("row", [0, *sizes, self.channels], [*names, "channel"])
        return unflattened("row", [0, *sizes], names)

    def at(self, sizes: Sequence[int], letter: str) -> str:
        """The flat index of the element at these spatial indices."""
        names = ["plane", *indices(letter, len(sizes))]
        if self.channels:
            return flattened([*names, "channel"], [0, *sizes, self.channels])
        return flattened(names, [0, *sizes])


@node_kernel("MaxPool", f"graphc::{PREFIX}MaxPool", dtypes=STORED, when=_has_window)
def max_pool(node: ir.Node) -> Sequence[Launch]:
    """The maximum of each window; NaN is greatest. Indices count in x, in row- or column-major order."""
    x, y = input_of(node), node.outputs[0]
    grid = Grid.of(node, x, y)
    window, size = grid.window, grid.size
    n, kind = len(size), computed(x)
    order = list(range(n)) if not node.attributes.get_int("storage_order", 0) else list(reversed(range(n)))
    place = flattened(["plane", *(f"i{k}" for k in order)], [0, *(size[k] for k in order)])
    inside = f"""const {kind} value = {load(x, "x", grid.at(size, "i"))};
if (place < 0 || value > best || value != value) {{ best = value; place = {place}; }}"""
    writes, last = {"y": y}, store(y, "y", "row", "best")
    if len(node.outputs) > 1 and node.outputs[1].dtype is not None and wanted(node.outputs[1]):
        writes["places"] = node.outputs[1]
        last += "\nplaces[row] = place;"
    body = f"""{grid.taken_apart(grid.out, "o")}
{kind} best = {_least(x)};
long long place = -1;
{over_taps(window, size, inside)}
{last}"""
    return [Launch(body, {"x": x}, writes, size_of(y))]


@node_kernel("graphc::MaxPoolGrad", f"graphc::{PREFIX}MaxPoolGrad", dtypes=FLOATS, when=_has_window)
def max_pool_grad(node: ir.Node) -> Sequence[Launch]:
    """Σ dy over the windows whose maximum is this element: the first of equal elements, the last NaN."""
    dy, x, y = (input_of(node, k) for k in range(3))
    dx = node.outputs[0]
    grid = Grid.of(node, x, y)
    window, size = grid.window, grid.size
    n, kind = len(size), computed(x)
    same = f"""const {kind} other = {load(x, "x", grid.at(size, "j"))};
if (other == mine || (other != other && mine != mine)) first = false;"""
    # Taps before this one in row-major order; for NaN, those after it.
    skipped = f"(mine == mine ? {_not_before(n, 'u', 't')} : {_not_before(n, 't', 'u')})"
    earlier = over_taps(window, size, f"if (!first || {skipped}) continue;\n{same}", into="j", tap="u")
    at = grid.at(grid.out, "o")
    inside = f"""const {kind} most = {load(y, "y", at)};
if (!(most == mine || (most != most && mine != mine))) continue;
bool first = true;
{earlier}
if (first) total += {load(dy, "dy", at)};"""
    body = f"""{grid.taken_apart(size, "i")}
const {kind} mine = {load(x, "x", "row")};
{computed(dy)} total = 0;
{over_windows(window, grid.out, inside)}
{store(dx, "dx", "row", "total")}"""
    return [Launch(body, {"dy": dy, "x": x, "y": y}, {"dx": dx}, size_of(dx))]


def _not_before(n: int, u: str, t: str) -> str:
    """Whether tap u equals or follows tap t in row-major order."""
    text = f"{u}{n - 1} >= {t}{n - 1}"
    for k in reversed(range(n - 1)):
        text = f"({u}{k} > {t}{k} || ({u}{k} == {t}{k} && {text}))"
    return text


@node_kernel("AveragePool", "LpPool", f"graphc::{PREFIX}AveragePool", dtypes=FLOATS, when=_has_window)
def mean_pool(node: ir.Node) -> Sequence[Launch]:
    """The mean of each window, or its p-norm."""
    x, y = input_of(node), node.outputs[0]
    grid = Grid.of(node, x, y)
    window, size, kind = grid.window, grid.size, computed(x)
    value = load(x, "x", grid.at(size, "i"))
    p = node.attributes.get_int("p", 2)
    call = "" if kind == "double" else "f"
    if node.op_type != "LpPool":
        inside = f"total += {value};"
        result = f"total / ({kind})({_count(node, window, size)})"
    elif p == 1:
        inside, result = f"total += fabs{call}({value});", "total"
    elif p == 2:
        inside, result = f"{{ const {kind} value = {value}; total += value * value; }}", f"sqrt{call}(total)"
    else:
        inside = f"total += pow{call}(fabs{call}({value}), ({kind}){p});"
        result = f"pow{call}(total, ({kind})(1.0 / {p}))"
    body = f"""{grid.taken_apart(grid.out, "o")}
{kind} total = 0;
{over_taps(window, size, inside)}
{store(y, "y", "row", result)}"""
    return [Launch(body, {"x": x}, {"y": y}, size_of(y), head=COUNT)]


@node_kernel("graphc::AveragePoolGrad", f"graphc::{PREFIX}AveragePoolGrad", dtypes=FLOATS, when=_has_window)
def average_pool_grad(node: ir.Node) -> Sequence[Launch]:
    """Σ dy ÷ count over the windows that read this element."""
    dy, dx = input_of(node), node.outputs[0]
    grid = Grid.of(node, dx, dy)
    window, size, kind = grid.window, grid.size, computed(dy)
    inside = f"total += {load(dy, 'dy', grid.at(grid.out, 'o'))} / ({kind})({_count(node, window, size)});"
    body = f"""{grid.taken_apart(size, "i")}
{kind} total = 0;
{over_windows(window, grid.out, inside)}
{store(dx, "dx", "row", "total")}"""
    return [Launch(body, {"dy": dy}, {"dx": dx}, size_of(dx), head=COUNT)]


COUNT = """
// How many taps of a window that begins at `start` lie in [low, high); at least one.
static DEVICE inline int taps_inside(long long start, int taps, int step, long long low, long long high) {
  int count = 0;
  for (int t = 0; t < taps; ++t) { const long long at = start + (long long)t * step; count += at >= low && at < high; }
  return count > 0 ? count : 1;
}"""


def _count(node: ir.Node, window: Window, size: Sequence[int]) -> str:
    """The number of elements that window o0, o1, … averages."""
    begin, end = window.padding
    padded = bool(attributes_of(node).get("count_include_pad", 0))
    factors = []
    for k, length in enumerate(size):
        low, high = (-begin[k], length + end[k]) if padded else (0, length)
        start = f"(long long)o{k} * {window.strides[k]} - {begin[k]}"
        factors.append(f"taps_inside({start}, {window.kernel[k]}, {window.dilations[k]}, {low}, {high})")
    return " * ".join(factors)


def _least(value: ir.Value) -> str:
    dtype = dtype_of(value)
    if dtype.is_floating_point():
        return literal(dtype, float("-inf"))
    return literal(dtype, 0)  # never compared: the first element of a window always replaces it

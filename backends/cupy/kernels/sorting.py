"""Sorts without atomics, so that every run gives the same order.

Up to :data:`COUNTED` elements, ranks are counted: n² comparisons, some 50 µs for 16,384 on a current GPU. Beyond, a bitonic
network over 64-bit pairs (key, position) takes log²(n)/2 passes, of which those within a block of :data:`TILE` run in one
launch. Equal keys keep their order in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.kernels.text import computed, given, load
from graphc.backends.cupy.libraries.registry import STORED, Launch, node_kernel, temporary
from graphc.backends.fusion.graph_queries import wanted
from graphc.ir.facts import dtype_of, input_of, shape_of, size_of

COUNTED = 1 << 15
"""Largest row whose ranks are counted."""

TILE = 2048
"""Pairs that one block sorts in shared memory."""

Put: TypeAlias = "Callable[[str, str], str]"
"""(index in the result, index in the row) → statements that write the element and its index."""

Written: TypeAlias = "Mapping[str, ir.Value]"

FEW = 32
"""Largest k for which TopK selects one element after another."""


def sorted_order(keys: ir.Value, name: str) -> tuple[list[Launch], ir.Value]:
    """Launches that sort ``keys`` (int32, n) in ascending order and leave their positions in a temporary (int32, n)."""
    n = size_of(keys)
    order = temporary(ir.DataType.INT32, [n], f"{name}.order")
    if n <= COUNTED:
        body = """const int mine = keys[row];
int rank = 0;
FOR_COLUMNS(k) { const int other = keys[k]; rank += other < mine || (other == mine && k < row); }
rank = reduce_lanes<LANES, Sum>(rank);
if (LANE == 0) order[rank] = (int)row;"""
        return [Launch(body, {"keys": keys}, {"order": order}, n, columns=n, lanes=32)], order
    fill = "const long long pair = row < {n} ? ((long long)keys[row] << 32) | row : 0x7fffffffffffffffLL;"
    pairs, launches = _sorted_pairs({"keys": keys}, fill.format(n=n), n, 1, name)
    take = Launch("order[row] = (int)(pairs[row] & 0xffffffffLL);", {"pairs": pairs}, {"order": order}, n)
    return [*launches, take], order


def _sorted_pairs(reads: dict[str, ir.Value], fill: str, n: int, count: int, name: str) -> tuple[ir.Value, list[Launch]]:
    """Launches that sort ``count`` rows of int64 pairs in ascending order.

    Rows are padded from ``n`` to a power of two.

    Args:
        fill: statements that define ``pair`` from ``row``, the number of a padded element.
    """
    padded = max(TILE, 1 << (n - 1).bit_length())
    pairs = temporary(ir.DataType.INT64, [count * padded], f"{name}.pairs")
    launches = [Launch(f"{fill}\npairs[row] = pair;", reads, {"pairs": pairs}, count * padded)]
    tile = _steps(1, TILE, padded)
    launches.append(Launch(TILED, {"steps": tile}, {}, count * padded // TILE, updates={"pairs": pairs}, block=True))
    size = TILE * 2
    while size <= padded:
        reach = size // 2
        while reach >= TILE:
            launches.append(
                Launch(EXCHANGE, {"steps": _steps(size, reach, padded)}, {}, count * padded // 2, updates={"pairs": pairs})
            )
            reach //= 2
        steps = _steps(size, TILE, padded)
        launches.append(Launch(TILED, {"steps": steps}, {}, count * padded // TILE, updates={"pairs": pairs}, block=True))
        size *= 2
    return pairs, launches


def _steps(size: int, reach: int, row: int) -> ir.Value:
    """Operand of a launch, so that all steps of a network share one kernel: its size, its reach, a mask of the row."""
    held = ir.tensor(np.array([size, reach, row - 1], dtype=np.int64), name=f"steps.{size}.{reach}")
    return ir.Value(name=held.name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([3]), const_value=held)


EXCHANGE = """const long long size = steps[0], reach = steps[1];
const long long low = row / reach * 2 * reach + row % reach, high = low + reach;
const long long a = pairs[low], b = pairs[high];
if ((a > b) == ((low & steps[2] & size) == 0)) { pairs[low] = b; pairs[high] = a; }"""

TILED = f"""SHARED long long tile[{TILE}];
const long long first = steps[0], start = (long long)row * {TILE};
for (int k = THREAD; k < {TILE}; k += THREADS) tile[k] = pairs[start + k];
SYNC;
for (long long size = first == 1 ? 2 : first; size <= (first == 1 ? {TILE} : first); size *= 2)
  for (int reach = (int)((size < {TILE} ? size : {TILE}) / 2); reach > 0; reach /= 2) {{
    for (int k = THREAD; k < {TILE // 2}; k += THREADS) {{
      const int low = k / reach * 2 * reach + k % reach, high = low + reach;
      const long long a = tile[low], b = tile[high];
      if ((a > b) == (((start + low) & steps[2] & size) == 0)) {{ tile[low] = b; tile[high] = a; }}
    }}
    SYNC;
  }}
for (int k = THREAD; k < {TILE}; k += THREADS) pairs[start + k] = tile[k];"""


@node_kernel("TopK", dtypes=STORED)
def top_k(node: ir.Node) -> Sequence[Launch]:
    """The k greatest (or least) elements of each row in order; among equals the lower index comes first."""
    x, values, places = input_of(node), node.outputs[0], node.outputs[1]
    axis = node.attributes.get_int("axis", -1) % len(shape_of(x))
    shape, k = shape_of(x), shape_of(values)[axis]
    n, inner = shape[axis], int(np.prod(shape[axis + 1 :], dtype=np.int64))
    rows = size_of(x) // max(1, n)
    writes = given(values=values if wanted(values) else None, places=places if wanted(places) else None)
    if not writes:
        return []
    largest = bool(node.attributes.get_int("largest", 1))
    element = f"(r / {inner} * {n} + {{0}}) * {inner} + r % {inner}"
    target = f"(r / {inner} * {k} + {{0}}) * {inner} + r % {inner}"

    def put(place: str, index: str) -> str:
        copied = f"values[(INDEX)({target.format(place)})] = x[(INDEX)({element.format(index)})];"
        lines = [copied] if "values" in writes else []
        if "places" in writes:
            lines.append(f"places[(INDEX)({target.format(place)})] = {index};")
        return "\n".join(lines)

    if k <= FEW:
        return [_selected(x, writes, put, element, largest=largest, n=n, k=k, rows=rows)]
    kind = computed(x)
    if n > COUNTED and dtype_of(x).bitwidth <= 32 and dtype_of(x) != ir.DataType.UINT32:
        return list(_by_network(x, writes, put, element, largest=largest, n=n, k=k, rows=rows))
    body = f"""const INDEX r = row / {n}, i = row % {n};
const {kind} mine = {load(x, "x", f"(INDEX)({element.format('i')})")};
int rank = 0;
FOR_COLUMNS(j) {{
  const {kind} other = {load(x, "x", f"(INDEX)({element.format('j')})")};
  rank += before(other, mine) || (!before(mine, other) && j < i);
}}
rank = reduce_lanes<LANES, Sum>(rank);
if (LANE == 0 && rank < {k}) {{
{put("rank", "i")}
}}"""
    return [Launch(body, {"x": x}, writes, rows * n, columns=n, lanes=32, head=_before(largest=largest))]


def _before(*, largest: bool) -> str:
    """C functions: whether a precedes b, and the reduction to the foremost element. NaN is greatest."""
    test = "a > b || (a != a && b == b)" if largest else "a < b || (b != b && a == a)"
    return f"""template <class T> static DEVICE inline bool before(T a, T b) {{ return {test}; }}
struct Foremost {{ template <class T> static DEVICE T of(T a, T b) {{ return before(b, a) ? b : a; }} }};"""


def _selected(x: ir.Value, writes: Written, put: Put, element: str, *, largest: bool, n: int, k: int, rows: int) -> Launch:
    """One pass over the row per result: it selects the best element after the last one selected."""
    kind = computed(x)
    done = "if (found > 0 && (before(value, last) || (!before(last, value) && j <= last_place))) continue;"
    body = f"""const INDEX r = row;
{kind} last = 0;
long long last_place = -1;
for (int found = 0; found < {k}; ++found) {{
  bool any = false;
  {kind} best = 0;
  FOR_COLUMNS(j) {{
    const {kind} value = {load(x, "x", f"(INDEX)({element.format('j')})")};
    {done}
    if (!any || before(value, best)) {{ best = value; any = true; }}
  }}
  // Lanes that found nothing take the value of one that did.
  const int lane = reduce_lanes<LANES, Minimum>(any ? (int)LANE : (int)LANES);
  SHARED {kind} shared[THREADS];
  SYNC;
  shared[THREAD] = best;
  SYNC;
  if (!any) best = shared[lane];
  best = reduce_lanes<LANES, Foremost>(best);
  long long place = {n};
  FOR_COLUMNS(j) {{
    const {kind} value = {load(x, "x", f"(INDEX)({element.format('j')})")};
    {done}
    if (!before(value, best) && !before(best, value) && j < place) place = j;
  }}
  place = reduce_lanes<LANES, Minimum>(place);
  place = place < {n} ? place : {n - 1};
  if (LANE == 0) {{
{put("found", "place")}
  }}
  last = best;
  last_place = place;
}}"""
    return Launch(body, {"x": x}, writes, rows, columns=n, block=True, head=_before(largest=largest))


def _by_network(
    x: ir.Value, writes: Written, put: Put, element: str, *, largest: bool, n: int, k: int, rows: int
) -> Iterator[Launch]:
    """Sort each row by a bitonic network, as pairs (key that orders as an integer, position)."""
    padded = max(TILE, 1 << (n - 1).bit_length())
    value = load(x, "x", f"(INDEX)({element.format('i')})")
    bits = f"({value} != {value} ? 0x7fc00000u : float_to_bits((float){value} + 0.0f))"
    whole = bits if dtype_of(x).is_floating_point() else f"(unsigned int)(int){value}"
    fold = "key = (key >> 31) ? key ^ 0x7fffffffu : key;" if dtype_of(x).is_floating_point() else ""
    fill = f"""const INDEX r = row / {padded}, i = row % {padded};
long long pair = 0x7fffffffffffffffLL;
if (i < {n}) {{
  unsigned int key = {whole};
  {fold}
  const int ordered = {"~" if largest else ""}(int)key;
  pair = ((long long)ordered << 32) | i;
}}"""
    pairs, launches = _sorted_pairs({"x": x}, fill, n, rows, f"{x.name}.sorted")
    yield from launches
    body = f"""const INDEX r = row / {k}, i = row % {k};
const INDEX place = (INDEX)(pairs[(long long)r * {padded} + i] & 0xffffffffLL);
{put("i", "place")}"""
    yield Launch(body, {"x": x, "pairs": pairs}, writes, rows * k)

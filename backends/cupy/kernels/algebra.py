"""Einsum and determinants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from graphc.backends.cupy.kernels.text import computed, load, store, unflattened
from graphc.backends.cupy.libraries.registry import FLOATS, STORED, Launch, node_kernel, temporary
from graphc.backends.fusion.indexing import row_major
from graphc.ir.facts import input_of, shape_of, size_of


@node_kernel("Einsum", dtypes=STORED)
def einsum(node: ir.Node) -> Sequence[Launch]:
    """Σ Π x_k over the indices that the result lacks: threads share the sum of one element."""
    operands = [v for v in node.inputs if v is not None]
    y = node.outputs[0]
    terms, result = _letters(node)
    size = {letter: d for term, v in zip(terms, operands, strict=True) for letter, d in zip(term, shape_of(v), strict=True)}
    summed = [letter for letter in size if letter not in result]
    factors = []
    for k, (term, value) in enumerate(zip(terms, operands, strict=True)):
        steps = zip(term, row_major(shape_of(value)), shape_of(value), strict=True)
        place = " + ".join(f"{_name(letter)} * {step}" for letter, step, d in steps if d > 1) or "0"
        factors.append(f"({computed(y)}){load(value, f'x{k}', place)}")
    inner = unflattened("column", [size[s] for s in summed], [_name(s) for s in summed])
    body = f"""{unflattened("row", [size[r] for r in result], [_name(r) for r in result])}
{computed(y)} total = 0;
FOR_COLUMNS(column) {{
{inner}
total += {" * ".join(factors)};
}}
total = reduce_lanes<LANES, Sum>(total);
if (LANE == 0) {{ {store(y, "y", "row", "total")} }}"""
    reads = {f"x{k}": v for k, v in enumerate(operands)}
    return [Launch(body, reads, {"y": y}, size_of(y), columns=math.prod(size[s] for s in summed))]


def _name(letter: str) -> str:
    return f"d{ord(letter)}"


def _letters(node: ir.Node) -> tuple[list[str], str]:
    """One letter per dimension of each operand and of the result; digits stand for an ellipsis."""
    text = node.attributes["equation"].as_string().replace(" ", "")
    left, arrow, right = text.partition("->")
    terms, wide = [], 0
    for term, value in zip(left.split(","), node.inputs, strict=True):
        rest = len(shape_of(value)) - len(term.replace("...", ""))
        wide = max(wide, rest) if "..." in term else wide
        terms.append((term, rest))
    every = "0123456789"[:wide]
    found = [term.replace("...", every[wide - rest :]) for term, rest in terms]
    if arrow:
        return found, right.replace("...", every)
    once = sorted(c for c in set("".join(found)) - set(every) if "".join(found).count(c) == 1)
    return found, every + "".join(once)


@node_kernel("Det", dtypes=FLOATS)
def determinant(node: ir.Node) -> Sequence[Launch]:
    """Gaussian elimination with the largest pivot of each column; one thread a matrix."""
    x, y = input_of(node), node.outputs[0]
    n, kind = shape_of(x)[-1], computed(x)
    wide = ir.DataType.DOUBLE if kind == "double" else ir.DataType.FLOAT
    work = temporary(wide, [size_of(x)], f"{y.name}.eliminated")
    body = f"""{kind}* a = work + (long long)row * {n * n};
for (int k = 0; k < {n * n}; ++k) a[k] = {load(x, "x", f"(long long)row * {n * n} + k")};
{kind} det = 1;
for (int k = 0; k < {n}; ++k) {{
int pivot = k;
for (int i = k + 1; i < {n}; ++i) if (fabs((double)a[i * {n} + k]) > fabs((double)a[pivot * {n} + k])) pivot = i;
if (pivot != k) {{
det = -det;
for (int j = k; j < {n}; ++j) {{
const {kind} other = a[pivot * {n} + j];
a[pivot * {n} + j] = a[k * {n} + j];
a[k * {n} + j] = other;
}}
}}
det *= a[k * {n} + k];
if (a[k * {n} + k] == 0) break;
for (int i = k + 1; i < {n}; ++i) {{
const {kind} f = a[i * {n} + k] / a[k * {n} + k];
for (int j = k; j < {n}; ++j) a[i * {n} + j] -= f * a[k * {n} + j];
}}
}}
{store(y, "y", "row", "det")}"""
    return [Launch(body, {"x": x}, {"work": work, "y": y}, size_of(y))]

"""Checks all gradients for NaN and infinity, and sums their squares, in one pass each.

    AnyNonFinite(dW₁, …, dW₁₄₈), SumOfSquares(dW₁, …, dW₁₄₈)      two launches each, for any number of gradients
    AnyNonFiniteOr(flag, dW₁, …, dW₁₄₈) in place of the flag      one launch

Sums are taken in float64: each block stores a partial sum, and one block adds up the partial sums in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backends.cupy.codegen.whole_blocks import named
from graphc.backends.cupy.device.cuda_memory import address
from graphc.backends.cupy.device.protocol import Device
from graphc.backends.cupy.libraries.registry import FLOATS, library
from graphc.backends.cupy.updates.multi_tensor import ELEMENTS, TableRow, bind_table, block_shape, blocks_of
from graphc.backends.fusion import expressions
from graphc.device import Array, Run, in_order
from graphc.ir.facts import dtype_of, required

AT_ONCE = 16
"""Bytes that a thread reads at once."""


def _one_type(node: ir.Node) -> bool:
    """Whether all operands have one element type."""
    return len({v.dtype for v in node.inputs if v is not None}) == 1


def _one_type_of_floats(node: ir.Node) -> bool:
    """Whether all operands but the first have one element type, of floating-point numbers."""
    kinds = {v.dtype for v in node.inputs[1:] if v is not None}
    return len(kinds) == 1 and kinds <= set(FLOATS)


@library("graphc::AnyNonFinite", dtypes=FLOATS, when=_one_type, launches_kernels=True)
def any_non_finite(device: Device, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
    """Clear the flag; every block that finds a NaN or an infinity sets it."""
    clear = "KERNEL $name(unsigned char* out) { if (THREAD == 0) out[0] = 0; }"
    return _bind_flag(device, node.inputs[0], inputs, outputs[0], before=clear)


@library("graphc::AnyNonFiniteOr", dtypes=[ir.DataType.BOOL], when=_one_type_of_floats, launches_kernels=True)
def any_non_finite_or(device: Device, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
    """Every block that finds a NaN or an infinity sets the flag; nothing clears it."""
    before, flag = required(inputs[0]), outputs[0]
    scan = _bind_flag(device, node.inputs[1], inputs[1:], flag)
    return scan if address(before) == address(flag) else in_order([device.bind_copy(flag, before), scan])


def _bind_flag(device: Device, first: ir.Value | None, inputs: Sequence[Array | None], flag: Array, *, before: str = "") -> Run:
    return _bind(
        device, first, inputs, flag,
        before=before, start="bool found = false;", each="found |= !(v - v == 0);", end="if (found) out[0] = 1;",
        result="unsigned char",
    )  # fmt: skip


@library("graphc::SumOfSquares", dtypes=FLOATS, when=_one_type, launches_kernels=True)
def sum_of_squares(device: Device, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> Run:
    """Compute a partial sum per block, then their total."""
    count = blocks_of(_rows(inputs))
    parts: Any = device.zeros(8 * max(1, count)).view(np.float64)
    run = _bind(
        device, node.inputs[0], inputs, parts,
        start="double sum = 0;", each="sum += (double)v * (double)v;", result="double",
        end="sum = reduce_lanes<THREADS, Sum>(sum);\nif (THREAD == 0) out[BLOCK] = sum;",
    )  # fmt: skip
    total = f"""KERNEL $name(const double* parts, double* out) {{
double sum = 0;
for (long long k = THREAD; k < {count}; k += THREADS) sum += parts[k];
sum = reduce_lanes<THREADS, Sum>(sum);
if (THREAD == 0) out[0] = sum;
}}"""
    return in_order([run, _bind_block(device, total, [parts, outputs[0]])])


def _bind(
    device: Device,
    first: ir.Value | None,
    inputs: Sequence[Array | None],
    out: Array,
    *,
    start: str,
    each: str,
    end: str,
    result: str,
    before: str = "",
) -> Run:
    """Bind a kernel that runs ``start``, then ``each`` for every element v of all inputs, then ``end``, per block.

    Args:
        first: of the inputs, which all have its type.
    """
    dtype = dtype_of(first)
    rows = _rows(inputs)
    width = AT_ONCE // int(dtype.itemsize)
    if any(address(array) % AT_ONCE for row in rows for array in row.arrays):
        width = 1
    kind, load = expressions.STORAGE[dtype], expressions.load(dtype, "pack.at[j]")
    body = f"""KERNEL $name(const long long* table, const int* chunks, {result}* out) {{
const long long* at = table + (long long)chunks[2 * BLOCK] * 2;
const long long first = (long long)chunks[2 * BLOCK + 1] * {ELEMENTS};
const long long last = first + {ELEMENTS} < at[1] ? first + {ELEMENTS} : at[1];
const long long whole = first + (last - first) / {width} * {width};
const {kind}* x = (const {kind}*)at[0];
{start}
for (long long k = first + THREAD * {width}; k < whole; k += THREADS * {width}) {{
  const Pack<{kind}, {width}> pack = load_pack<{width}>(x + k);
  UNROLL
  for (int j = 0; j < {width}; ++j) {{ const {expressions.compute_type(dtype)} v = {load}; {each} }}
}}
for (long long k = whole + THREAD; k < last; k += THREADS) {{
  const {expressions.compute_type(dtype)} v = {expressions.load(dtype, "x[k]")}; {each}
}}
{end}
}}"""
    runs = [_bind_block(device, before, [out])] if before else []
    if rows:
        name, text = named(body, device.writes_cuda)
        runs.append(bind_table(device, device.compile({name: text})[name], rows, [out]))
    return in_order(runs)


def _bind_block(device: Device, body: str, arrays: Sequence[Array]) -> Run:
    name, text = named(body, device.writes_cuda)
    return device.launch(device.compile({name: text})[name], [a.reshape(-1) for a in arrays], block_shape(device, 1))


def _rows(inputs: Sequence[Array | None]) -> list[TableRow]:
    return [TableRow((array.reshape(-1),), array.size) for array in inputs if array is not None and array.size]

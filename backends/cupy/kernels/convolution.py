"""Direct convolutions, one thread an element of the result.

They serve types and ranks that no library supports, and small tensors. They read an operand from memory once per use, so a
library is far faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphc.backends.cupy.kernels.text import (
    attributes_of,
    computed,
    flattened,
    given,
    indices,
    load,
    over_taps,
    over_windows,
    store,
    unflattened,
    window_of,
)
from graphc.backends.cupy.libraries.cudnn_convolution import FORWARD, INPUT, WEIGHT
from graphc.backends.cupy.libraries.registry import FLOATS, Launch, node_kernel
from graphc.ir.facts import shape_of, size_of

BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


@node_kernel(FORWARD, dtypes=FLOATS)
@node_kernel("ConvInteger", dtypes=BYTES)
def convolution(node: ir.Node) -> Sequence[Launch]:
    """y[n, m, o] = b[m] + Σ w[m, c, t] · x[n, c, o·s + t·d − p]; zero points of the integer form are subtracted first."""
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    third, fourth = (node.inputs[k] if k < len(node.inputs) else None for k in (2, 3))
    window, size, out = window_of(node, x, w), shape_of(x)[2:], shape_of(y)[2:]
    n, kind = len(size), computed(y)
    filters, channels = shape_of(w)[:2]
    groups = attributes_of(node).get("group", 1) or 1
    value = load(x, "x", flattened(["b", "c", *indices("i", n)], [0, channels * groups, *size]))
    weight = load(w, "w", flattened(["m", "k", *indices("t", n)], [0, channels, *window.kernel]))
    start, reads = f"{kind} total = 0;", given(x=x, w=w)
    if node.op_type == "ConvInteger":
        if third is not None:
            reads = {**reads, "x0": third}
            value = f"((int){value} - (int)x0[0])"
        if fourth is not None:
            reads = {**reads, "w0": fourth}
            weight = f"((int){weight} - (int)w0[{'m' if size_of(fourth) > 1 else '0'}])"
    elif third is not None:
        reads = {**reads, "bias": third}
        start = f"{kind} total = {load(third, 'bias', 'm')};"
    inside = f"total += ({kind}){value} * ({kind}){weight};"
    body = f"""{unflattened("row", [0, filters, *out], ["b", "m", *indices("o", n)])}
{start}
const INDEX first = m / {filters // groups} * {channels};
for (INDEX k = 0; k < {channels}; ++k) {{
const INDEX c = first + k;
{over_taps(window, size, inside)}
}}
{store(y, "y", "row", "total")}"""
    return [Launch(body, reads, {"y": y}, size_of(y))]


@node_kernel("ConvTranspose", f"graphc::{INPUT}", dtypes=FLOATS)
def transposed(node: ir.Node) -> Sequence[Launch]:
    """y[n, c, i] = b[c] + Σ w[m, c, t] · x[n, m, o] over the windows o and taps t with i = o·s + t·d − p."""
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    bias = node.inputs[2] if node.domain == "" and len(node.inputs) > 2 else None
    filters, channels = shape_of(w)[:2]
    groups = attributes_of(node).get("group", 1) or 1
    window = window_of(node, y, w)
    size, out = shape_of(y)[2:], shape_of(x)[2:]
    n, kind = len(size), computed(y)
    value = load(x, "x", flattened(["b", "m", *indices("o", n)], [0, filters, *out]))
    weight = load(w, "w", flattened(["m", "k", *indices("t", n)], [0, channels, *window.kernel]))
    start = f"{kind} total = {load(bias, 'bias', 'c') if bias is not None else '0'};"
    body = f"""{unflattened("row", [0, channels * groups, *size], ["b", "c", *indices("i", n)])}
{start}
const INDEX k = c % {channels}, first = c / {channels} * {filters // groups};
for (INDEX m = first; m < first + {filters // groups}; ++m) {{
{over_windows(window, out, f"total += {value} * {weight};")}
}}
{store(y, "y", "row", "total")}"""
    return [Launch(body, given(x=x, w=w, bias=bias), {"y": y}, size_of(y))]


@node_kernel(f"graphc::{WEIGHT}", dtypes=FLOATS)
def weight_gradient(node: ir.Node) -> Sequence[Launch]:
    """dw[m, c, t] = Σ dy[n, m, o] · x[n, c, o·s + t·d − p]: threads share the sum over n and o of one weight."""
    x, dy, dw = node.inputs[0], node.inputs[1], node.outputs[0]
    window, size, out = window_of(node, x, dw), shape_of(x)[2:], shape_of(dy)[2:]
    n, kind = len(size), computed(dw)
    begin, _ = window.padding
    batch, filters = shape_of(dy)[:2]
    channels, groups = shape_of(dw)[1], attributes_of(node).get("group", 1) or 1
    columns = batch * size_of(dy) // max(1, batch * filters)
    places = [
        f"const INDEX i{k} = o{k} * {window.strides[k]} + t{k} * {window.dilations[k]} - {begin[k]};\n"
        f"if (i{k} < 0 || i{k} >= {size[k]}) continue;"
        for k in range(n)
    ]
    value = load(x, "x", flattened(["b", "c", *indices("i", n)], [0, channels * groups, *size]))
    slope = load(dy, "dy", flattened(["b", "m", *indices("o", n)], [0, filters, *out]))
    lines = "\n".join(places)
    body = f"""{unflattened("row", [0, channels, *window.kernel], ["m", "k", *indices("t", n)])}
const INDEX c = m / {filters // groups} * {channels} + k;
{kind} total = 0;
FOR_COLUMNS(column) {{
{unflattened("column", [0, *out], ["b", *indices("o", n)])}
{lines}
total += {value} * {slope};
}}
total = reduce_lanes<LANES, Sum>(total);
if (LANE == 0) {{ {store(dw, "dw", "row", "total")} }}"""
    return [Launch(body, given(x=x, dy=dy), {"dw": dw}, size_of(dw), columns=columns)]

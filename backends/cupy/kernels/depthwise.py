"""Depthwise convolutions with channels last, and their gradients with respect to the image.

Every channel has a window of its own: there is no product for tensor cores, and so little arithmetic that memory decides.
A thread takes a few neighbouring channels of a few neighbouring results, and reads each element of the image once for all the
taps of a line. cuDNN 9.19 took 750 µs on an H100 for 7 × 7 taps over 64 × 32 × 32 × 96 numbers of 16 bits, which are 25 MB.

The gradient with steps of one is the convolution of dy with the reversed window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphc.backends.cupy.kernels.text import flattened, given, indices, store, unflattened
from graphc.backends.cupy.libraries.cudnn_convolution import (
    FORWARD,
    INPUT,
    Convolution,
    convolution_of,
    depthwise,
)
from graphc.backends.cupy.libraries.registry import Launch, node_kernel, temporary
from graphc.backends.fusion import expressions
from graphc.ir.facts import dtype_of
from graphc.ir.ops.channels_last import PREFIX

CHANNELS = 4
"""Most neighbouring channels of a thread."""

RESULTS = (8, 7, 6, 5, 4)
"""How many neighbouring results a thread may compute: those that leave the fewest places of a line over."""

TAPS = 7
"""Most taps of a line whose weights a thread keeps in registers at once."""

BUSY = 132 * 512
"""Threads that keep a device busy: with fewer, each computes one result."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """y[o] = Σ w[t] · x[o·s + t·d − p] for each channel, in the terms of the result that is computed.

    Attributes:
        x, y: sizes of the image and the result: batch, space, channels.
        flip: whether the weights are taken in reverse.
    """

    x: tuple[int, ...]
    y: tuple[int, ...]
    kernel: tuple[int, ...]
    begin: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    flip: bool

    @staticmethod
    def of(found: Convolution) -> _Sum:
        """The sum of a forward convolution, or of the gradient of one with steps of one."""
        image, result = ((dims[0], *dims[2:], dims[1]) for dims in (found.x.dims, found.y.dims))
        kernel = found.w.dims[2:]
        if found.kind == FORWARD:
            return _Sum(image, result, kernel, found.begin, found.strides, found.dilations, False)
        far = ((k - 1) * d - p for k, d, p in zip(kernel, found.dilations, found.begin, strict=True))
        return _Sum(result, image, kernel, tuple(far), found.strides, found.dilations, True)


def _forward(node: ir.Node) -> bool:
    return depthwise(node) and (node.op_type == PREFIX + FORWARD or set(convolution_of(node).strides) == {1})


@node_kernel(f"graphc::{PREFIX}{FORWARD}", f"graphc::{PREFIX}{INPUT}", when=_forward)
def windows(node: ir.Node) -> Sequence[Launch]:
    """Each thread slides over a line of the image and adds every element to the results that it belongs to."""
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    found = convolution_of(node)
    what = _Sum.of(found)
    bias = node.inputs[2] if found.bias else None
    first, weights = _by_tap(w, found, flip=what.flip)
    channels, width = what.y[-1], what.y[-2]
    vector = _vector(channels)
    count = min((min(n, width) for n in RESULTS), key=lambda n: (-(-width // n) * n, -n))
    tiles, outer = -(-width // count), what.y[:-2]
    if math.prod(outer) * tiles * channels // vector < BUSY:
        count, tiles = 1, width
    n = len(outer)
    names = ["b", *indices("o", n - 1), "tile", "part"]
    body = f"""{unflattened("row", [*outer, tiles, channels // vector], names)}
const INDEX c = part * {vector}, start = tile * {count * what.strides[-1]} - {what.begin[-1]};
float total[{count}][{vector}];
UNROLL for (int o = 0; o < {count}; ++o) UNROLL for (int v = 0; v < {vector}; ++v)
total[o][v] = {"0.0f" if bias is None else expressions.load(dtype_of(bias), "bias[c + v]")};
{_over_lines(what, _line(what, x, w, vector, count))}
UNROLL for (int o = 0; o < {count}; ++o) {{
const INDEX place = tile * {count} + o;
if (place >= {width}) continue;
Pack<{_stored(y)}, {vector}> pack;
UNROLL for (int v = 0; v < {vector}; ++v) {{
{"total[o][v] = total[o][v] > 0.0f || total[o][v] != total[o][v] ? total[o][v] : 0.0f;" if found.activation else ""}
{store(y, "pack.at", "v", "total[o][v]")}
}}
store_pack<{vector}>(y + {flattened(["b", *indices("o", n - 1), "place", "c"], [0, *what.y[1:]])}, pack);
}}"""
    rows = math.prod(outer) * tiles * channels // vector
    return [first, Launch(body, given(x=x, weights=weights, bias=bias), {"y": y}, rows)]


def _over_lines(what: _Sum, inside: str) -> str:
    """Loops over the taps of all axes but the last, with ``line``, the offset of the image's line, and ``tap``."""
    n = len(what.kernel) - 1
    places = [
        f"const INDEX i{k} = o{k} * {what.strides[k]} + t{k} * {what.dilations[k]} - {what.begin[k]};\n"
        f"if (i{k} < 0 || i{k} >= {what.x[1 + k]}) continue;"
        for k in range(n)
    ]
    tap = flattened(["0", *indices("t", n)], [0, *what.kernel[:-1]])
    line = flattened(["b", *indices("i", n), "0", "c"], [0, *what.x[1:]])
    text = f"const INDEX line = {line}, tap = {tap} * {what.kernel[-1]};\n{inside}"
    for k in reversed(range(n)):
        text = f"for (int t{k} = 0; t{k} < {what.kernel[k]}; ++t{k}) {{\n{places[k]}\n{text}\n}}"
    return text


def _line(what: _Sum, x: ir.Value | None, w: ir.Value | None, vector: int, count: int) -> str:
    """Statements that add the taps of a line, a few at a time."""
    return "\n".join(_taps(what, x, w, vector, count, at) for at in range(0, what.kernel[-1], TAPS))


def _taps(what: _Sum, x: ir.Value | None, w: ir.Value | None, vector: int, count: int, at: int) -> str:
    """Statements that add the taps from ``at`` of a line.

    The loops have constant bounds, so that they vanish, and with them the pixels that no tap meets. Written out pixel by pixel,
    NVRTC takes 96 registers for 7 × 7 taps in place of 72.
    """
    taps, step, apart = min(TAPS, what.kernel[-1] - at), what.strides[-1], what.dilations[-1]
    read = expressions.load(dtype_of(x), "pack.at[v]")
    return f"""{{
float weight[{taps}][{vector}];
UNROLL for (int k = 0; k < {taps}; ++k) {{
const Pack<{_stored(w)}, {vector}> pack = load_pack<{vector}>(weights + (tap + {at} + k) * {what.y[-1]} + c);
UNROLL for (int v = 0; v < {vector}; ++v) weight[k][v] = {expressions.load(dtype_of(w), "pack.at[v]")};
}}
UNROLL for (int p = 0; p < {(count - 1) * step + (taps - 1) * apart + 1}; ++p) {{
const INDEX i = start + {at * apart} + p;
if (i < 0 || i >= {what.x[-2]}) continue;
const Pack<{_stored(x)}, {vector}> pack = load_pack<{vector}>(x + line + i * {what.x[-1]});
UNROLL for (int k = 0; k < {taps}; ++k) {{
const int far = p - k * {apart};
if (far >= 0 && far % {step} == 0 && far / {step} < {count})
UNROLL for (int v = 0; v < {vector}; ++v) total[far / {step}][v] += {read} * weight[k][v];
}}
}}
}}"""


@node_kernel(f"graphc::{PREFIX}{INPUT}", when=depthwise)
def spread(node: ir.Node) -> Sequence[Launch]:
    """dx[i] = Σ w[t] · dy[o] over the taps with i = o·s + t·d − p; each thread computes one element of a few channels."""
    dy, w, dx = node.inputs[0], node.inputs[1], node.outputs[0]
    found = convolution_of(node)
    first, weights = _by_tap(w, found)
    batch, channels, *size = found.x.dims
    out, n = found.y.dims[2:], len(size)
    vector = _vector(channels)
    tap = flattened(["0", *indices("t", n)], [0, *found.w.dims[2:]])
    place = flattened(["b", *indices("o", n), "c"], [0, *out, channels])
    read, weight = (expressions.load(dtype_of(value), f"{name}.at[v]") for value, name in ((dy, "q"), (w, "z")))
    inside = f"""const Pack<{_stored(dy)}, {vector}> q = load_pack<{vector}>(dy + {place});
const Pack<{_stored(w)}, {vector}> z = load_pack<{vector}>(weights + {tap} * {channels} + c);
UNROLL for (int v = 0; v < {vector}; ++v) total[v] += {read} * {weight};"""
    for k in reversed(range(n)):
        inside = (
            f"for (int t{k} = 0; t{k} < {found.w.dims[2 + k]}; ++t{k}) {{\n"
            f"const INDEX far{k} = i{k} + {found.begin[k]} - t{k} * {found.dilations[k]};\n"
            f"if (far{k} < 0 || far{k} % {found.strides[k]}) continue;\n"
            f"const INDEX o{k} = far{k} / {found.strides[k]};\nif (o{k} >= {out[k]}) continue;\n{inside}\n}}"
        )
    body = f"""{unflattened("row", [batch, *size, channels // vector], ["b", *indices("i", n), "part"])}
const INDEX c = part * {vector};
float total[{vector}];
UNROLL for (int v = 0; v < {vector}; ++v) total[v] = 0.0f;
{inside}
Pack<{_stored(dx)}, {vector}> pack;
UNROLL for (int v = 0; v < {vector}; ++v) {{ {store(dx, "pack.at", "v", "total[v]")} }}
store_pack<{vector}>(dx + row * {vector}, pack);"""
    rows = batch * math.prod(size) * channels // vector
    return [first, Launch(body, given(dy=dy, weights=weights), {"dx": dx}, rows)]


def _by_tap(w: ir.Value | None, found: Convolution, *, flip: bool = False) -> tuple[Launch, ir.Value]:
    """The launch that puts the weights of all channels side by side, tap by tap, and where it puts them."""
    channels, taps = found.w.dims[0], math.prod(found.w.dims[2:])
    dtype = dtype_of(w)
    weights = temporary(dtype, (taps, channels), "weights")
    tap = f"{taps - 1} - t" if flip else "t"
    body = f"""const INDEX t = row / {channels}, c = row % {channels};
weights[row] = w[c * {taps} + {tap}];"""
    return Launch(body, given(w=w), {"weights": weights}, taps * channels), weights


def _vector(channels: int) -> int:
    return next(n for n in _halves(CHANNELS) if channels % n == 0)


def _halves(number: int) -> Iterator[int]:
    while number:
        yield number
        number //= 2


def _stored(value: ir.Value | None) -> str:
    return expressions.STORAGE[dtype_of(value)]

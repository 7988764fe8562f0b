"""Convolution and its gradients: on matrix tiles or by Winograd's algorithm where it takes less time, else oneDNN.

Those of float64 are in :mod:`.wide_convolution`. Without oneDNN, only the weight gradient of float32 has a kernel
(:mod:`.sampled_gradient`). Measured on ResNet-50, batch 4, two threads: oneDNN's three primitives take about 0.7 of the time of
onnxruntime's Conv and ConvTranspose plus that weight gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, kernel
from graphc.backends.onnxruntime.kernels.common.arrays import given, have_spatial_axes, optional
from graphc.backends.onnxruntime.kernels.common.jit import jit
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.convolutions import (
    depthwise,
    direct,
    direct_plans,
    planes,
    pointwise,
    sampled_gradient,
    tiled_convolution,
    unfolded,
    wide_convolution,
    winograd,
    winograd_plans,
)
from graphc.backends.onnxruntime.kernels.convolutions.epilogues import PLAIN, ConvEpilogue, finish
from graphc.backends.onnxruntime.kernels.onednn.binding import library
from graphc.backends.onnxruntime.kernels.onednn.primitives import ROWS_PAY, ConvolutionPrimitive, MatmulPrimitive
from graphc.backends.onnxruntime.kernels.products.tiles import is_better_on_tiles, product_on_tiles
from graphc.backends.onnxruntime.vectors.tiles import SIDE
from graphc.device import Array, Run, in_order
from graphc.ir.facts import inputs_of, required, static_dims
from graphc.ir.ops.convolution import Window

WORTH_ROUNDING = 48
"""Multiplications for each element of images and weights from which a convolution in bfloat16 is faster than in float32.

Measured on a processor with AMX, over the layers of ResNet-18, MobileNetV2 and a U-Net.
"""


TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _is_wide(node: ir.Node) -> bool:
    """Whether it is of float64."""
    return required(node.inputs[0]).dtype == ir.DataType.DOUBLE


def _is_native(node: ir.Node) -> bool:
    found = 0 not in (static_dims(node.outputs[0]) or (0,)) if _is_wide(node) else library() is not None
    return found and have_spatial_axes(node, (0, 1), 3)


def _weight_gradient_is_native(node: ir.Node) -> bool:
    return have_spatial_axes(node, (0, 1), 3 if _is_wide(node) or library() is not None else 2)


@kernel("onnxruntime", "Conv", dtypes=TYPES, when=_is_native)
def conv(k: Binding) -> Run:
    """y = Conv(x, w, bias)"""
    (x, w), (y,), bias = given(k.inputs, 2), given(k.outputs, 1), optional(k.inputs, 2)
    if x.dtype == np.float64:
        return wide_convolution.convolve(k.pool, k.attributes, x, w, bias, y)
    return _convolve(k, x, w, y, ConvEpilogue(shift=bias))


def _computes_what_follows(node: ir.Node) -> bool:
    """Whether a kernel computes all of a FusedConv while it writes the convolution's results.

    oneDNN does so for a scale and a shift alone. Where a residual or an activation follows too, the node is taken apart: the
    kernel that is generated for them, and for what comes next, scales and shifts in the same sweep.
    """
    if not _is_native(node):
        return False
    if not node.attributes.get_string("activation", "") and (len(node.inputs) < 5 or node.inputs[4] is None):
        return True
    x, w, y = (np.broadcast_to(np.float32(0), static_dims(value) or ()) for value in (*inputs_of(node)[:2], node.outputs[0]))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    group, window = int(attributes.get("group", 1)), Window.of(attributes, x.shape[2:], w.shape[2:])
    if planes.is_fastest("forward", x, w, y, group, window) or depthwise.is_fastest("forward", x, w, group, window):
        return True
    return (group == 1 and winograd_plans.is_faster("forward", window, x.shape, y.shape)) or direct_plans.is_faster(
        x, w, y, group, window, threads=1
    )


@kernel("onnxruntime", "graphc::FusedConv", when=_computes_what_follows)
def fused_conv(k: Binding) -> Run:
    """y = activation(scale · Conv(x, w) + shift + residual)"""
    (x, w), (y,) = given(k.inputs, 2), given(k.outputs, 1)
    return _convolve(k, x, w, y, ConvEpilogue.of(k, 2))


def _convolve(k: Binding, x: Array, w: Array, y: Array, epilogue: ConvEpilogue) -> Run:
    """y = Conv(x, w), and what follows."""
    planar = _plane_window(k, "forward", x, w, y)
    if planar is not None:
        return planes.convolve(k.pool, x, w, epilogue, y, planar)
    alone = _depthwise_window(k, "forward", x, w)
    if alone is not None:
        return direct.convolve(k.pool, x, w, epilogue, y, alone, int(k.attributes.get("group", 1)))

    def otherwise(epilogue: ConvEpilogue) -> Run:
        window = _winograd_window(k, "forward", x, w, y)
        if window is not None:
            return winograd.convolve(k.pool, scratchpad_of(k.pool), x, w, epilogue, y, window)
        window = _unfolded_window(k, "forward", x, w, y)
        if window is not None:
            return unfolded.convolve(k.pool, x, w, epilogue, y, window)
        return _direct(k, x, w, epilogue, y) or _forward(k, x, w, epilogue, y)

    tiled = _tiled_window(k, "forward", x, w, y)
    if tiled is None:
        return otherwise(epilogue)
    bias = epilogue.bias
    made = tiled_convolution.convolve("forward", k.pool, x, w, bias, y, tiled, lambda: otherwise(ConvEpilogue(shift=bias)))
    return finish(k.pool, made, y, epilogue.behind_bias)


def _is_plainly_padded(node: ir.Node) -> bool:
    attributes = node.attributes
    own = attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and "output_shape" not in attributes
    return own and _is_native(node) and 0 not in (static_dims(node.outputs[0]) or (0,))


@kernel("onnxruntime", "ConvTranspose", dtypes=TYPES, when=_is_plainly_padded)
def conv_transpose(k: Binding) -> Run:
    """y = ConvTranspose(x, w) + bias: the input gradient of the convolution from y to x with the same window"""
    (x, w), (y,), bias = given(k.inputs, 2), given(k.outputs, 1), optional(k.inputs, 2)
    if x.dtype == np.float64:
        return wide_convolution.input_gradient(k.pool, k.attributes, x, w, y, bias)
    return finish(k.pool, _input_gradient(k, x, w, y), y, ConvEpilogue(shift=bias))


@kernel("onnxruntime", "graphc::ConvGradInput", dtypes=TYPES, when=_is_native)
def conv_grad_input(k: Binding) -> Run:
    """dx from dy and w."""
    (dy, w), (dx,) = given(k.inputs, 2), given(k.outputs, 1)
    if dy.dtype == np.float64:
        return wide_convolution.input_gradient(k.pool, k.attributes, dy, w, dx)
    return _input_gradient(k, dy, w, dx)


def _input_gradient(k: Binding, dy: Array, w: Array, dx: Array) -> Run:
    planar = _plane_window(k, "input", dx, w, dy)
    if planar is not None:
        return planes.input_gradient(k.pool, dy, w, dx, planar)
    alone = _depthwise_window(k, "input", dx, w)
    if alone is not None:
        around = _turn_around(k, w, dx)
        return depthwise.input_gradient(k.pool, dy, w, dx, alone) if around is None else around.directly(k.pool, dy, dx)

    def otherwise() -> Run:
        window = _winograd_window(k, "input", dx, w, dy)
        if window is not None:
            return winograd.input_gradient(k.pool, scratchpad_of(k.pool), dy, w, dx, window)
        window = _unfolded_window(k, "input", dx, w, dy)
        if window is not None:
            return unfolded.input_gradient(k.pool, dy, w, dx, window)
        return _turned(k, dy, w, dx) or _onednn(k, "input", dx, w, dy)

    tiled = _tiled_window(k, "input", dx, w, dy)
    return otherwise() if tiled is None else tiled_convolution.convolve("input", k.pool, dx, w, None, dy, tiled, otherwise)


@kernel("onnxruntime", "graphc::ConvGradWeight", dtypes=TYPES, when=_weight_gradient_is_native)
def conv_grad_weight(k: Binding) -> Run:
    """dw from x and dy."""
    (x, dy), (dw,) = given(k.inputs, 2), given(k.outputs, 1)
    if x.dtype == np.float64:
        return wide_convolution.weight_gradient(k.pool, k.attributes, x, dy, dw)
    planar = _plane_window(k, "weight", x, dw, dy)
    if planar is not None:
        return planes.weight_gradient(k.pool, x, dw, dy, planar)
    window = Window.of(k.attributes, x.shape[2:], dw.shape[2:])
    if depthwise.is_faster(dw, int(k.attributes.get("group", 1)), window.dilations, library() is not None):
        return depthwise.weight_gradient(k.pool, x, dw, dy, window)

    def otherwise() -> Run:
        found = _winograd_window(k, "weight", x, dw, dy)
        if found is not None:
            return winograd.weight_gradient(k.pool, scratchpad_of(k.pool), x, dy, dw, found)
        found = _unfolded_window(k, "weight", x, dw, dy)
        if found is not None:
            return unfolded.weight_gradient(k.pool, x, dy, dw, found)
        if alone and pointwise.is_faster(x, dw, dy) and not _is_rounded(k, x, dw, dy):
            images, slopes = (array.reshape(*array.shape[:2], -1) for array in (x, dy))
            return pointwise.weight_gradient(k.pool, images, slopes, dw.reshape(dw.shape[:2]))
        group, rounded = int(k.attributes.get("group", 1)), _is_rounded(k, x, dw, dy)
        if not rounded and direct_plans.gradient_is_faster(x, dw, dy, group, window, k.pool.threads):
            return direct.weight_gradient(k.pool, x, dy, dw, window, group)
        return _onednn(k, "weight", x, dw, dy) if library() is not None else sampled_gradient.weight_gradient(k, x, dw, dy)

    alone = int(k.attributes.get("group", 1)) == 1 and pointwise.reads_single_pixels(window)
    if alone and _is_sum_on_tiles(k.pool, dw, dy):
        images, slopes = (array.reshape(*array.shape[:2], -1) for array in (x, dy))
        sums = dw.reshape(dw.shape[:2])
        return product_on_tiles(k.pool, slopes, images.transpose(0, 2, 1), sums, None, otherwise, summed=True)
    tiled = _tiled_window(k, "weight", x, dw, dy)
    return otherwise() if tiled is None else tiled_convolution.weight_gradient(k.pool, x, dw, dy, tiled, otherwise)


def _plane_window(k: Binding, kind: str, x: Array, w: Array, y: Array) -> Window | None:
    """The window of a convolution of single channels that is fastest a plane at a time; else None."""
    window = Window.of(k.attributes, x.shape[2:], w.shape[2:])
    return window if planes.is_fastest(kind, x, w, y, int(k.attributes.get("group", 1)), window) else None


def _depthwise_window(k: Binding, kind: str, x: Array, w: Array) -> Window | None:
    """The window of a convolution of single channels that is faster without oneDNN; else None."""
    window = Window.of(k.attributes, x.shape[2:], w.shape[2:])
    return window if depthwise.is_fastest(kind, x, w, int(k.attributes.get("group", 1)), window) else None


MULTIPLICATION_TIME, GRADIENT_SHARE, WEIGHT_TIME = 2 / 150, 1.3, 3.0
"""Nanoseconds of a multiplication on one core with AMX in other kernels, how much more it takes in weight gradients, and what
oneDNN adds to these for a weight: 2.4 to 7, measured over layers with maps of 2 × 2 to 7 × 7."""


def _tiled_window(k: Binding, kind: str, x: Array, w: Array, y: Array) -> Window | None:
    """The window of a convolution that matrix tiles compute in less time; else None."""
    if int(k.attributes.get("group", 1)) != 1 or library() is None:
        return None
    window = Window.of(k.attributes, x.shape[2:], w.shape[2:])
    others = float(y.size) * math.prod(w.shape[1:])
    transformed = winograd_plans.is_faster(kind, window, x.shape, y.shape)
    if transformed:
        if kind != "weight":
            return None  # as fast on cores that run nothing else, and faster on others
        others = winograd_plans.multiplications(kind, x.shape, y.shape)
    others *= MULTIPLICATION_TIME * (GRADIENT_SHARE if kind == "weight" else 1)
    if kind == "weight" and not transformed:
        others += WEIGHT_TIME * w.size
    return window if tiled_convolution.is_faster(kind, x.shape, w.shape, y.shape, window, k.pool, others) else None


def _is_sum_on_tiles(pool: Pool, dw: Array, dy: Array) -> bool:
    """Whether dw of a window of one pixel, Σ dy·xᵀ over the samples, takes less time on matrix tiles than in oneDNN.

    Forward and data gradients of such windows stay with oneDNN: it is nearly as fast on cores that run nothing else, and faster
    on others.
    """
    if library() is None:
        return False
    pixels = math.prod(dy.shape[2:])
    depth = len(dy) * -(-pixels // SIDE) * SIDE
    others = (GRADIENT_SHARE * MULTIPLICATION_TIME * len(dy) * pixels + WEIGHT_TIME) * dw.size
    return is_better_on_tiles(pool, (1, *dw.shape[:2]), depth, others)


def _winograd_window(k: Binding, kind: str, x: Array, w: Array, y: Array) -> Window | None:
    """The window of a convolution that Winograd's algorithm computes in less time; else None."""
    if int(k.attributes.get("group", 1)) != 1 or _is_rounded(k, x, w, y):
        return None
    window = Window.of(k.attributes, x.shape[2:], w.shape[2:])
    return window if winograd_plans.is_faster(kind, window, x.shape, y.shape) else None


def _unfolded_window(k: Binding, kind: str, x: Array, w: Array, y: Array) -> Window | None:
    """The window of a convolution over few pixels that products with the weights compute in less time; else None."""
    if _is_rounded(k, x, w, y):
        return None
    window = Window.of(k.attributes, x.shape[2:], w.shape[2:])
    return window if unfolded.is_faster(kind, x, w, y, int(k.attributes.get("group", 1)), window) else None


def _onednn(k: Binding, kind: str, x: Array, w: Array, y: Array, epilogue: ConvEpilogue = PLAIN) -> Run:
    """A primitive of oneDNN; the forward one scales and shifts its results."""
    lib = library()
    assert lib is not None
    window, group = Window.of(k.attributes, x.shape[2:], w.shape[2:]), int(k.attributes.get("group", 1))
    assert window.pads is not None
    return ConvolutionPrimitive(
        lib,
        kind,
        x,
        w,
        y,
        epilogue.shift,
        scale=epilogue.scale,
        group=group,
        strides=window.strides,
        dilations=window.dilations,
        pads=window.pads,
        blocked=_is_blocked(kind, window, group, x, w, y),
        rounded=_is_rounded(k, x, w, y),
        pool=k.pool,
    ).runner()


def _is_blocked(kind: str, window: Window, group: int, x: Array, w: Array, y: Array) -> bool:
    return group > 1 or _blocked_is_faster(kind, window, x.shape, w.shape, y.shape)


def _forward(k: Binding, x: Array, w: Array, epilogue: ConvEpilogue, y: Array) -> Run:
    """y = Conv(x, w), and what follows, by oneDNN.

    Its convolutions of plain arrays add a bias number by number; of single pixels they are products, which do so in registers:
    64 channels to 256, 4 × 32 × 32, take 0.28 ms in place of 0.43.
    """
    lib, group, window = library(), int(k.attributes.get("group", 1)), Window.of(k.attributes, x.shape[2:], w.shape[2:])
    assert lib is not None
    if epilogue.residual is not None or epilogue.activation:
        return finish(k.pool, _onednn(k, "forward", x, w, y), y, epilogue)
    blocked = _is_blocked("forward", window, group, x, w, y) or _is_rounded(k, x, w, y)
    if ROWS_PAY and not blocked and not epilogue.is_nothing and group == 1 and pointwise.reads_single_pixels(window):
        weights, images, results = w.reshape(1, *w.shape[:2]), x.reshape(*x.shape[:2], -1), y.reshape(*y.shape[:2], -1)
        scale, shift = epilogue.scale, epilogue.shift
        return MatmulPrimitive(lib, weights, images, results, None, scale=scale, shift=shift, pool=k.pool).runner()
    if blocked or epilogue.is_shift:
        return _onednn(k, "forward", x, w, y, epilogue)
    return finish(k.pool, _onednn(k, "forward", x, w, y), y, epilogue)


def _direct(k: Binding, x: Array, w: Array, epilogue: ConvEpilogue, y: Array) -> Run | None:
    """y = Conv(x, w), and what follows, without oneDNN, where that is faster."""
    group, window = int(k.attributes.get("group", 1)), Window.of(k.attributes, x.shape[2:], w.shape[2:])
    if _is_rounded(k, x, w, y):
        return None
    if group > 1 and pointwise.reads_single_pixels(window):
        return finish(k.pool, pointwise.grouped_products(k.pool, x, w, y, group), y, epilogue)
    if direct_plans.is_faster(x, w, y, group, window, k.pool.threads):
        return direct.convolve(k.pool, x, w, epilogue, y, window, group)
    return None


@dataclass(frozen=True, slots=True)
class _Around:
    """An input gradient as the convolution dx = Conv(dy, turned w).

    Attributes:
        weights: C × M/group × window; channels in the place of results, and taps in reverse order.
        turn: what writes them.
    """

    weights: Array
    window: Window
    group: int
    turn: Run

    def directly(self, pool: Pool, dy: Array, dx: Array) -> Run:
        """dx in the kernel of :mod:`.direct`."""
        return in_order([self.turn, direct.convolve(pool, dy, self.weights, PLAIN, dx, self.window, self.group)])


def _turn_around(k: Binding, w: Array, dx: Array) -> _Around | None:
    """The input gradient of a convolution with steps of one, if it pads no more than its windows reach."""
    window, group = Window.of(k.attributes, dx.shape[2:], w.shape[2:]), int(k.attributes.get("group", 1))
    begin, end = (tuple(s - 1 - p for s, p in zip(window.span, side, strict=True)) for side in window.padding)
    if any(step > 1 for step in window.strides) or min(*begin, *end) < 0:
        return None
    taps, outs = math.prod(window.kernel), len(w) // group
    weights = np.empty((dx.shape[1], outs, *window.kernel), dtype=np.float32)
    arguments = w.reshape(*w.shape[:2], taps), weights.reshape(*weights.shape[:2], taps)
    turn = k.pool.bind(_turn, arguments, len(weights), max(1, 16384 // (taps * outs)))
    return _Around(weights, Window(window.kernel, window.strides, window.dilations, begin, end), group, turn)


def _turned(k: Binding, dy: Array, w: Array, dx: Array) -> Run | None:
    """dx = Conv(dy, turned w), where that is faster: of few channels, oneDNN's input gradient takes 1.5 to 5 times as long.

    Measured with AVX-512 on images of 64 × 64 and 32 × 32 × 32 of 4 to 12 channels; of 3, it takes as long. With AVX2, it takes
    0.2 to 0.8 of the time on plain arrays, and 1.2 to 1.6 of that in blocked layouts, which would be better there.
    """
    lib, around, rounded = library(), _turn_around(k, w, dx), _is_rounded(k, dx, w, dy)
    assert lib is not None
    if around is None:
        return None
    window, group = around.window, around.group
    if group > 1 and not rounded and pointwise.reads_single_pixels(window):
        return pointwise.grouped_products(k.pool, dy, w, dx, group, turned=True)
    if not rounded and direct_plans.is_faster(dy, around.weights, dx, group, window, k.pool.threads, turned=True):
        return around.directly(k.pool, dy, dx)
    if group > 1 or not FEWEST_TURNED <= dx.shape[1] < FEW_CHANNELS or max(window.kernel) == 1:
        return None
    run = ConvolutionPrimitive(
        lib,
        "forward",
        dy,
        around.weights,
        dx,
        group=1,
        strides=window.strides,
        dilations=window.dilations,
        pads=[pad for side in window.padding for pad in side],
        blocked=True,
        rounded=rounded,
        pool=k.pool,
    ).runner()
    return in_order([around.turn, run])


@jit
def _turn(w, turned, start, stop):
    """Channels change places with results of their group, and the taps their order."""
    channels, outs, taps = w.shape[1], turned.shape[1], w.shape[2]
    for i in range(start, stop):
        for m in range(outs):
            for t in range(taps):
                turned[i, m, t] = w[i // channels * outs + m, i % channels, taps - 1 - t]


def _is_rounded(k: Binding, x: Array, w: Array, y: Array) -> bool:
    """Whether the operands are rounded to bfloat16: where the user permits it, and copies cost less than it saves."""
    if not k.pool.bf16_products or int(k.attributes.get("group", 1)) != 1:
        return False
    multiplications = int(y.size) * math.prod(w.shape[1:])
    return bool(multiplications >= WORTH_ROUNDING * (x.size + w.size + y.size))


FEWEST_TURNED = 4
"""Fewest channels of an input gradient with turned weights; below, oneDNN computes it as such."""

FEW_CHANNELS = 16
"""Channels of which a gradient fills no vector: in a blocked layout most of it would be padding."""


def _blocked_is_faster(kind: str, window: Window, x: Sequence[int], weight: Sequence[int], y: Sequence[int]) -> bool:
    """Whether copies to and from oneDNN's own layouts pay, by shapes.

    Measured over 1,800 shapes with AVX-512 and with AVX2 on Zen 5 cores: as this rule chooses, all together take 1.03 and 1.04
    of the time of the better choice for each. A 1 × 1 window is a matrix product, as fast on plain arrays unless
    these are tiny, and so are windows side by side, in the forward pass.
    """
    if all(t == 1 for t in window.kernel):
        strided = any(s > 1 for s in window.strides)
        if kind == "weight":
            return not strided and weight[0] <= weight[1]  # of few pixels: others are in :mod:`.pointwise`
        return math.prod(y[2:]) < 64 and not (kind == "input" and strided)
    if kind == "input":
        return x[1] >= FEW_CHANNELS
    return kind == "weight" or any(t > s for t, s in zip(window.kernel, window.strides, strict=True))

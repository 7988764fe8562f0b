"""Gradients of convolution as single ops: a backend has kernels for them, other runtimes decompose them.

    dx = graphc.ConvGradInput(dy, w, shape(x); attributes of Conv)      ─►  ConvTranspose
    dw = graphc.ConvGradWeight(x, dy, shape(w); attributes of Conv)     ─►  a MatMul per tap, or a Conv of x with dy

Tensors are N × C × spatial axes (1 to 3 of them); all attributes mean the same as in the forward op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.errors import InternalError, UnknownRankError, UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.declare import Spec, declare, spec_of
from graphc.ir.facts import dims, shape_of_result

Size: TypeAlias = "tuple[int | None, ...]"
"""Spatial sizes; None for a symbol or an unknown size."""

FORWARD = "Conv"
CONV: Mapping[str, Any] = {
    "auto_pad": "NOTSET",
    "dilations": None,
    "group": 1,
    "kernel_shape": None,
    "pads": None,
    "strides": None,
}
POOL: Mapping[str, Any] = {
    "auto_pad": "NOTSET",
    "ceil_mode": 0,
    "dilations": None,
    "kernel_shape": None,
    "pads": None,
    "strides": None,
}

FAR = np.iinfo(np.int64).max
"""Value of ``ends`` in Slice that means "to the end"."""


@dataclass(frozen=True, slots=True)
class Window:
    """The sliding window of a convolution or pooling, one entry per spatial axis.

    Attributes:
        begin: padding before; ``begin`` and ``end`` are None when ``auto_pad`` asks for SAME and a size is unknown.
        end: padding after.
        lower: whether SAME puts the odd element of padding before.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...] | None
    end: tuple[int, ...] | None
    lower: bool = False

    @staticmethod
    def of(attributes: Mapping[str, Any], size: Size, kernel: Size | None = None) -> Window:
        """Read the attributes of a Conv or pooling node.

        Args:
            size: spatial sizes of the window's input.
            kernel: spatial sizes of the weight, used without the attribute ``kernel_shape``.

        Raises:
            UnsupportedOpError: the kernel's sizes are not static.
        """
        found = attributes.get("kernel_shape") or kernel
        if not found or any(k is None for k in found):
            raise UnsupportedOpError("a convolution or pooling needs a static kernel: give the weight a static shape")
        taps = tuple(int(k) for k in found if k is not None)
        n = len(taps)
        strides = tuple(attributes.get("strides") or [1] * n)
        dilations = tuple(attributes.get("dilations") or [1] * n)
        mode = attributes.get("auto_pad") or "NOTSET"
        if mode not in ("SAME_UPPER", "SAME_LOWER"):
            pads = tuple((attributes.get("pads") if mode == "NOTSET" else None) or [0] * (2 * n))
            return Window(taps, strides, dilations, pads[:n], pads[n:])
        lower = mode == "SAME_LOWER"
        if any(s is None for s in size):
            return Window(taps, strides, dilations, None, None, lower)
        begin, end = [], []
        for i, k, s, d in zip(size, taps, strides, dilations, strict=True):
            assert i is not None
            total = max((-(-i // s) - 1) * s + (k - 1) * d + 1 - i, 0)
            begin.append(total - total // 2 if lower else total // 2)
            end.append(total - begin[-1])
        return Window(taps, strides, dilations, tuple(begin), tuple(end), lower)

    @property
    def span(self) -> tuple[int, ...]:
        """Extent of the dilated kernel."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def padding(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """``begin`` and ``end`` where they are known.

        Raises:
            InternalError: they depend on a size that is not known.
        """
        if self.begin is None or self.end is None:
            raise InternalError("the padding of a window depends on a size that is not known")
        return self.begin, self.end

    @property
    def pads(self) -> list[int] | None:
        """Padding as ONNX writes it, or None when it depends on an unknown size."""
        return None if self.begin is None or self.end is None else [*self.begin, *self.end]

    def attributes(self) -> dict[str, Any]:
        """The window as explicit attributes; only for windows with known padding."""
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": self.pads,
        }


def spatial(shape: ir.Shape | None) -> Size:
    """The sizes after N and C."""
    if shape is None:
        raise UnknownRankError("the rank of a convolution's or pooling's input must be known")
    return tuple(d if isinstance(d, int) else None for d in shape.dims[2:])


def same_padding(op: Builder, window: Window, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Padding of ``auto_pad=SAME_*`` in front and behind, for spatial sizes known only at run time (int64 vectors)."""
    strides = np.array(window.strides, dtype=np.int64)
    out = op.Div(op.Add(size, strides - 1), strides)
    reach = op.Add(op.Mul(op.Sub(out, np.array([1], dtype=np.int64)), strides), np.array(window.span, dtype=np.int64))
    total = op.Max(op.Sub(reach, size), np.array([0], dtype=np.int64))
    half = op.Div(total, np.array([2], dtype=np.int64))
    rest = op.Sub(total, half)
    return (rest, half) if window.lower else (half, rest)


def _axes(n: int) -> np.ndarray:
    return np.arange(2, 2 + n, dtype=np.int64)


def spatial_part(op: Builder, shape: ir.Value) -> ir.Value:
    """The spatial part of a shape vector."""
    return op.Slice(shape, [2], [FAR], [0])  # type: ignore[no-any-return]


def of_shape(like: int, shape: int) -> Any:
    """Inference: the type of input ``like`` with the shape held by input ``shape``."""

    def infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
        dtype, known = spec_of(inputs[like])
        found = shape_of_result(inputs[shape])
        return [(dtype, found if found is not None or known is None else ir.Shape([None] * len(known)))]

    return infer


def _grouped_transpose(op: Builder, dy: ir.Value, w: ir.Value, group: int, **attributes: Any) -> ir.Value:
    """Emit ConvTranspose; in float64 the grouped weight becomes dense, because onnx.reference mixes up its groups.

    onnxruntime has no float64 ConvTranspose, so the detour slows no fast path.
    """
    if group == 1 or dy.dtype != ir.DataType.DOUBLE:
        return op.ConvTranspose(dy, w, group=group, **attributes)  # type: ignore[no-any-return]
    found = dims(w)
    if found is None or not all(isinstance(d, int) for d in found):
        raise UnsupportedOpError(f"the grouped weight {w.name!r} needs a static shape")
    rows, columns, *taps = (int(d) for d in found if isinstance(d, int))
    blocks = op.Reshape(w, [group, rows // group, 1, columns, *taps])
    eye = np.eye(group).reshape(group, 1, group, 1, *[1] * len(taps))
    dense = op.Reshape(op.Mul(blocks, eye), [rows, group * columns, *taps])
    return op.ConvTranspose(dy, dense, **attributes)  # type: ignore[no-any-return]


@declare("ConvGradInput", inputs="dy w shape", outputs="dx", infer=of_shape(0, 2), attributes=CONV)
def conv_grad_input(op: Builder, dy: ir.Value, w: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """Gradient of ``y = Conv(x, w)`` with respect to x: dx[n,c,o·s + t·d - p] += Σₘ dy[n,m,o]·w[m,c,t].

    ``dy``: N × M × out, ``w``: M × C/group × kernel, ``shape``: int64, the shape of x. Decomposes to a ConvTranspose;
    ``output_padding`` supplies the elements of x behind the last window.
    """
    size = spatial(shape_of_result(shape))
    window = Window.of(attributes, size, spatial(w.shape))
    common: dict[str, Any] = {"kernel_shape": window.kernel, "strides": window.strides, "dilations": window.dilations}
    group = attributes["group"]
    if window.begin is not None and window.end is not None and all(i is not None for i in size):
        reach = zip(size, window.begin, window.end, window.span, strict=True)
        padded = [i + b + e - k for i, b, e, k in reach if i is not None]
        left_over = [p % s for p, s in zip(padded, window.strides, strict=True)]
        return _grouped_transpose(op, dy, w, group, **common, pads=window.pads, output_padding=left_over)
    tail = spatial_part(op, shape)
    most = [s - 1 for s in window.strides]  # an upper bound for all sizes; the excess is cut off
    n = len(window.kernel)
    if window.begin is not None:
        full = _grouped_transpose(op, dy, w, group, **common, pads=window.pads, output_padding=most)
        return op.Slice(full, [0] * n, tail, _axes(n))  # type: ignore[no-any-return]
    full = _grouped_transpose(op, dy, w, group, **common, output_padding=most)
    begin, _ = same_padding(op, window, tail)
    return op.Slice(full, begin, op.Add(begin, tail), _axes(n))  # type: ignore[no-any-return]


@declare("ConvGradWeight", inputs="x dy shape", outputs="dw", infer=of_shape(0, 2), attributes=CONV)
def conv_grad_weight(op: Builder, x: ir.Value, dy: ir.Value, shape: ir.Value, **attributes: Any) -> ir.Value:
    """Gradient of ``y = Conv(x, w)`` with respect to w: dw[m,c,t] = Σₙ Σₒ dy[n,m,o]·x[n,c,o·s + t·d - p].

    ``x``: N × C × in, ``dy``: N × M × out, ``shape``: int64, the shape of w. Decomposes to one matrix product per tap of
    the kernel where that is faster, else to a Conv in which channels are the batch, samples are the channels, dy is the kernel,
    and stride and dilation change places; positions that the window never reached give extra taps at the end, which are cut
    off.
    """
    window = Window.of(attributes, spatial(x.shape), spatial(shape_of_result(shape)))
    group, n = attributes["group"], len(window.kernel)
    channels, out = (dims(x) or (None, None))[1], spatial(dy.shape)
    taps = int(np.prod(window.kernel))
    pays = taps == 1 or (taps <= MOST_TAPS and isinstance(channels, int) and channels >= LEAST_CHANNELS)
    if pays and group == 1 and isinstance(channels, int) and window.pads is not None and None not in out:
        return _tap_by_tap(op, x, dy, shape, window, channels, [int(o or 0) for o in out])
    pads = window.pads
    if pads is None:
        begin, end = same_padding(op, window, op.Shape(x, start=2))
        none = np.zeros(2, dtype=np.int64)
        x = op.Pad(x, op.Concat(op.const(none), begin, op.const(none), end, axis=0))
        pads = [0] * (2 * n)
    swap = [1, 0, *range(2, n + 2)]
    swapped = op.Transpose(x, perm=swap) if group == 1 else _samples_by_group(op, x, group)
    dw = op.Conv(
        swapped, op.Transpose(dy, perm=swap), group=group, strides=window.dilations, dilations=window.strides, pads=pads
    )
    if (dims(dw) or ())[2:] != window.kernel:
        dw = op.Slice(dw, [0] * n, list(window.kernel), _axes(n))
    return op.Transpose(dw, perm=swap)  # type: ignore[no-any-return]


MOST_TAPS, LEAST_CHANNELS = 25, 8
"""Limits for one matrix product per tap. Within them onnxruntime needs 0.4 to 0.65 of the time of the Conv, whose kernel is
as large as the image; a 7 × 7 stem on 3 channels would be three times as slow (matrices too narrow).
"""


def _tap_by_tap(
    op: Builder, x: ir.Value, dy: ir.Value, shape: ir.Value, window: Window, channels: int, out: Sequence[int]
) -> ir.Value:
    """dw[:, :, t] = dy (M × N·out) · x seen through tap t (N·out × C), with channels last so that slices are long copies."""
    n = len(window.kernel)
    if any(window.pads or ()):
        x = op.Pad(x, [0, 0, *(window.begin or ()), 0, 0, *(window.end or ())])
    last = op.Transpose(x, perm=[0, *range(2, n + 2), 1])
    rows = op.Reshape(op.Transpose(dy, perm=[1, 0, *range(2, n + 2)]), [0, -1])
    products = []
    for tap in np.ndindex(*window.kernel):
        starts = [t * d for t, d in zip(tap, window.dilations, strict=True)]
        ends = [b + (o - 1) * s + 1 for b, o, s in zip(starts, out, window.strides, strict=True)]
        seen = op.Slice(last, starts, ends, list(range(1, n + 1)), list(window.strides))
        products.append(op.MatMul(rows, op.Reshape(seen, [-1, channels])))
    if len(products) == 1:
        return op.Reshape(products[0], shape)  # type: ignore[no-any-return]
    stacked = op.Reshape(op.Concat(*products, axis=0), [len(products), -1, channels])
    return op.Reshape(op.Transpose(stacked, perm=[1, 2, 0]), shape)  # type: ignore[no-any-return]


def _samples_by_group(op: Builder, x: ir.Value, group: int) -> ir.Value:
    """N × (g·C') × spatial to C' × (g·N) × spatial."""
    channels = (dims(x) or (None, None))[1]
    if not isinstance(channels, int):
        raise UnsupportedOpError(f"a grouped convolution needs a static number of channels: {x.name!r} has {dims(x)}")
    split = op.Transpose(op.Reshape(x, [0, group, channels // group, -1]), perm=[2, 1, 0, 3])
    target = op.Concat(op.const([channels // group, -1]), op.Shape(x, start=2), axis=0)
    return op.Reshape(split, target)  # type: ignore[no-any-return]

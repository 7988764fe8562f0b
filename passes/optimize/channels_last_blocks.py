"""Strided convolutions over the few channels of an image become plain ones over blocks of its pixels (space to depth).

    before   y = Conv(x, w; strides=(2, 2), pads=3)     x: N × 3 × 224 × 224     w: M × 3 × 7 × 7
    after    y = Conv(x', w')                           x': N × 16 × 115 × 115   w': M × 16 × 4 × 4

Where a window moves by s pixels, it moves by one block of s pixels, whose pixels become channels: 3 · 2 · 2, filled up with
zeros to a multiple of 8, below which libraries have no tensor cores or copy the image into what they like better. Zeros behind
the taps of w fill its last block. The products are the same and the sums as well, but for their order. The convolution of
ResNet-50 over its image has been computed so in submissions to MLPerf (``conv0_space_to_depth``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import static_dims
from graphc.ir.ops.convolution import Window

MOST_CHANNELS = 4
"""Channels of x up to which blocks pay: with more, tensor cores are busy enough."""

ALIGNED = 8
"""Channels come in multiples of these: 16 bytes of half precision."""

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A convolution as one over blocks of pixels; tuples have an entry for each spatial axis.

    Attributes:
        side: pixels of a block.
        kernel: blocks of a window.
        taps: pixels of a window.
        begin, end: pixels of zeros around x; a negative ``end`` cuts off what no window reaches.
        channels, filled: of x, without and with those of zeros.
    """

    side: tuple[int, ...]
    kernel: tuple[int, ...]
    taps: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    channels: int
    filled: int

    @staticmethod
    def of(x: ir.Value, y: ir.Value, attributes: dict[str, Any]) -> Blocks | None:
        """How the Conv from ``x`` to ``y`` (or the gradient of its weight) is taken; None: as it stands.

        Blocks of an odd number of pixels would want too many channels of zeros; windows smaller than a block skip pixels.

        Args:
            attributes: of the node, with its padding written out.
        """
        window = Window.of(attributes, ())
        channels, *size = (static_dims(x) or ())[1:]
        if x.dtype not in HALVES or attributes["group"] != 1 or channels > MOST_CHANNELS or set(window.dilations) != {1}:
            return None
        side, taps, begin = window.strides, window.kernel, window.begin
        if math.prod(side) % 2 or any(k < s for k, s in zip(taps, side, strict=True)) or begin is None:
            return None
        kernel = tuple(-(-k // s) for k, s in zip(taps, side, strict=True))
        reach = [s * (o - 1 + k) for s, o, k in zip(side, (static_dims(y) or ())[2:], kernel, strict=True)]
        end = tuple(r - b - n for r, b, n in zip(reach, begin, size, strict=True))
        multiple = ALIGNED // math.gcd(ALIGNED, math.prod(side))
        return Blocks(side, kernel, taps, begin, end, channels, -(-channels // multiple) * multiple)

    @property
    def wide(self) -> int:
        """Channels of a block, with those of zeros."""
        return self.filled * math.prod(self.side)

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the convolution over blocks."""
        ones = [1] * len(self.side)
        return {"group": 1, "kernel_shape": list(self.kernel), "strides": ones, "dilations": ones, "pads": [0, 0] * len(ones)}

    def image(self, op: Builder, x: ir.Value) -> ir.Value:
        """The blocks of x, N × C × space, with channels last."""
        return self._gathered(op, x, self.begin, self.end)

    def weight(self, op: Builder, w: ir.Value) -> ir.Value:
        """The blocks of w, M × C × taps, with channels last."""
        return self._gathered(op, w, [0] * len(self.side), self._left)

    def scattered(self, op: Builder, dw: ir.Value) -> ir.Value:
        """The gradient of w, M × C × taps, from that of its blocks."""
        count, outputs = len(self.side), (static_dims(dw) or ())[0]
        apart = op.Reshape(dw, [outputs, *self.kernel, self.filled, *self.side])
        pairs = [axis for k in range(count) for axis in (1 + k, count + 2 + k)]
        turned = op.Transpose(apart, perm=[0, count + 1, *pairs])
        whole = op.Reshape(turned, [outputs, self.filled, *(k * s for k, s in zip(self.kernel, self.side, strict=True))])
        return op.Slice(whole, [0] * (count + 1), [self.channels, *self.taps], list(range(1, 2 + count)))  # type: ignore[no-any-return]

    @property
    def _left(self) -> list[int]:
        """Taps of zeros behind those of w."""
        return [k * s - t for k, s, t in zip(self.kernel, self.side, self.taps, strict=True)]

    def _gathered(self, op: Builder, value: ir.Value, begin: Sequence[int], end: Sequence[int]) -> ir.Value:
        """The outer axis, blocks, and what lies in a block: channel by channel, row by row, as it comes in memory."""
        count = len(self.side)
        wide = op.Pad(value, [0, 0, *begin, 0, self.filled - self.channels, *(max(n, 0) for n in end)])
        outer, channels, *size = static_dims(wide) or ()
        if min(end) < 0:
            size = [n + min(extra, 0) for n, extra in zip(size, end, strict=True)]
            wide = op.Slice(wide, [0] * count, size, list(range(2, 2 + count)))
        blocks = [n // s for n, s in zip(size, self.side, strict=True)]
        apart = op.Reshape(wide, [outer, channels, *(n for pair in zip(blocks, self.side, strict=True) for n in pair)])
        turned = op.Transpose(apart, perm=[0, *range(2, 2 + 2 * count, 2), 1, *range(3, 3 + 2 * count, 2)])
        return op.Reshape(turned, [outer, *blocks, self.wide])  # type: ignore[no-any-return]


__all__ = ["Blocks"]

"""Rewrites strided convolutions over an image as plain ones over pixel blocks (space to depth).

    before   y = Conv(x, w; strides=(2, 2), pads=3)     x: N × 3 × 224 × 224     w: M × 3 × 7 × 7
    after    y = Conv(x', w')                           x': N × 16 × 115 × 115   w': M × 16 × 4 × 4

A window that moves by s pixels moves by one block of s pixels, whose pixels become channels: 3 · 2 · 2, padded with zeros to
a multiple of 8, as tensor cores require. Zeros after the taps of w fill its last block. The products are the same, and the
sums differ only in order. Submissions to MLPerf compute the first convolution of ResNet-50 in this way
(``conv0_space_to_depth``).
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
"""Largest number of channels that uses blocks; more channels keep tensor cores busy without them."""

ALIGNED = 8
"""Channels are padded to multiples of this: 16 bytes in half precision."""

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A convolution over blocks of pixels; tuples have one entry per spatial axis.

    Attributes:
        side: pixels of a block.
        kernel: blocks of a window.
        taps: pixels of a window.
        begin, end: pixels of zeros around x; a negative ``end`` cuts off pixels that no window reads.
        channels, filled: channels of x, without and with the added zeros.
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
        """Plan the Conv from ``x`` to ``y`` (or its weight gradient) over blocks; None: leave it unchanged.

        Blocks with an odd number of pixels would need too many channels of zeros; windows smaller than a block skip pixels.

        Args:
            attributes: attributes of the node, with explicit padding.
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
        """Channels of a block, zeros included."""
        return self.filled * math.prod(self.side)

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the convolution over blocks."""
        ones = [1] * len(self.side)
        return {"group": 1, "kernel_shape": list(self.kernel), "strides": ones, "dilations": ones, "pads": [0, 0] * len(ones)}

    def image(self, op: Builder, x: ir.Value) -> ir.Value:
        """The blocks of x, N × C × space, with channels last."""
        return self._gathered(op, x, self.begin, self.end)

    def weight(self, op: Builder, w: ir.Value) -> ir.Value:
        """The blocks of w, M × C × taps, with channels last."""
        return self._gathered(op, w, [0] * len(self.side), self._left)

    def scattered(self, op: Builder, dw: ir.Value) -> ir.Value:
        """The gradient of w, M × C × taps, from the gradient of its blocks."""
        count, outputs = len(self.side), (static_dims(dw) or ())[0]
        apart = op.Reshape(dw, [outputs, *self.kernel, self.filled, *self.side])
        pairs = [axis for k in range(count) for axis in (1 + k, count + 2 + k)]
        turned = op.Transpose(apart, perm=[0, count + 1, *pairs])
        whole = op.Reshape(turned, [outputs, self.filled, *(k * s for k, s in zip(self.kernel, self.side, strict=True))])
        return op.Slice(whole, [0] * (count + 1), [self.channels, *self.taps], list(range(1, 2 + count)))  # type: ignore[no-any-return]

    @property
    def _left(self) -> list[int]:
        """Pad w with zeros after its taps."""
        return [k * s - t for k, s, t in zip(self.kernel, self.side, self.taps, strict=True)]

    def _gathered(self, op: Builder, value: ir.Value, begin: Sequence[int], end: Sequence[int]) -> ir.Value:
        """Split into the outer axis, the blocks, and the elements of a block: by channel, then by row, as in memory."""
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

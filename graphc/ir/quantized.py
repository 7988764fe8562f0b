"""Parameters that a file holds as integers: parameter = (integers - zero) · scale.

The pass ``dequantize`` makes such a parameter a float initializer and writes down, as metadata of it, where the file holds
integers, scales and zero point. An export computes new integers from the trained values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
Read: TypeAlias = "Callable[[str], Array]"
"""Name of a constant of the file → its array."""

QUANTIZED = "graphc.quantized"
"""Metadata key of a float initializer that the file holds as integers: a :class:`Quantized` as JSON."""

MIDDLE = "graphc.middle"
"""Metadata key of a zero point that the op of the file implies: its number."""

PACKED = "graphc.packed"
"""Metadata key of integers that were unpacked from bytes: a :class:`Packed` as JSON."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Integers of ``bits`` bits of which the constant ``name`` holds several in a byte, the lowest bits first.

    Attributes:
        rows: shape of the bytes with the last axis cut into rows of packed numbers; shorter than ``shape`` in bytes.
        shape: shape of the unpacked integers.
    """

    name: str
    bits: int
    rows: tuple[int, ...]
    shape: tuple[int, ...]

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Packed:
        """Read what :meth:`to_json` wrote."""
        return _packed(json.loads(text))

    def unpack(self, stored: Array) -> Array:
        """The integers, as uint8."""
        count = 8 // self.bits
        shifts = np.arange(count, dtype=np.uint8) * self.bits
        wide = (stored.reshape(*self.rows, 1) >> shifts) & np.uint8(2**self.bits - 1)
        flat = wide.reshape(*self.rows[:-1], self.rows[-1] * count)
        return np.asarray(flat[..., : math.prod(self.shape) // math.prod(self.rows[:-1])]).reshape(self.shape)

    def pack(self, integers: Array, like: Array) -> Array:
        """The bytes of ``integers``, in the shape of ``like``."""
        count = 8 // self.bits
        flat = integers.astype(np.uint8).reshape(*self.rows[:-1], -1)
        missing = self.rows[-1] * count - flat.shape[-1]
        wide = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, missing)]).reshape(*self.rows, count)
        shifts = np.arange(count, dtype=np.uint8) * self.bits
        return np.asarray(np.bitwise_or.reduce(wide << shifts, axis=-1)).astype(like.dtype).reshape(like.shape)


@dataclass(frozen=True, slots=True)
class Factor:
    """A constant of the file: a scale or zero point of a parameter.

    Attributes:
        name: its name in the file.
        view: shape in which it broadcasts against the integers; with blocks, before it is repeated.
        free: whether nothing else in the file uses it, so that an export may change it.
        packed: how the file packs it, if it does.
    """

    name: str
    view: tuple[int, ...]
    free: bool = False
    packed: Packed | None = None

    def read(self, read: Read) -> Array:
        """The numbers, in the shape :attr:`view`."""
        stored = read(self.name)
        return (self.packed.unpack(stored) if self.packed is not None else stored).reshape(self.view)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Where a file holds a parameter: (integers - zero) · Π scales.

    Attributes:
        integers: name of the constant.
        scales: factors of the scale.
        zero: the zero point; None stands for ``middle``.
        middle: the zero point of a file that names none.
        block: axis, number of elements that share a scale along it, length of the axis; None: factors broadcast as they are.
        follows: a scale that the only scale is a multiple of, as that of a bias is of its weight's.
        packed: how the file packs the integers, if it does.
        wide: whether the integers have 32 bits, as those of a bias; they take any value that training finds.
    """

    integers: str
    scales: tuple[Factor, ...]
    zero: Factor | None = None
    middle: int = 0
    block: tuple[int, int, int] | None = None
    follows: str | None = None
    packed: Packed | None = None
    wide: bool = False

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Quantized:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(text)
        zero, block = found["zero"], found["block"]
        return Quantized(
            found["integers"],
            tuple(_factor(scale) for scale in found["scales"]),
            None if zero is None else _factor(zero),
            found["middle"],
            None if block is None else (block[0], block[1], block[2]),
            found["follows"],
            None if found["packed"] is None else _packed(found["packed"]),
            found["wide"],
        )

    def levels(self, read: Read) -> Array:
        """The integers of the file."""
        stored = read(self.integers)
        return stored if self.packed is None else self.packed.unpack(stored)

    def scale(self, read: Read) -> Array:
        """The product of the scales, broadcast against the integers."""
        return self.product([factor.read(read) for factor in self.scales])

    def zero_point(self, read: Read) -> Array:
        """The zero point as floats, broadcast against the integers."""
        return self.shift(None if self.zero is None else self.zero.read(read))

    def product(self, scales: Sequence[Array]) -> Array:
        """The product of scales in the shapes of their views, broadcast against the integers."""
        return math.prod((self._spread(scale) for scale in scales[1:]), start=self._spread(scales[0]))

    def shift(self, zero: Array | None) -> Array:
        """A zero point in the shape of its view as floats, broadcast against the integers."""
        return np.asarray(self.middle if zero is None else self._spread(zero), np.float64)

    def value(self, levels: Array, scale: Array, zero: Array) -> Array:
        """The parameter, in the type of the scale."""
        return np.asarray((levels.astype(np.float64) - zero) * scale.astype(np.float64)).astype(scale.dtype)

    def _spread(self, factor: Array) -> Array:
        """Repeat a factor over the elements of its blocks."""
        if self.block is None or factor.ndim == 0:
            return factor
        axis, size, length = self.block
        return np.repeat(factor, size, axis=axis).take(range(length), axis=axis)

    def greatest(self, values: Array, view: Sequence[int]) -> Array:
        """The greatest of ``values`` among the elements that share an element of a factor of shape ``view``."""
        if self.block is not None and len(view) == values.ndim:
            axis, size, length = self.block
            values = np.maximum.reduceat(values, range(0, length, size), axis=axis)
        wide = (1,) * (values.ndim - len(view)) + tuple(view)
        axes = tuple(k for k, d in enumerate(wide) if d == 1)
        return np.asarray(values.max(axis=axes, keepdims=True)).reshape(tuple(view))


def _factor(found: Mapping[str, Any]) -> Factor:
    packed = found["packed"]
    return Factor(found["name"], tuple(found["view"]), found["free"], None if packed is None else _packed(packed))


def _packed(found: Mapping[str, Any]) -> Packed:
    return Packed(found["name"], found["bits"], tuple(found["rows"]), tuple(found["shape"]))

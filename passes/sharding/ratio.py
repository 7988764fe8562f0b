"""Ratios of numbers of blocks, which may hold symbols: ``3/2``, ``4*batch``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from graphc.ir.facts import Dim
from graphc.ir.symbolic_dims import factors, product


@dataclass(frozen=True, slots=True)
class Ratio:
    """A number times powers of symbols, of which each stands for a size.

    Attributes:
        symbols: (name, exponent), sorted, exponents other than 0.
    """

    number: Fraction
    symbols: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, size: int | str) -> Ratio:
        """A size."""
        number, names = factors(size)
        return cls(Fraction(number), tuple(sorted((name, names.count(name)) for name in set(names))))

    @classmethod
    def least(cls, ratios: Iterable[Ratio]) -> Ratio:
        """The least number and the least power of each symbol."""
        ratios = list(ratios)
        powers = [dict(ratio.symbols) for ratio in ratios]
        names = sorted({name for one in powers for name in one})
        symbols = tuple((name, min(one.get(name, 0) for one in powers)) for name in names)
        return cls(min(ratio.number for ratio in ratios), tuple((name, power) for name, power in symbols if power))

    def _times(self, other: Ratio, sign: int) -> tuple[tuple[str, int], ...]:
        if not other.symbols:
            return self.symbols
        powers = dict(self.symbols)
        for name, power in other.symbols:
            powers[name] = powers.get(name, 0) + sign * power
        return tuple(sorted((name, power) for name, power in powers.items() if power))

    def __mul__(self, other: Ratio) -> Ratio:
        return Ratio(self.number * other.number, self._times(other, 1))

    def __truediv__(self, other: Ratio) -> Ratio:
        return Ratio(self.number / other.number, self._times(other, -1))

    @property
    def whole(self) -> bool:
        """Whether it is a whole number for any sizes."""
        return self.number.denominator == 1 and all(power > 0 for _, power in self.symbols)

    @property
    def size(self) -> Dim:
        """As a size; None where it is not whole."""
        if not self.whole:
            return None
        return product([int(self.number), *(name for name, power in self.symbols for _ in range(power))])


ONE = Ratio(Fraction(1))

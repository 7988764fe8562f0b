"""Index arithmetic of generated kernels: linear forms over loop variables, with exact division and remainder.

    Linear({row: 768, column: 1}) // 768  ─►  row            where 0 ≤ column < 768
    Linear({row: 768, column: 1}) % 768   ─►  column

Every Reshape, Transpose, Slice, Expand or Split between two elementwise nodes becomes such a form, so that it costs no pass
over memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

CACHED = 1 << 12
"""Offsets and indices that are kept: the trials of a grouping ask for the same ones again and again."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A loop variable, or an index read from memory: ``name`` in [0, ``size``)."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Quotient:
    """``of`` ÷ ``by``, rounded down; ``of`` is not negative."""

    of: Linear
    by: int


@dataclass(frozen=True, slots=True)
class Remainder:
    """``of`` modulo ``by``; ``of`` is not negative."""

    of: Linear
    by: int


Term = Variable | Quotient | Remainder


@dataclass(frozen=True, slots=True)
class Linear:
    """``constant`` + Σ coefficient · term."""

    terms: tuple[tuple[Term, int], ...] = ()
    constant: int = 0
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # forms nest, and are keys of many tables: each is hashed once
        if not self._hash:
            object.__setattr__(self, "_hash", hash((self.terms, self.constant)) or 1)
        return self._hash

    @staticmethod
    def of(value: Term | int) -> Linear:
        if isinstance(value, int):
            return Linear((), value)
        return Linear(((value, 1),)) if _extent(value) > 1 else ZERO

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.terms, self.constant + other)
        if not other.terms and not other.constant:
            return self
        found = dict(self.terms)
        for term, coefficient in other.terms:
            found[term] = found.get(term, 0) + coefficient
        joined = Linear(tuple((t, c) for t, c in found.items() if c), self.constant + other.constant)
        for term, coefficient in joined.terms:
            if isinstance(term, Remainder):  # by · (x ÷ by) + x mod by = x
                whole = _quotient(term.of, term.by)
                if found.get(whole) == coefficient * term.by:
                    rest = tuple((t, c) for t, c in joined.terms if t not in (term, whole))
                    return Linear(rest, joined.constant) + term.of * coefficient
        return joined

    def __mul__(self, factor: int) -> Linear:
        if factor == 0:
            return ZERO
        if factor == 1:
            return self
        return Linear(tuple((t, c * factor) for t, c in self.terms), self.constant * factor)

    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value of the form."""
        low = high = self.constant
        for term, coefficient in self.terms:
            reach = coefficient * (_extent(term) - 1)
            low, high = low + min(0, reach), high + max(0, reach)
        return low, high

    def __floordiv__(self, by: int) -> Linear:
        whole, rest = self._split(by)
        low, high = rest.bounds()
        if low >= 0 and high < by:
            return whole
        step, coarse, _ = rest._steps(by)
        if step > 1:
            return whole + coarse // (by // step)
        return whole + Linear.of(_quotient(rest, by))

    def __mod__(self, by: int) -> Linear:
        _, rest = self._split(by)
        low, high = rest.bounds()
        if low >= 0 and high < by:
            return rest
        step, coarse, fine = rest._steps(by)
        if step > 1:
            return (coarse % (by // step)) * step + fine
        return Linear.of(Remainder(rest, by))

    def _steps(self, by: int) -> tuple[int, Linear, Linear]:
        """(s, q, r) with self = s · q + r, 0 ≤ r < s, where s divides ``by``; s = 1 if no greater one exists."""
        step = by
        for _, coefficient in sorted(self.terms, key=lambda pair: -abs(pair[1])):
            step = math.gcd(step, coefficient)
            fine = Linear(tuple((t, c) for t, c in self.terms if c % step), self.constant % step)
            low, high = fine.bounds()
            if step > 1 and low >= 0 and high < step:
                coarse = Linear(tuple((t, c // step) for t, c in self.terms if c % step == 0), self.constant // step)
                return step, coarse, fine
        return 1, self, Linear()

    def _split(self, by: int) -> tuple[Linear, Linear]:
        """(q, r) with self = by · q + r and r not negative; r holds the terms that ``by`` does not divide."""
        whole = tuple((t, c // by) for t, c in self.terms if c % by == 0)
        rest = tuple((t, c) for t, c in self.terms if c % by)
        # terms of reversed axes are negative, and C rounds the quotient of a negative number up
        shift = (self.constant + Linear(rest).bounds()[0]) // by
        return Linear(whole, shift), Linear(rest, self.constant - shift * by)

    def variables(self) -> Iterator[tuple[Variable, int]]:
        """Every variable with its coefficient, at any depth; 0 marks one inside a quotient or remainder."""
        for term, coefficient in self.terms:
            if isinstance(term, Variable):
                yield term, coefficient
            else:
                for inner, _ in term.of.variables():
                    yield inner, 0

    def is_skewed(self, inner: Variable) -> bool:
        """Whether a quotient or remainder differs between neighbours of a line, at places that differ from line to line."""
        for term, _ in self.terms:
            if not isinstance(term, Variable):
                variables = {variable for variable, _ in term.of.variables()}
                if inner in variables and len(variables) > 1:
                    return True
        return False

    def text(self, names: Mapping[Variable, str]) -> str:
        """The form as a C expression."""
        parts = []
        for term, coefficient in self.terms:
            if isinstance(term, Variable):
                shown = names.get(term, term.name)
            else:
                sign = "/" if isinstance(term, Quotient) else "%"
                shown = f"({term.of.text(names)}) {sign} {term.by}"
                shown = f"({shown})"
            if shown != "0":
                parts.append(shown if coefficient == 1 else f"{shown} * {coefficient}")
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


ZERO = Linear()
"""The index along a dimension of size 1."""


def _quotient(of: Linear, by: int) -> Quotient:
    """``of`` ÷ ``by`` as one quotient: (x ÷ 64) ÷ 12 is x ÷ 768."""
    if len(of.terms) == 1 and not of.constant:
        term, coefficient = of.terms[0]
        if isinstance(term, Quotient) and coefficient == 1:
            return Quotient(term.of, term.by * by)
    return Quotient(of, by)


def _extent(term: Term) -> int:
    """The extent of a term, which takes values from 0: its greatest value plus one."""
    if isinstance(term, Variable):
        return term.size
    if isinstance(term, Remainder):
        return min(term.by, term.of.bounds()[1] + 1)
    return term.of.bounds()[1] // term.by + 1


Map = tuple[Linear, ...]
"""The index of an element: one linear form per dimension."""


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides in elements of a contiguous array."""
    strides, step = [0] * len(shape), 1
    for k in reversed(range(len(shape))):
        strides[k] = step
        step *= shape[k]
    return strides


def flatten(index: Map, shape: Sequence[int]) -> Linear:
    """The element's offset in a contiguous array."""
    return _flattened(index, tuple(shape))


@functools.lru_cache(maxsize=CACHED)
def _flattened(index: Map, shape: tuple[int, ...]) -> Linear:
    total = ZERO
    for part, stride in zip(index, row_major(shape), strict=True):
        total = total + part * stride
    return total


def unflatten(offset: Linear, shape: Sequence[int]) -> Map:
    """The index, in an array of ``shape``, of the element at ``offset``."""
    return _unflattened(offset, tuple(shape))


@functools.lru_cache(maxsize=CACHED)
def _unflattened(offset: Linear, shape: tuple[int, ...]) -> Map:
    parts = []
    for k, (size, stride) in enumerate(zip(shape, row_major(shape), strict=True)):
        part = offset // stride if stride > 1 else offset
        parts.append(ZERO if size == 1 else part if k == 0 else part % size)
    return tuple(parts)


@dataclass(slots=True)
class Domain:
    """Loop variables; neighbours merge into one if every index allows it."""

    variables: list[Variable]
    used: list[Linear] = field(default_factory=list)

    def merged(self) -> list[list[Variable]]:
        """Groups of neighbouring variables that can merge: coefficient(k) = coefficient(k+1) · size(k+1) in every use."""
        groups: list[list[Variable]] = []
        uses = [_coefficients(linear) for linear in self.used]
        for variable in (v for v in self.variables if v.size > 1):
            if groups:
                inner = variable
                outer = groups[-1][-1]
                if all(_mergeable(found, outer, inner) for found in uses):
                    groups[-1].append(variable)
                    continue
            groups.append([variable])
        return groups


def _coefficients(linear: Linear) -> dict[Variable, int | None]:
    found: dict[Variable, int | None] = {}
    for variable, coefficient in linear.variables():
        found[variable] = coefficient if coefficient and variable not in found else None
    return found


def _mergeable(found: Mapping[Variable, int | None], outer: Variable, inner: Variable) -> bool:
    first, second = found.get(outer, 0), found.get(inner, 0)
    return first is not None and second is not None and first == second * inner.size

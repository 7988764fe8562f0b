"""The numbers by which the kernels of one model differ between the shapes of its feeds.

    y0[(r1 * 74 + r0)] = t12;      74 at one length, 77 at another
    y0[(r1 * size_0i + r0)] = t12;  one function for all of them, which reads its sizes from a table

Where feeds have many shapes, making machine code for each would take longer than running it. A size that decides in which order
numbers are added up stays in the text: the bits of a kernel are those of one whose sizes are all written out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graphc.backends.host.generator import Loops

_LITERAL = re.compile(r"(?<![\w.])(\d+\.\d*(?:[eE][+-]?\d+)?|\d+(?:[eE][+-]?\d+)?)([fFuUlL]*)(?![\w.])")

_KINDS = {"": "i", "f": "f", "F": "f", "ll": "l", "LL": "l"}
"""Suffix of a literal that a name may stand for → the last letter of that name; without a suffix a fraction has ``d``."""

_DIVIDED = re.compile(r"[/%]\s*\(?\s*$")
"""The text before a divisor, which stays: LLVM divides by a constant with multiplications, and by a variable more slowly."""

Formula = Callable[[Mapping[str, int]], int]
"""A number by the sizes of the loops."""


@dataclass(slots=True)
class Sizes:
    """The table of a kernel.

    Attributes:
        loops: the loops whose size is in the table, and parts of these → their sizes.
        words: the table's words; a float lies in the low bits of one.
        formulas: of the last words.
        serves: whether the kernel is the same for all sizes whose text is the same, so that ``formulas`` give its table.
    """

    loops: dict[str, int] = field(default_factory=dict)
    words: list[int] = field(default_factory=list)
    formulas: list[Formula] = field(default_factory=list)
    serves: bool = True
    _slots: dict[Hashable, int] = field(default_factory=dict)

    def slot(self, kind: str, text: str) -> int:
        """The place in the table of a number, given as a literal's digits."""
        return self._place((kind, text), _word(kind, text))

    def of_loops(self, number: int, by: Formula | None, key: Hashable) -> int:
        """The place of a number that follows from the sizes of loops.

        Args:
            by: gives it for other sizes; None: nothing does.
            key: tells it from others, so that it has one place; None: it is read once.
        """
        before = len(self.words)
        place = self._place((before,) if key is None else key, number)
        if by is None:
            self.serves = False
        elif place == before:
            self.formulas.append(by)
        return place

    def _place(self, key: Hashable, word: int) -> int:
        if key not in self._slots:
            self._slots[key] = len(self.words)
            self.words.append(word)
        return self._slots[key]


def _word(kind: str, text: str) -> int:
    if kind == "f":
        return int.from_bytes(struct.pack("<f", float(text)), "little")
    if kind == "d":
        return int.from_bytes(struct.pack("<d", float(text)), "little", signed=True)
    return int(text)


class KnownKernels:
    """Tells which numbers of a kernel's text differ between kernels that are otherwise the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[str], set[int]]] = {}  # text without its numbers → the first ones, places that differ

    def note(self, body: str, loops: Loops) -> None:
        """Remember a kernel."""
        self._places(body, loops)

    def without_sizes(self, body: str, loops: Loops, free: Collection[str]) -> tuple[str, Sizes]:
        """The text with names for the numbers that differ, and the table of these.

        Args:
            free: the loops whose size may be in the table.
        """
        differ, found = self._places(body, loops), list(_LITERAL.finditer(body))
        named = [*loops.rows, *loops.columns]
        sizes = Sizes({name: size for k, (name, size) in enumerate(named, len(found)) if k in differ and name in free})
        return "".join(_pieces(body, found, differ, sizes)), sizes

    def _places(self, body: str, loops: Loops) -> set[int]:
        named = [*loops.rows, *loops.columns]
        numbers = [*(m[0] for m in _LITERAL.finditer(body)), *(str(size) for _, size in named)]
        shape = f"{[name for name, _ in named]}{len(loops.rows)}{loops.vector > 1}{loops.beside}{loops.parts > 1}"
        first, differ = self._known.setdefault(f"{_LITERAL.sub('#', body)}{shape}", (numbers, set()))
        differ.update(k for k, (old, new) in enumerate(zip(first, numbers, strict=True)) if old != new)
        return differ


def _pieces(body: str, found: Sequence[re.Match[str]], differ: set[int], sizes: Sizes) -> Iterator[str]:
    end = 0
    for k, match in enumerate(found):
        if k not in differ:
            continue
        digits, suffix = match.groups()
        whole = digits.isdigit()
        kind = _KINDS.get(suffix, "") if whole or suffix else "d"
        if not kind or (kind in "il" and (not whole or _DIVIDED.search(body, max(0, match.start() - 4), match.start()))):
            continue
        yield body[end : match.start()]
        yield f"size_{sizes.slot(kind, digits)}{kind}"
        end = match.end()
    yield body[end:]

"""Lays out tables of text for a terminal of any width, and for a pipe.

A table that is too wide wraps its longest columns between words; where even that does not fit, every row becomes a record with
one line for each column. Names are never cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from rich.cells import cell_len

Line: TypeAlias = tuple[str, bool]
"""A line, and whether it is a heading."""

GAP = 2
READABLE = 24
"""A column of longer text is not made narrower than this."""


def layout(columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool], width: int | None) -> list[Line]:
    """Return the lines of a table.

    Args:
        numeric: which columns are right-aligned.
        width: columns of the terminal; None: a row is one line of any length.
    """
    widths = _widths(columns, cells, width)
    if widths is None:
        return [line for row in cells for line in _record(columns, row, width or 0)]
    header = [(line, True) for line in _row(columns, widths, numeric)]
    return header + [(line, False) for row in cells for line in _row(row, widths, numeric)]


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int | None) -> list[int] | None:
    """The width of every column; None if the columns do not fit beside each other."""
    table = list(zip(columns, *cells, strict=True))
    wanted = [max(map(cell_len, column)) for column in table]
    room = None if width is None else width - GAP * (len(columns) - 1)
    if room is None or sum(wanted) <= room:
        return wanted
    words = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in table]
    least = [word if most <= READABLE else max(word, READABLE) for word, most in zip(words, wanted, strict=True)]
    if any(" " in cell for cell in table[-1]):
        least[-1] = min(least[-1], READABLE)  # a long word of a sentence at the end of a line may stick out
    if sum(least) > room:
        return None
    # The widest columns shrink to one width.
    limit = max(wanted)
    while sum(found := [max(low, min(most, limit)) for low, most in zip(least, wanted, strict=True)]) > room:
        limit -= 1
    return found


def _row(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> Iterator[str]:
    """The lines of one row; a cell that is too long goes on below."""
    parts = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for k in range(max(map(len, parts))):
        line = [_padded(part[k] if k < len(part) else "", w, r) for part, w, r in zip(parts, widths, numeric, strict=True)]
        yield (" " * GAP).join(line).rstrip()


def _record(columns: Sequence[str], row: Sequence[str], width: int) -> Iterator[Line]:
    """A row as a heading and one indented line for each further column that says something."""
    yield row[0], True
    for column, cell in zip(columns[1:], row[1:], strict=True):
        if cell:
            for line in wrapped(f"  {column}: {cell}" if column else f"  {cell}", width, indent="    "):
                yield line, False


def wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    """The lines of ``text``, broken between words; a longer word stays whole."""
    if cell_len(text) <= width:
        return [text]
    return textwrap.wrap(text, max(1, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space

"""Output of the commands: results on stdout, the rest on stderr, rank 0 only.

Tables have lines and colours on a terminal, are plain aligned text in a pipe, and JSON on request.
"""

from __future__ import annotations

import enum
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from graphc.errors import GraphcError
from graphc.errors import counted as counted

TERMINALS = "GRAPHC_TERMINALS"
"""Environment variable for worker processes: lists the launching command's streams that are terminals."""

DEBUG = "GRAPHC_DEBUG"
"""Environment variable: any value shows tracebacks."""


class Format(enum.StrEnum):
    """Formats of results."""

    text = "text"
    json = "json"


def open_standard_streams() -> None:
    """Reopen closed standard streams, so that no other file gets their descriptors.

    Otherwise a library that writes to standard error could write into that file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def drop_standard_output() -> None:
    """Discard further output after standard output's reader closed it or its disk is full."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def is_terminal(stream: str) -> bool:
    """Whether ``stdout`` or ``stderr`` is a terminal, even behind a launcher's pipes."""
    inherited = os.environ.get(TERMINALS)
    if inherited is not None:
        return stream in inherited.split(",")
    return bool(getattr(sys, stream).isatty())


def terminals() -> str:
    """Value of :data:`TERMINALS` for child processes."""
    return ",".join(stream for stream in ("stdout", "stderr") if is_terminal(stream))


def is_main() -> bool:
    """Whether this process prints: rank 0, or not a worker."""
    from graphc.distributed.world import find_world

    try:
        return find_world().rank == 0
    except GraphcError:
        return True


def say(text: str = "") -> None:
    """Print a result on standard output.

    Raises:
        BrokenPipeError: the reader has closed it.
        GraphcError: writing failed, for example on a full disk.
    """
    if not is_main():
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_standard_output()
        raise GraphcError(f"cannot write to standard output: {error.strerror or error}") from None


def note(text: str) -> None:
    """Print a note on standard error."""
    if is_main():
        print(f"graphc: {text}", file=sys.stderr, flush=True)


def error(text: str) -> None:
    """Print the error that makes the command fail."""
    if is_main():
        print(f"graphc: error: {text}", file=sys.stderr, flush=True)


def unexpected(problem: Exception) -> str:
    """Format an unexpected exception as one line."""
    text = " ".join(str(problem).split()) or "no message"
    where = "".join(f" {note}" for note in getattr(problem, "__notes__", ()))
    return f"unexpected {type(problem).__name__}{where}: {text} (run with {DEBUG}=1 for the traceback)"


def document(value: Any) -> None:
    """Print a result as one JSON document."""
    say(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def event(value: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON."""
    say(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "") -> None:
    """Print a table; numbers are right-aligned."""
    if not is_main():
        return
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    numeric = [bool(rows) and all(isinstance(row[k], int | float) for row in rows) for k in range(len(columns))]
    if is_terminal("stdout"):
        _rich_table(columns, cells, numeric, title)
        return
    widths = [max(len(c) for c in column) for column in zip(columns, *cells, strict=True)]
    lines = [title] if title else []
    for line in (columns, *cells):
        padded = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True)]
        lines.append("  ".join(padded).rstrip())
    say("\n".join(lines))


def _rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool], title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=escape(title) or None, title_justify="left", box=SIMPLE_HEAD)
    for name, right in zip(columns, numeric, strict=True):
        shown.add_column(name, justify="right" if right else "left", overflow="fold")
    for line in cells:
        shown.add_row(*(escape(c) for c in line))
    Console(file=sys.stdout, force_terminal=True).print(shown)


def pairs(entries: Mapping[str, Any]) -> None:
    """Print name and value, one pair per line."""
    width = max((len(name) for name in entries), default=0)
    for name, value in entries.items():
        say(f"{name:<{width}}  {value}")


def size(nbytes: float) -> str:
    """Format bytes in a readable unit (powers of 1000): ``41.2 kB``."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"

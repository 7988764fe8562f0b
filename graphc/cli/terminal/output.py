"""Output of the commands: results on stdout, the rest on stderr, rank 0 only.

Tables fit the terminal, are plain aligned text in a pipe, and JSON on request.
"""

from __future__ import annotations

import enum
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from graphc.cli.terminal import streams, tables
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


def warning(message: Warning | str, *place: object, **more: object) -> None:
    """Print a warning on standard error; the arguments are those of :func:`warnings.showwarning`."""
    note(f"warning: {' '.join(str(message).split())}")


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
    say(json.dumps(_finite(value), indent=2, ensure_ascii=not streams.writes_unicode(), allow_nan=False))


def event(value: Mapping[str, Any]) -> None:
    """Print a result as one line of JSON."""
    say(json.dumps(_finite(value), ensure_ascii=not streams.writes_unicode(), allow_nan=False))


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "") -> None:
    """Print a table as wide as the terminal at most; numbers are right-aligned."""
    if not is_main():
        return
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    numeric = [bool(rows) and all(isinstance(row[k], int | float) for row in rows) for k in range(len(columns))]
    bold = is_terminal("stdout") and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    lines = [
        f"\x1b[1m{line}\x1b[0m" if heading and bold else line
        for line, heading in tables.layout(columns, cells, numeric, width())
    ]
    say("\n".join([title, *lines] if title else lines))


def width() -> int | None:
    """Columns that results may take: those of the terminal, or of COLUMNS; None: any number, in a pipe or a file."""
    if not is_terminal("stdout") and not os.environ.get("COLUMNS", "").isdecimal():
        return None
    return shutil.get_terminal_size().columns


def pairs(entries: Mapping[str, Any]) -> None:
    """Print name and value, one pair per line."""
    indent, columns = max((len(name) for name in entries), default=0) + tables.GAP, width()
    for name, value in entries.items():
        line = f"{name:<{indent}}{value}"
        say(line if columns is None else "\n".join(tables.wrapped(line, columns, indent=" " * indent)))


def prose(text: str) -> None:
    """Print text whose lines are wrapped to the terminal, each with its own indentation."""
    columns = width()
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        say(line if columns is None else "\n".join(tables.wrapped(line, columns, indent=indent)))


def plain(text: str) -> str:
    """Text of a docstring without its markup: ``x`` becomes 'x', a reference its name."""
    text = re.sub(r":[a-z:]+:`(?:[^`<]*<)?~?([^`>]+)>?`", r"\1", text)
    return re.sub(r"``([^`]+)``|`([^`]+)`", lambda found: _quoted(found[1] or found[2]), text)


def _quoted(code: str) -> str:
    """A word of code, in quotes where it could be taken for a word of the sentence."""
    return f"'{code}'" if re.fullmatch(r"[a-z]+", code) else code


def size(nbytes: float) -> str:
    """Format bytes in a readable unit (powers of 1000): ``41.2 kB``."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"

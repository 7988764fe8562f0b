"""Opens the standard streams so that every text can be written, whatever their encoding."""

from __future__ import annotations

import codecs
import io
import os
import sys

ASCII = {
    "…": "...", "→": "->", "←": "<-", "≥": ">=", "≤": "<=", "×": "x", "−": "-", "–": "-", "—": "-", "·": "*", "²": "^2",
    "³": "^3", "√": "sqrt", "Σ": "sum", "∂": "d", "±": "+-", "─": "-", "│": "|", "µ": "u", "ε": "eps", "β": "beta",
    "α": "alpha", "λ": "lambda", "’": "'", "“": '"', "”": '"',
}  # fmt: skip
"""Characters of graphc's own texts → what stands for them where the encoding lacks them."""

HANDLER = "graphc.readable"


def _readable(error: UnicodeError) -> tuple[str, int]:
    """An error handler of encoders: plain characters for those of :data:`ASCII`, escapes for the rest."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


def open_standard_streams() -> None:
    """Reopen closed standard streams, and make the others write what their encoding lacks in another way.

    Otherwise another file would get the descriptor of a closed stream, and what a library writes to standard error.
    """
    codecs.register_error(HANDLER, _readable)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free descriptor
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
        stream = getattr(sys, name)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def writes_unicode() -> bool:
    """Whether standard output takes every character."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return codecs.lookup(encoding).name.startswith("utf")

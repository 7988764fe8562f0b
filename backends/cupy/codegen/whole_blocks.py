"""The text of kernels that are written by hand and divide their work among whole blocks, without rows or columns."""

from __future__ import annotations

import hashlib

from graphc.backends.cupy.codegen import prelude

THREADS = 256
"""Threads of a block; on the host it is one."""


def named(body: str, device: bool) -> tuple[str, str]:
    """(name, text) of a kernel that calls itself ``$name``; it uses no rows or columns."""
    threads = THREADS if device else 1
    unused = dict.fromkeys(("SPAN", "SPLITS", "PARTS", "ROWS", "COLUMNS", "CHUNK", "VECTOR"), 1)
    macros = {"INDEX": "long long", "THREADS": threads, "LANES": threads, **unused, "STRIDED": 0, "HOLD": 0}
    head = "".join(f"#define {key} {value}\n" for key, value in macros.items())
    text = head + (prelude.CUDA if device else prelude.HOST) + body
    name = "t" + hashlib.sha256(text.encode()).hexdigest()[:16]
    return name, text.replace("$name", name) + "\n"

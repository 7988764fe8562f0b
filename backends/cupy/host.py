"""Running generated kernels on the host: the same source, compiled by the system's C++ compiler, one thread for everything.

This is how code generation is tested where there is no GPU. It is no backend: nothing here is fast.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphc.backend import Array
from graphc.backends.cupy.prelude import HOST

_INCLUDES = "#include <math.h>\n#include <string.h>\n#include <utility>\n"
_CALL = """
template <class... A, std::size_t... I>
static void call(void (*f)(A...), void** a, std::index_sequence<I...>) { f((A)a[I]...); }
"""
_MACROS = (
    "INDEX", "THREADS", "LANES", "SPAN", "SPLITS", "PARTS", "ROWS", "COLUMNS", "CHUNK", "DEVICE", "KERNEL", "LANE", "SPLIT",
    "FOR_ROWS", "FOR_COLUMNS", "NAN_VALUE", "INFINITY_VALUE",
)  # fmt: skip


def compile_kernels(texts: Mapping[str, str]) -> dict[str, Any]:
    """Compile kernels by name; each becomes a function (array of pointers, number of blocks)."""
    parts = [_INCLUDES, _CALL]
    for name, text in texts.items():
        parts.append(f"namespace in_{name} {{\n{text.replace('#include <math.h>', '').replace('#include <string.h>', '')}")
        parts.append(
            f'extern "C" void run_{name}(void** a, long long blocks) {{ for (BLOCK = 0; BLOCK < blocks; ++BLOCK) '
            f"call({name}, a, std::make_index_sequence<{_parameters(text)}>()); }}\n}}"
        )
        parts += [f"#undef {macro}" for macro in _MACROS]
    source = "\n".join(parts)
    folder = Path(tempfile.gettempdir()) / "graphc-host-kernels"
    folder.mkdir(exist_ok=True)
    stem = folder / hashlib.sha256((source + HOST).encode()).hexdigest()[:24]
    library = stem.with_suffix(".so")
    if not library.exists():
        stem.with_suffix(".cc").write_text(source)
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        made = subprocess.run(
            [*command, "-o", f"{library}.tmp", str(stem.with_suffix(".cc"))], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise RuntimeError(f"the generated kernels do not compile:\n{made.stderr[:4000]}")
        Path(f"{library}.tmp").rename(library)
    loaded = ctypes.CDLL(str(library))
    return {name: getattr(loaded, f"run_{name}") for name in texts}


def _parameters(text: str) -> int:
    head = text[text.rindex("KERNEL ") :]
    return head[: head.index("{")].count(",") + 1


def run(function: Any, arrays: Sequence[Array], blocks: int) -> None:
    """Run a compiled kernel over ``blocks`` blocks."""
    pointers = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
    assert all(a.flags.c_contiguous for a in arrays)
    function(pointers, ctypes.c_longlong(blocks))


def storage(dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Memory of a value, filled with garbage so that what is never written shows."""
    raw = np.full(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 0xCD, dtype=np.uint8)
    return raw.view(dtype).reshape(tuple(shape))

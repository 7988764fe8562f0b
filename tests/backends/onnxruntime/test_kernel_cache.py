"""Machine code of native kernels does not outlive a change of the functions in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from graphc.backends.onnxruntime.kernels import jit

KERNEL = """
import os, sys
sys.path.insert(0, {folder!r})
from pathlib import Path
import numba
from graphc.backends.onnxruntime.kernels import jit
numba.config.CACHE_DIR = {cache!r} + "/" + jit.sources_digest(Path({folder!r}))
from kernels.outer import outer
print(outer(1.0))
"""


@pytest.mark.full  # two processes that compile
def test_a_function_of_another_file_that_changed_is_compiled_again(tmp_path: Path) -> None:
    folder = tmp_path / "package" / "kernels"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    made = "from graphc.backends.onnxruntime.kernels.jit import jit\n"
    (folder / "outer.py").write_text(f"{made}from kernels.inner import inner\n\n@jit\ndef outer(x):\n    return inner(x) + 1\n")
    script = KERNEL.format(folder=str(folder.parent), cache=str(tmp_path / "cache"))

    def process(factor: int) -> str:
        (folder / "inner.py").write_text(f"{made}\n@jit\ndef inner(x):\n    return x * {factor}\n")
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()

    assert process(2) == "3.0"
    assert process(20) == "21.0"


@pytest.mark.skipif("NUMBA_CACHE_DIR" in os.environ, reason="the user chose the folder")
def test_the_folder_of_kernels_belongs_to_these_sources() -> None:
    digest = jit.sources_digest(Path(jit.__file__).parents[1])
    assert Path(numba.config.CACHE_DIR).name == digest  # type: ignore[attr-defined]

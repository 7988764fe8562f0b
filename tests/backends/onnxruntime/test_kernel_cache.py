"""Machine code of native kernels: a later start runs it without Numba, and it does not outlive a change of its sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
from graphc.backends.onnxruntime.pool import ThreadPool
from kernels.outer import outer
x = np.ones(3, np.float32)
ThreadPool(1).bind(outer, (x,), x.size)()
print(x.tolist(), "numba" in sys.modules)
"""

PARTS = {
    "outer": "from kernels.inner import inner\n\n@jit\ndef outer(x, start, stop):\n    for i in range(start, stop):\n"
    "        x[i] = inner(x[i]) + 1\n",
    "inner": "@jit\ndef inner(x):\n    return x * 2\n",
}


@pytest.mark.large  # four processes, two of which compile
def test_a_second_start_needs_no_numba_until_a_function_of_another_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "package" / "kernels"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    for name, text in PARTS.items():
        (folder / f"{name}.py").write_text(f"from graphc.backends.onnxruntime.kernels.common.jit import jit\n{text}")
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    script = KERNEL.format(folder=str(folder.parent))

    def process() -> str:
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()

    assert process() == "[3.0, 3.0, 3.0] True"
    assert process() == "[3.0, 3.0, 3.0] False"
    for kept in (tmp_path / "cache" / "host").glob("*.o"):
        kept.write_bytes(b"not from here" + kept.read_bytes()[13:])
    assert process() == "[3.0, 3.0, 3.0] True"
    (folder / "inner.py").write_text((folder / "inner.py").read_text().replace("x * 2", "x * 20"))
    assert process() == "[21.0, 21.0, 21.0] True"

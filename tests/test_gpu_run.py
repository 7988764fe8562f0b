"""``pytest -m gpu`` where there is only an installed graphc and the folder ``tests``: nothing that breaks stops the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import copy_harness

CUPY = """
from types import SimpleNamespace
class CUDARuntimeError(RuntimeError):
    status = 700
lost = []
def synchronize():
    if lost: raise CUDARuntimeError("cudaErrorIllegalAddress")
runtime = SimpleNamespace(getDeviceCount=lambda: 1, deviceSynchronize=synchronize, CUDARuntimeError=CUDARuntimeError)
cuda = SimpleNamespace(runtime=runtime)
"""

MODULES = {
    "test_package": "import pytest, a_missing_package\n@pytest.mark.gpu\ndef test_never(): pass",
    "test_other": "raise SystemError('a file without tests of a GPU was imported')",
    "test_abort": "import os, pytest\n@pytest.mark.gpu\ndef test_abort(): os.abort()",
    "test_hang": "import ctypes, pytest\n@pytest.mark.gpu\ndef test_hang(): ctypes.CDLL(None).sleep(600)",
    "test_lost": """
import cupy, pytest
@pytest.mark.gpu
def test_breaks_the_context():
    cupy.lost.append(1)
    cupy.cuda.runtime.deviceSynchronize()
@pytest.mark.gpu
@pytest.mark.parametrize("k", range(4))
def test_works(k): cupy.cuda.runtime.deviceSynchronize()
""",
}


@pytest.mark.large
def test_a_missing_package_a_crash_a_hang_and_a_lost_gpu_cost_one_test_each(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    copy_harness(folder)
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    (tmp_path / "cupy.py").write_text(CUPY)
    command = ["-m", "gpu", "-p", "no:cacheprovider", "-n", "2", "--dist", "load", "--max-worker-restart", "20"]
    command += ["--timeout", "4", "--timeout-method", "thread", "--results", "out.json", "tests"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-m", "pytest", *command], cwd=tmp_path, env=environment, timeout=200, check=False)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["passed"] == 4
    failed = {name.partition("::")[0].partition("/")[2]: text for name, text in found["failed"].items()}
    assert set(failed) == {"test_package.py", "test_abort.py", "test_hang.py", "test_lost.py"}
    assert "a_missing_package" in failed["test_package.py"]
    assert "crashed" in failed["test_hang.py"]

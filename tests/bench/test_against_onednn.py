"""The script that times the CPU backend beside oneDNN's primitives."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from graphc.backends.onnxruntime.kernels.onednn.binding import library
from graphc.backends.onnxruntime.pool import ThreadPool

SCRIPT = Path(__file__).parents[2] / "scripts" / "against_onednn.py"

pytestmark = pytest.mark.skipif(library() is None, reason="compares with oneDNN")


@pytest.mark.full
def test_a_row_for_each_case_that_was_asked_for() -> None:
    asked = ["batch norm, 16", "layer norm, 1024", "AveragePool 3", "Gelu, 1024 × 256"]
    asked += ["LSTM, 32", "GRU, 32", "RNN, 32", "384 × 14"]
    command = [sys.executable, str(SCRIPT), "--threads", "1", "--seconds", "0.02"]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, check=True)
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["forward", "and", "backward", "graphc", "ms", "oneDNN", "ms", "oneDNN", "/", "graphc"]
    assert len(rows) == len(asked)
    for row in rows:
        assert any(part in row for part in asked)
        ours, theirs, ratio = map(float, row.split()[-3:])
        assert ratio == pytest.approx(theirs / ours, rel=0.15, abs=0.02)


def test_the_primitives_that_are_timed_compute_what_the_row_says() -> None:
    lib = library()
    assert lib is not None
    primitives = runpy.run_path(str(SCRIPT))["Primitives"](lib, ThreadPool(1))
    forward, back = primitives.norm("layer_normalization", primitives.plain(32, 64), 64, 32)
    forward()
    x, y = (primitives.operand(role, 32 * 64).reshape(32, 64) for role in ("src", "dst"))
    scale, shift = (primitives.operand(role, 64) for role in ("scale", "shift"))
    distance = x - x.mean(1, keepdims=True)
    np.testing.assert_allclose(y, distance / np.sqrt((distance**2).mean(1, keepdims=True) + 1e-5) * scale + shift, atol=1e-5)
    back()
    slopes = primitives.operand("diff_dst", 32 * 64).reshape(32, 64)
    np.testing.assert_allclose(primitives.operand("diff_shift", 64), slopes.sum(0), atol=1e-4)

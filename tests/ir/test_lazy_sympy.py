"""What starts fast: SymPy is imported when a symbolic dimension is computed with, not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, graphc
graphc.compile, graphc.Trainer
assert "sympy" not in sys.modules
import onnx_ir as ir
assert "sympy" not in sys.modules
dim = ir.SymbolicDim("max(n, 3) // 2") + 1
assert [dim.evaluate({"n": n}) for n in (1, 9)] == [2, 5], dim
assert (ir.SymbolicDim("n") * 2).value == "2*n"
import sympy
assert isinstance(ir.SymbolicDim("n")._expr, sympy.Expr)
"""


@pytest.mark.full
def test_sympy_is_imported_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

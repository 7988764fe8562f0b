"""Imports ``onnx_ir`` without SymPy, which only its symbolic dimensions need.

graphc has its own arithmetic on symbolic dimensions (:mod:`graphc.ir.symbolic_dims`), and importing SymPy would double the
start-up time. A stand-in replaces SymPy while ``onnx_ir`` is imported, and imports the real one on first use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "sympy"


class _Deferred(ModuleType):
    """Stand-in for SymPy that imports it on first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:  # onnx_ir stores SymPy functions in tables at import
            return _called_later(name)
        return getattr(importlib.import_module(NAME), name)


def _called_later(name: str) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        return getattr(importlib.import_module(NAME), name)(*operands)

    return call


def import_onnx_ir() -> None:
    """Import ``onnx_ir`` without SymPy, unless either is imported already."""
    if "onnx_ir" in sys.modules or NAME in sys.modules:
        return
    stand_in = sys.modules[NAME] = _Deferred(NAME)
    try:
        importlib.import_module("onnx_ir")
    except ImportError:
        pass  # this version needs more of SymPy than the stand-in offers: import it as usual, later
    finally:
        if sys.modules.get(NAME) is stand_in:
            del sys.modules[NAME]

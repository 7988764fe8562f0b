"""Importing ``onnx_ir`` without SymPy, which it needs for sums and products of symbolic dimensions only.

graphc computes with symbolic dimensions itself (:mod:`graphc.ir.symbolic_dims`), and importing SymPy takes as long as
everything else that a start imports. While ``onnx_ir`` is imported here, something stands in for SymPy that imports it when
it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "sympy"


class _Deferred(ModuleType):
    """Stands for SymPy in the modules that import it meanwhile."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:  # tables that are filled on import hold functions
            return _called_later(name)
        return getattr(importlib.import_module(NAME), name)


def _called_later(name: str) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        return getattr(importlib.import_module(NAME), name)(*operands)

    return call


def import_onnx_ir() -> None:
    """Import ``onnx_ir``, unless it or SymPy has been imported."""
    if "onnx_ir" in sys.modules or NAME in sys.modules:
        return
    stand_in = sys.modules[NAME] = _Deferred(NAME)
    try:
        importlib.import_module("onnx_ir")
    except ImportError:
        pass  # a version that wants more of SymPy than a stand-in has: it is imported as usual, by whoever needs it
    finally:
        if sys.modules.get(NAME) is stand_in:
            del sys.modules[NAME]

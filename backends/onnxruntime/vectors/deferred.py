"""Names that compiled code uses and only Numba can make, without an import of Numba."""

from __future__ import annotations

import functools
import importlib
from typing import Any


class Deferred:
    """An intrinsic, or a function of another library, which Numba makes when it compiles code that names it.

    Args:
        module, name: where the function that makes it is defined.
        arguments: of that function.
    """

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self._place, self._arguments = (module, name), arguments

    def __repr__(self) -> str:
        module, name = self._place
        return f"{module}.{name}{self._arguments}"

    @property
    def is_plain(self) -> bool:
        """Whether its text says all about it."""
        return all(isinstance(argument, (int, float, str)) for argument in self._arguments)

    @functools.cached_property
    def _numba_type_(self) -> Any:
        """The type by which Numba knows it."""
        module, name = self._place
        made = getattr(importlib.import_module(module), name)(*self._arguments)
        context = importlib.import_module("numba.core.registry").cpu_target.typing_context
        context.refresh()  # it learns of an intrinsic that was made a moment ago
        return context.resolve_value_type(made)

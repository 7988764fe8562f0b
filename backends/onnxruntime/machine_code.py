"""Machine code of functions that Numba compiled, kept on disk: a start that finds it does not import Numba.

    name of the file = digest of: the function, the types of its arguments, all sources of its package, the versions of Numba
                       and LLVM, the processor

The file holds the function with its adapter ``f(words, start, stop)``, as Numba's own optimiser left it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from graphc.backends.host.compiler import compiler
from graphc.backends.onnxruntime.kernels.jit import NumbaFunction, numba_package, sources_digest
from graphc.errors import InternalError

_COMPILING = threading.RLock()

_TYPES = {"p": "ptr", "i": "i64", "f": "float", "d": "double"}

_RUNTIME = ("NRT_", "numba_")
"""What the names of Numba's own functions begin with; they are there only where Numba is imported."""

_UNUSED = """
define void @NRT_MemInfo_call_dtor(ptr %owner) {
  call void @llvm.trap()
  ret void
}
declare void @llvm.trap()
"""
"""Numba counts the owners of arrays; these arrays have none, so none is ever freed."""


def of(function: Any, arguments: Sequence[Any], kinds: str, letters: str) -> tuple[int, int, Any]:
    """The machine code of ``function`` for these arguments.

    Args:
        function: a :class:`NumbaFunction`, or a dispatcher of Numba.
        kinds: types of the arguments, by which kept code is found.
        letters: types of the words that hold them.

    Returns:
        The address of ``f(words, start, stop)``, the first of the words, and what must live as long as the code.
    """
    name = _name(function, kinds)
    if name is not None:
        return compiler().object_address(name, lambda: _object(function, arguments, letters, name)), 0, None
    with _COMPILING:
        compiled = _compiled(function, arguments)
        inner = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return _adapter(letters), inner, compiled


def _name(function: Any, kinds: str) -> str | None:
    """The name of the kept code; None: another start could not tell whether it is the same function."""
    own = _identity(function) if isinstance(function, NumbaFunction) and not function.targetoptions.get("cache") else None
    return None if own is None else compiler().name_of("n", own, kinds, _versions())


@functools.cache
def _versions() -> str:
    return f"{sys.version_info[:2]} {np.__version__} {importlib.metadata.version('numba')}"


def _identity(function: NumbaFunction) -> str | None:
    """The function with its package's sources and the numbers around it; None: something around it is not a number."""
    inner = function.py_func
    around = [cell.cell_contents for cell in inner.__closure__ or ()]
    if not all(isinstance(value, (int, float, str)) for value in around):
        return None
    place = Path(inner.__code__.co_filename)
    if not place.is_file():
        return None
    options = sorted((key, sorted(value) if isinstance(value, set) else value) for key, value in function.targetoptions.items())
    return f"{inner.__module__}.{inner.__qualname__} {around} {options} {sources_digest(_package(place))}"


def _package(file: Path) -> Path:
    """The outermost package around a file: whatever a kernel calls lies there."""
    folder = file.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


def _compiled(function: Any, arguments: Sequence[Any]) -> Any:
    """What Numba makes of a function.

    Raises:
        InternalError: it returns something.
    """
    numba = numba_package()
    dispatcher = function.dispatcher if isinstance(function, NumbaFunction) else function
    kinds = (*(numba.typeof(a) for a in arguments), numba.types.int64, numba.types.int64)
    dispatcher.compile(kinds)
    compiled = dispatcher.overloads[kinds]
    if compiled.fndesc.restype != numba.types.none:
        raise InternalError(f"{dispatcher.py_func.__qualname__} returns a value, which nobody would read")
    return compiled


def _object(function: NumbaFunction, arguments: Sequence[Any], letters: str, name: str) -> bytes:
    """The object file of a function with its adapter.

    Raises:
        InternalError: it allocates, or calls another function that only Numba has.
    """
    with _COMPILING:
        compiled = _compiled(function, arguments)
        codegen = compiled.library.codegen
        module = llvm.parse_assembly(str(compiled.library._final_module))
        symbol = compiled.fndesc.llvm_func_name
        module.link_in(llvm.parse_assembly(_adapter_text(name, letters, symbol)))
        module.link_in(llvm.parse_assembly(_UNUSED))
        for held in (*module.functions, *module.global_variables):
            if not held.is_declaration and held.name != name:
                held.linkage = "internal"  # another function's code may have the same names inside
        passes = llvm.create_new_module_pass_manager()
        passes.add_global_dead_code_eliminate_pass()
        passes.run(module, llvm.create_pass_builder(codegen._tm, llvm.create_pipeline_tuning_options()))
        found = [held.name for held in (*module.functions, *module.global_variables) if held.is_declaration]
        if missing := [name for name in found if name.startswith(_RUNTIME)]:
            text = f"the kernel {function.py_func.__qualname__} needs Numba's runtime ({', '.join(missing)})"
            raise InternalError(f"{text}: take its scratch as an argument, or decorate it with jit_with_runtime")
        return bytes(codegen._tm.emit_object(module))


@functools.cache
def _adapter(letters: str) -> int:
    """The address of an adapter that takes the function's address from the first word."""
    return compiler().address_of(f"adapter {letters}", lambda name: _adapter_text(name, letters, ""))


def _adapter_text(name: str, letters: str, symbol: str) -> str:
    """``f(words, start, stop)`` for a signature, a letter for each word, around a function by name or by address."""
    loads, given = [], []
    for k, letter in enumerate(f"pp{letters}"):
        kind = _TYPES[letter]
        loads.append(f"  %place{k} = getelementptr i64, ptr %words, i64 {k}")
        loads.append(f"  %word{k} = load {kind}, ptr %place{k}")
        given.append(f"{kind} %word{k}")
    arguments = ["ptr %result", "ptr %error", *given[2:], "i64 %start", "i64 %stop"]
    types = ", ".join(argument.split()[0] for argument in arguments)
    called = f'@"{symbol}"' if symbol else "%word0"
    lines = [
        *([f'declare i32 @"{symbol}"({types})'] if symbol else []),
        f"define void @{name}(ptr %words, i64 %start, i64 %stop) {{",
        "  %result = alloca ptr",
        "  %error = alloca ptr",
        *loads,
        f"  %status = call i32 {called}({', '.join(arguments)})",
        "  %fine = icmp eq i32 %status, 0",
        "  br i1 %fine, label %end, label %failure",
        "failure:",
        "  store i64 1, ptr %word1",
        "  br label %end",
        "end:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)

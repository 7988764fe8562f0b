"""Machine code of functions that Numba compiled, kept on disk: a start that finds it does not import Numba.

    name of the file = digest of: the function, the types of its arguments, all sources of its package, the versions of Numba
                       and LLVM, the processor

The file holds the function with its adapter ``f(words, start, stop)``, as Numba's own optimiser left it. Before it a start
looks for code that was made ahead of time (:mod:`graphc.backends.onnxruntime.ahead`), which runs on all processors of a level.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from graphc.backends.host.compiler import compiler
from graphc.backends.host.processor import processor
from graphc.backends.onnxruntime.kernels.common.jit import NumbaFunction, numba_package
from graphc.backends.onnxruntime.vectors.deferred import Deferred
from graphc.errors import InternalError

_HERE = Path(__file__).parent

AHEAD = _HERE / "ahead_of_time"
"""Folder of machine code that was made ahead of time, in a folder for each level of processors."""

_RECORD = os.environ.get("GRAPHC_RECORD_KERNELS")
"""A file that gets a line for every kernel that is bound."""

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


def of(function: Any, arguments: Sequence[Any], kinds: Sequence[str]) -> tuple[int, int, Any]:
    """The machine code of ``function`` for these arguments.

    Args:
        function: a :class:`NumbaFunction`, or a dispatcher of Numba.
        kinds: types of the arguments (:func:`kind_of`).

    Returns:
        The address of ``f(words, start, stop)``, the first of the words, and what must live as long as the code.
    """
    identity = identity_of(function, kinds) if isinstance(function, NumbaFunction) else None
    if identity is not None:
        if _RECORD:
            with open(_RECORD, "a") as record:
                record.write(f"{function.place} {' '.join(kinds)}\n")
        address = compiler().file_address(file := ahead_name(identity), AHEAD / str(processor().level) / f"{file}.o")
        if address is None:
            name = compiler().name_of("n", identity, _versions())
            address = compiler().object_address(name, lambda: object_of(function, kinds, name))
        return address, 0, None
    numba = numba_package()
    with _COMPILING:
        if isinstance(function, NumbaFunction):
            compiled = _compiled(function.dispatcher, [_numba_type(kind) for kind in kinds])
        else:
            compiled = _compiled(function, [numba.typeof(a) for a in arguments])
        inner = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return _adapter(letters_of(kinds)), inner, compiled


@functools.cache
def _versions() -> str:
    return f"{sys.version_info[:2]} {np.__version__} {importlib.metadata.version('numba')}"


def ahead_name(identity: str) -> str:
    """The name of a function whose code is made ahead of time, and of its file."""
    return "a" + hashlib.sha256(identity.encode()).hexdigest()[:24]


def identity_of(function: NumbaFunction, kinds: Sequence[str]) -> str | None:
    """The function with its sources, what is around it and the types of its arguments; None: no text says what is around it."""
    text = _text_of(function)
    place = Path(function.py_func.__code__.co_filename)
    if text is None or not place.is_file():
        return None
    return f"{text} {_sources(_HERE if place.is_relative_to(_HERE) else _package(place))} {' '.join(kinds)}"


def _text_of(value: object) -> str | None:
    """What tells a function, or a value around it, from others of the same sources; None: nothing does."""
    if isinstance(value, (int, float, str)) or (isinstance(value, Deferred) and value.is_plain):
        return repr(value)
    if not isinstance(value, NumbaFunction):
        return None
    inner = value.py_func
    around = [_text_of(cell.cell_contents) for cell in inner.__closure__ or ()]
    if None in around:
        return None
    options = sorted((key, sorted(found) if isinstance(found, set) else found) for key, found in value.targetoptions.items())
    return f"{inner.__module__}.{inner.__qualname__} {around} {options}"


@functools.cache
def _sources(folder: Path) -> str:
    """A digest of the sources below a folder, as this process first found them.

    Machine code holds functions of other files than the kernel's, and must not outlive a change of theirs. No file
    beside this one holds a kernel; this one holds the adapter.
    """
    files = [*sorted(folder.glob("*/**/*.py" if folder == _HERE else "**/*.py")), Path(__file__)]
    return hashlib.sha256(b"\0".join(f.name.encode() + f.read_bytes() for f in files)).hexdigest()[:16]


def _package(file: Path) -> Path:
    """The outermost package around a file: whatever a kernel calls lies there."""
    folder = file.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


_LETTERS = {"i": "int64", "f": "float32", "d": "float64"}


def kind_of(value: Any) -> str | None:
    """What tells apart arguments for which Numba makes different code; None: words do not hold it.

    A letter of :data:`_LETTERS` is a number, ``3i`` a tuple, ``<f4:2C`` a contiguous matrix.
    """
    if isinstance(value, np.ndarray):
        flags = value.flags
        layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        return f"{value.dtype.str}:{value.ndim}{layout}{'' if flags.aligned else 'u'}"
    if isinstance(value, tuple):
        letters = {letter_of(v) for v in value}
        return f"{len(value)}{letter}" if len(letters) == 1 and (letter := letters.pop()) else None
    return letter_of(value)


def letter_of(value: Any) -> str | None:
    """The kind of word that holds a number: f and d are floats of 32 and 64 bits, i an integer."""
    if isinstance(value, np.float32):
        return "f"
    if isinstance(value, float):
        return "d"
    return "i" if isinstance(value, (int, np.int64)) else None


def letters_of(kinds: Sequence[str]) -> str:
    """The types of the words that hold arguments: p is an address, other letters as in :func:`letter_of`."""
    words = []
    for kind in kinds:
        if ":" in kind:
            words.append("ppiip" + "ii" * int(kind.split(":")[1].rstrip("CFAu")))
        else:
            words.append(kind[-1] * int(kind[:-1] or 1))
    return "".join(words)


def _numba_type(kind: str) -> Any:
    """Numba's type of a kind; every array may be written."""
    types = numba_package().types
    if ":" in kind:
        dtype, layout = kind.split(":")
        aligned = not layout.endswith("u")
        of = importlib.import_module("numba.np.numpy_support").from_dtype(np.dtype(dtype))
        layout = layout.rstrip("u")
        return types.Array(of, int(layout[:-1]), layout[-1], aligned=aligned)
    letter = getattr(types, _LETTERS[kind[-1]])
    return types.UniTuple(letter, int(kind[:-1])) if kind[:-1] else letter


def _compiled(dispatcher: Any, kinds: Sequence[Any]) -> Any:
    """What Numba makes of a function for arguments of these types of its own.

    Raises:
        InternalError: it returns something.
    """
    types = numba_package().types
    signature = (*kinds, types.int64, types.int64)
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    if compiled.fndesc.restype != types.none:
        raise InternalError(f"{dispatcher.py_func.__qualname__} returns a value, which nobody would read")
    return compiled


def object_of(function: NumbaFunction, kinds: Sequence[str], name: str) -> bytes:
    """The object file of a function with its adapter, which is called ``name``.

    Raises:
        InternalError: it allocates, or calls another function that only Numba has.
    """
    with _COMPILING:
        compiled = _compiled(function.dispatcher, [_numba_type(kind) for kind in kinds])
        codegen = compiled.library.codegen
        module = llvm.parse_assembly(str(compiled.library._final_module))
        symbol = compiled.fndesc.llvm_func_name
        module.link_in(llvm.parse_assembly(_adapter_text(name, letters_of(kinds), symbol)))
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
            raise InternalError(f"{text}: take its scratch as an argument")
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

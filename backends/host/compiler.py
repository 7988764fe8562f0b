"""Compiles the source of a kernel to a native function ``f(arrays, first unit, last unit)``.

Units are what threads share: rows, or blocks of rows. The machine code of a kernel is kept on disk for the next start, named by
what made it: the kernel, the processor with its features, LLVM, and this compiler. Where feeds have many shapes, a kernel reads
those of its sizes that differ between them (:mod:`graphc.backends.host.sizes`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir as ll

from graphc.backends.fusion import expressions
from graphc.backends.fusion.kernel_source import KernelSource
from graphc.backends.host import columns, language, object_files
from graphc.backends.host.emit import Emitter
from graphc.backends.host.generator import LANES, LINE, TURNED, Loops, units_of
from graphc.backends.host.kinds import I64
from graphc.backends.host.machine_code import MachineCode, target_machine
from graphc.backends.host.mathematics import Mathematics
from graphc.backends.host.processor import processor
from graphc.backends.host.sizes import Formula, KnownKernels, Sizes
from graphc.distributed.world import find_world, threads_for
from graphc.ir.facts import dtype_of

POINTER = ll.PointerType()

WIDEST = 32
"""Most units over distant columns that are one pass."""

CACHE = 1 << 14
"""Bytes that such a pass may keep, half of a level-1 cache."""

Function = Callable[[int, int, int], None]

_UNNAMED = "UNNAMED.KERNEL"
"""Stands for the name of a kernel in the text that its name is made of."""


@dataclass(frozen=True, slots=True)
class HostKernel:
    """A kernel, compiled or being compiled.

    Attributes:
        name: by what makes it.
        load: waits for ``f(address of the array of addresses, first unit, last unit)``, which ctypes calls.
        units: their number.
        elements: of a unit, for the smallest share worth a thread.
        sizes: words of the table whose address comes behind those of the arrays; None: there is no table.
    """

    name: str
    load: Callable[[], Function]
    units: int
    elements: int
    sizes: tuple[int, ...] | None = None


def module_of(source: KernelSource, loops: Loops, name: str, sizes: Sizes | None = None) -> ll.Module:
    """The LLVM module of a kernel.

    Args:
        sizes: of the text, which holds names of them; the words that the loops take are added to it.

    Raises:
        LanguageError: the kernel uses what this target lacks.
    """
    module = ll.Module(name)
    operands = len(source.operands)
    count = operands + (sizes is not None)
    inner = ll.Function(module, ll.FunctionType(ll.VoidType(), [POINTER] * count + [I64, I64]), f"{name}.body")
    inner.linkage = "internal"
    inner.attributes.add("alwaysinline")
    arrays = {}
    for k, value in enumerate(source.operands):
        inner.args[k].add_attribute("noalias")
        text = f"x{k}" if k < source.reads else f"y{k - source.reads}"
        kind = expressions.STORAGE[dtype_of(value)]
        arrays[text] = (inner.args[k], kind)
    builder = ll.IRBuilder(inner.append_basic_block("entry"))
    body = language.parse(_body(source.body))
    table = None
    if sizes is not None:
        inner.args[operands].add_attribute("noalias")
        table = inner.args[operands], sizes
    emitter = Emitter(builder, arrays, Mathematics(module), _widest(loops, body), table)
    _rows(emitter, loops, body, inner.args[count], inner.args[count + 1], _reduces(source, loops))
    builder.ret_void()
    outer = ll.Function(module, ll.FunctionType(ll.VoidType(), [POINTER, I64, I64]), name)
    builder = ll.IRBuilder(outer.append_basic_block())
    addresses = [
        builder.load(builder.gep(outer.args[0], [ll.Constant(I64, k)], source_etype=POINTER), typ=POINTER) for k in range(count)
    ]
    builder.call(inner, [*addresses, outer.args[1], outer.args[2]])
    builder.ret_void()
    return module


def _body(text: str) -> str:
    """The statements inside the loop over rows."""
    start = text.index("{", text.index("(row)")) + 1
    end = text.rindex("}")  # of the function; the one before it ends the loop
    return text[start : text.rindex("}", 0, end)]


def _widest(loops: Loops, body: Sequence[language.Statement]) -> int:
    """Most rows that a pass over distant columns takes at once: those of several units, while what it keeps fits the cache.

    A pass over 64 rows of a matrix with 4 KiB a column reads 256 bytes of each page. For 1024 rows, a sum beside a GELU's
    gradient takes 5.5 ms by 64 and 3.4 by 512 (16 × 64 × 1024 elements, one AVX2 core).
    """
    if loops.vector == 1:
        return 1
    kept = 4 * max(1, _vectors(body))
    return loops.vector * max(1, min(WIDEST, CACHE // (kept * loops.vector)))


def _vectors(body: Sequence[language.Statement]) -> int:
    """Variables that hold a number for each row that is taken at once."""
    count = 0
    for statement in body:
        match statement:
            case language.Declare(_, _, _, "VECTOR"):
                count += 1
            case language.Block(_, inside):
                count += _vectors(inside)
    return count


def _rows(emitter: Emitter, loops: Loops, body: Sequence[language.Statement], start: Any, stop: Any, reduces: bool) -> None:
    """Emit the loop over units, and inside it what is left of the rows."""
    build = emitter.builder
    emitter.columns = lambda inside: columns.walk(emitter, loops, inside)

    def number(value: int) -> Any:
        return ll.Constant(I64, value)

    def decode(unit: Any, names: Sequence[tuple[str, int]]) -> None:
        for k, (name, size) in reversed(list(enumerate(names))):
            emitter.define(name, unit if k == 0 else build.srem(unit, emitter.length(name, size)))
            if k:
                unit = build.sdiv(unit, emitter.length(name, size))

    def blocks_of(name: str, size: int, length: int) -> Any:
        return emitter.size(-(-size // length), name, by=lambda sizes: -(-sizes[name] // length))

    def least(*values: Any) -> Any:
        return functools.reduce(lambda a, b: build.select(build.icmp_signed("<", a, b), a, b), values)

    following: list[Any] = []  # the unit after those that a pass takes at once

    def tile() -> None:
        """``LINE`` neighbours of the loop ``beside``, for ``TURNED`` steps of the innermost loop."""
        unit = emitter.expression(language.Name("unit")).value
        inner, size = loops.rows[-1]
        neighbours = dict(loops.rows)[loops.beside]
        parts, blocks = blocks_of(inner, size, TURNED), blocks_of(loops.beside, neighbours, LINE)
        start = build.mul(build.srem(unit, parts), number(TURNED))
        unit = build.sdiv(unit, parts)
        first = build.mul(build.srem(unit, blocks), number(LINE))
        decode(build.sdiv(unit, blocks), [loop for loop in loops.rows[:-1] if loop[0] != loops.beside])
        stop = least(build.add(start, number(TURNED)), emitter.length(inner, size))
        last = least(build.add(first, number(LINE)), emitter.length(loops.beside, neighbours))
        emitter.loop(first, last, loops.beside, lambda: emitter.loop(start, stop, inner, lambda: emitter.run(body)))

    def one_unit() -> None:
        unit = whole = emitter.expression(language.Name("unit")).value
        if loops.parts > 1:
            units, _ = units_of(loops, reduces)
            of_part = emitter.size(units // loops.parts, *(name for name, _ in loops.rows))
            emitter.define("PART", build.sdiv(unit, of_part))
            unit = build.srem(unit, of_part)
        if not loops.rows:
            emitter.run(body)
        elif loops.vector > 1:
            outer, (inner, size) = loops.rows[:-1], loops.rows[-1]
            blocks = -(-size // loops.vector)
            if blocks == 1:  # a pass of known size becomes vectors without a loop, if it fills them
                decode(unit, outer)
                emitter.define(inner, number(0))
                emitter.write_out(inner)
                whole = -(-size // LANES) * LANES
                emitter.lanes, emitter.existing = number(whole), number(size) if whole > size else None
                emitter.run(body)
                return
            there = blocks_of(inner, size, loops.vector)
            place = build.srem(unit, there)
            decode(build.sdiv(unit, there), outer)
            emitter.define(inner, build.mul(place, number(loops.vector)))
            taken = least(build.sub(stop, whole), build.sub(there, place), number(emitter.vector // loops.vector))
            left = build.sub(emitter.length(inner, size), build.mul(place, number(loops.vector)))
            emitter.lanes = least(left, build.mul(taken, number(loops.vector)))
            emitter.run(body)
            following.append(build.add(whole, taken))
        elif reduces:
            decode(unit, loops.rows)
            emitter.run(body)
        elif loops.beside:
            tile()
        else:
            decode(unit, loops.rows[:-1])
            columns.nest(emitter, loops.rows[-1:], lambda: emitter.run(body))

    if not reduces and len(loops.rows) == 1 and loops.vector == 1:
        emitter.loop(start, stop, loops.rows[0][0], lambda: emitter.run(body))
    else:
        emitter.loop(start, stop, "unit", one_unit, lambda: following[-1] if following else None)


class Compiler:
    """Compiles modules for this processor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        wanted = processor()
        self._code = MachineCode(threads_for(find_world()))
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
        self._functions: dict[str, Function] = {}
        self._awaited: dict[str, Future[bytes]] = {}
        os.register_at_fork(after_in_child=self._code.begin)
        self._addresses: dict[str, int] = {}
        self._version = f"{wanted.name}{wanted.features}{llvm.llvm_version_info}{_own_text()}"
        self._known = KnownKernels()
        # text without sizes → the kernel, and what gives the rest of its table
        self._serving: dict[str, tuple[str, list[Formula]]] = {}

    def compile(self, source: KernelSource, loops: Loops, *, varying: bool = False) -> HostKernel:
        """Begin to compile a kernel, or find it.

        Args:
            varying: whether it serves for other sizes too, as far as earlier kernels show which of its numbers differ.

        Raises:
            LanguageError: the kernel uses what this target lacks.
        """
        units, elements = units_of(loops, _reduces(source, loops))
        name, words = self._for_sizes(source, loops) if varying else ("", None)
        if words is None:
            name = self._named("k", f"{source.body}{_types(source)}{loops}")
            with self._lock:
                self._known.note(source.body, loops)
                if not self._begun(name):
                    self._submit(name, str(module_of(source, loops, name)))
        return HostKernel(name, functools.partial(self._load, name), units, elements, words)

    def _for_sizes(self, source: KernelSource, loops: Loops) -> tuple[str, tuple[int, ...] | None]:
        """The name of a kernel that holds for more than one shape, and its table; None: nothing is known to differ."""
        added, any_size = columns.order_of(loops)
        free = [name for name, _ in (*loops.rows, *(loops.columns if any_size else loops.columns[:-1]))]
        with self._lock:
            body, sizes = self._known.without_sizes(source.body, loops, free)
        if not sizes.words and not sizes.loops:
            return "", None
        if loops.parts > 1 and loops.columns[0][0] in sizes.loops:
            (divided, size), *_ = loops.columns
            steps, left = columns.parts_of(size, loops.parts)
            sizes.loops |= {f"{divided}_part": steps, f"{divided}_last": left}
        shape = [(name, None if name in sizes.loops else size) for name, size in (*loops.rows, *loops.columns)]
        order = f"{len(loops.rows)}{_reduces(source, loops)}{added}{loops.vector}{loops.beside}{loops.parts}"
        key = f"{body}{_types(source)}{shape}{order}"
        known = self._serving.get(key)
        if known is not None:
            name, formulas = known
            return name, (*sizes.words, *(formula(sizes.loops) for formula in formulas))
        text = str(module_of(replace(source, body=body), loops, _UNNAMED, sizes))
        name = self._named("g", text)
        with self._lock:
            if not self._begun(name):
                self._submit(name, text.replace(_UNNAMED, name))
            if sizes.serves:
                self._serving[key] = name, sizes.formulas
        return name, tuple(sizes.words)

    def _named(self, kind: str, text: str) -> str:
        return kind + hashlib.sha256(f"{text}{self._version}".encode()).hexdigest()[:24]

    def _begun(self, name: str) -> bool:
        """Whether a kernel is compiled, or being compiled."""
        if name not in self._functions and name not in self._awaited:
            code = object_files.read_cached(f"{name}.o")
            if code is None:
                return False
            self._functions[name] = self._function(code, name)
        return True

    def _submit(self, name: str, text: str) -> None:
        keep = functools.partial(object_files.write_cached, f"{name}.o")
        self._awaited[name] = self._code.submit(text, keep)

    def kept(self, name: str) -> Callable[[], Function] | None:
        """What loads a kernel of this process or an earlier one; None: it must be compiled."""
        with self._lock:
            return functools.partial(self._load, name) if self._begun(name) else None

    def _load(self, name: str) -> Function:
        with self._lock:
            if name not in self._functions:
                self._functions[name] = self._function(self._awaited[name].result(), name)
                del self._awaited[name]
            return self._functions[name]

    def _function(self, code: bytes, name: str) -> Function:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(self._loaded(code, name))

    def name_of(self, kind: str, *key: str) -> str:
        """The name of a function by what makes it: ``key``, this processor, LLVM and this compiler."""
        return kind + hashlib.sha256("\0".join((*key, self._version)).encode()).hexdigest()[:24]

    def object_address(self, name: str, make: Callable[[], bytes]) -> int:
        """The address of the function ``name`` in an object file from the cache, or else from ``make``.

        Args:
            name: of :meth:`name_of`.
            make: the object file.
        """
        with self._lock:
            if name not in self._addresses:
                self._addresses[name] = self._address(name, make)
            return self._addresses[name]

    def file_address(self, name: str, path: Path) -> int | None:
        """The address of the function ``name`` in a file that ``object_files.write_object`` wrote; None: there is none."""
        with self._lock:
            if name not in self._addresses:
                code = object_files.read_object(path)
                if code is None:
                    return None
                self._addresses[name] = self._loaded(code, name)
            return self._addresses[name]

    def address_of(self, key: str, module: Callable[[str], str]) -> int:
        """The address of a function of machine code, from the cache where that holds it.

        Args:
            key: tells the text from every other.
            module: name of the function → text of an LLVM module that defines it.
        """
        name = "c" + hashlib.sha256(f"{key}{module('f')}{self._version}".encode()).hexdigest()[:24]
        with self._lock:
            if name not in self._addresses:
                self._addresses[name] = self._address(name, lambda: self._code.now(module(name)))
            return self._addresses[name]

    def _address(self, name: str, make: Callable[[], bytes]) -> int:
        code = object_files.read_cached(f"{name}.o")
        return self._loaded(self._kept(name, make) if code is None else code, name)

    @staticmethod
    def _kept(name: str, make: Callable[[], bytes]) -> bytes:
        code = make()
        object_files.write_cached(f"{name}.o", code)
        return code

    def _loaded(self, code: bytes, name: str) -> int:
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        return int(self._engine.get_function_address(name))


def _reduces(source: KernelSource, loops: Loops) -> bool:
    return bool(source.columns > 1 or loops.columns)


def _types(source: KernelSource) -> list[str]:
    return [str(dtype_of(v)) for v in source.operands]


def _own_text() -> str:
    """A digest of this compiler: other text makes other code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_STARTING = threading.Lock()


def compiler() -> Compiler:
    """The compiler of this process; one only, since its machine code is freed with it, and workers may be threads."""
    with _STARTING:
        return _compiler()


@functools.cache
def _compiler() -> Compiler:
    return Compiler()

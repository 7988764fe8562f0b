"""Generates update kernels from the updates' decompositions: one in-place pass over flat arrays.

    AdamW(W, dW, m, v, step, lr, divisor, skip), Narrow(W::bf16, ·)      becomes

    if (skip) return;                                    a skipped step writes nothing
    once a block: lr ÷ (1 − β1ᵗ), … in float64           expressions of scalars only
    four elements a thread: read W, dW, m, v;  write W, m, v, W::bf16

A table in memory holds the kernel's arrays, one entry per group of arrays, so one launch updates any number of similar groups:
twenty buckets, or the running statistics of a hundred layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphc.backends.cupy.codegen.whole_blocks import named
from graphc.backends.cupy.updates.multi_tensor import ELEMENTS
from graphc.backends.fusion import expressions
from graphc.backends.fusion.expressions import STORAGE, compute_type, literal
from graphc.backends.fusion.op_kernels import op_kernel
from graphc.ir import DOMAIN_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.declare import declared
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import constant, dtype_of, required

WIDTH = 4
"""Elements that a thread reads at once."""

SAME = frozenset({"Identity", "Expand", "Reshape", "Squeeze", "Unsqueeze"})
"""Ops that do not change the value of a scalar or of an element."""

LENGTH = 64
"""Array length for which the text is generated; the text is the same for all lengths."""


@dataclass(frozen=True, slots=True)
class UpdateCall:
    """One update op over slots.

    Attributes:
        inputs: the slot of each operand; None for an absent one.
        targets: the slot that each result is written to; None for an unused result.
    """

    domain: str
    op: str
    attributes: tuple[tuple[str, Any], ...]
    inputs: tuple[int | None, ...]
    targets: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class UpdateProgram:
    """The computation of an update kernel.

    Attributes:
        slots: element type of each array, and whether it is flat; other arrays hold one number.
        calls: the updates, in order; later ones see what earlier ones wrote.
        skip: the slot of the skip flag; if the flag is set, nothing is written.
        vector: whether every flat array is aligned for reads of :data:`WIDTH` elements.
    """

    slots: tuple[tuple[ir.DataType, bool], ...]
    calls: tuple[UpdateCall, ...]
    skip: int | None
    vector: bool

    @property
    def written(self) -> list[int]:
        """The slots that are written."""
        return sorted({t for call in self.calls for t in call.targets if t is not None})


class NotElementwiseError(Exception):
    """The update is not elementwise arithmetic."""


def skip_index(domain: str, op: str) -> int | None:
    """Index of the optional operand ``skip``, which suppresses the update when true; None if the op has none."""
    declaration = declared(domain, op)
    if declaration is None:
        return None
    return next((k for k, formal in enumerate(declaration.inputs) if formal.name == "skip" and formal.optional), None)


class _Writer:
    """Collects the statements for scalars and for the elements at one index."""

    def __init__(self, program: UpdateProgram) -> None:
        self.program = program
        self.once: list[str] = []
        self.each: list[str] = []
        self.shared: dict[str, str] = {}
        self._texts: dict[ir.Value, str] = {}
        self._flat: set[ir.Value] = set()
        self._count = 0

    def run(self) -> None:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": DOMAIN_VERSION}, name="update")
        op = Builder(graph)
        held: list[ir.Value] = []
        for k, (dtype, flat) in enumerate(self.program.slots):
            value = ir.Value(name=f"i{k}", type=ir.TensorType(dtype), shape=ir.Shape([LENGTH] if flat else []))
            graph.inputs.append(value)
            held.append(value)
            if flat:
                self._flat.add(value)
                self._texts[value] = f"i{k}"
            else:
                self._texts[value] = self._scalar(expressions.load(dtype, f"*(const {STORAGE[dtype]}*)at[{k}]"), dtype)
        for call in self.program.calls:
            made = op.emit(
                call.op,
                [None if k is None else held[k] for k in call.inputs],
                dict(call.attributes),
                domain=call.domain,
                outputs=len(call.targets),
            )
            for target, value in zip(call.targets, made, strict=True):
                if target is not None:
                    held[target] = value
        graph.outputs.extend(held[k] for k in self.program.written)
        decompose_graph(graph, lambda node: False)
        for node in graph:
            self._node(node)
        for k, value in zip(self.program.written, graph.outputs, strict=True):
            dtype, flat = self.program.slots[k]
            if not flat or value.dtype != dtype:
                raise NotElementwiseError(f"{value.name} is not a flat array of {dtype}")
            self.each.append(expressions.store(dtype, f"o{k}", self._texts[value]))

    @property
    def read(self) -> list[int]:
        """The flat slots that the statements read; results that are only overwritten are not among them."""
        words = set(re.findall(r"\w+", " ".join(self.each)))
        return [k for k, (_, flat) in enumerate(self.program.slots) if flat and f"i{k}" in words]

    def _node(self, node: ir.Node) -> None:
        if node.op_type == "Constant" and node.domain == "":
            return
        operands = [v for v in node.inputs if v is not None]
        flat = any(v in self._flat for v in operands)
        if len(node.outputs) != 1 or node.domain:
            raise NotElementwiseError(f"{node.op_type} is not elementwise arithmetic")
        out = node.outputs[0]
        dtype = dtype_of(out)
        text = self._expression(node, dtype)
        if flat:
            self._flat.add(out)
            self._count += 1
            self.each.append(f"const {compute_type(dtype)} e{self._count} = {text};")
            self._texts[out] = f"e{self._count}"
        else:
            self._texts[out] = self._scalar(text, dtype)

    def _expression(self, node: ir.Node, dtype: ir.DataType) -> str:
        first = node.inputs[0]
        if node.op_type in SAME:
            return self._text(first)
        if node.op_type in ("Cast", "CastLike"):
            return expressions.cast(dtype_of(first), dtype, self._text(first), node)
        kernel = op_kernel(node)
        if kernel.expression is None:
            raise NotElementwiseError(f"{node.op_type} is not elementwise arithmetic")
        operands = ["" if v is None else self._text(v) for v in node.inputs]
        return kernel.expression(operands, node, dtype_of(node.inputs[kernel.typed_by]))

    def _text(self, value: ir.Value | None) -> str:
        value = required(value)
        known = constant(value)
        if known is None:
            return self._texts[value]
        if known.size != 1 or value.dtype is None:
            raise NotElementwiseError(f"{value.name} is an array of constants")
        return literal(value.dtype, known.reshape(-1)[0])

    def _scalar(self, text: str, dtype: ir.DataType) -> str:
        self._count += 1
        name = f"c{self._count}"
        self.shared[name] = compute_type(dtype)
        self.once.append(f"{name} = {text};")
        return name


def written(program: UpdateProgram, *, device: bool) -> tuple[str, str]:
    """Render the kernel as (name, text).

    Raises:
        NotElementwiseError: some op is not elementwise arithmetic.
    """
    writer = _Writer(program)
    writer.run()
    flat = {k: dtype for k, (dtype, is_flat) in enumerate(program.slots) if is_flat}
    read = writer.read
    entry = len(program.slots) + 1
    lines = [
        "template <class T> struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) Quad { T at[4]; };",
        "KERNEL $name(const long long* table, const int* chunks) {",
        f"const long long* at = table + (long long)chunks[2 * BLOCK] * {entry};",
        f"const long long first = (long long)chunks[2 * BLOCK + 1] * {ELEMENTS}, count = at[{entry - 1}];",
        f"const long long last = first + {ELEMENTS} < count ? first + {ELEMENTS} : count;",
    ]
    if program.skip is not None:
        lines.append(f"if (*(const unsigned char*)at[{program.skip}]) return;")
    lines += [f"SHARED {kind} {name};" for name, kind in writer.shared.items()]
    lines += ["if (THREAD == 0) {", *writer.once, "}", "SYNC;"]
    lines += [f"{STORAGE[dtype]}* x{k} = ({STORAGE[dtype]}*)at[{k}];" for k, dtype in flat.items()]
    outputs = program.written
    start = "first"
    if program.vector:
        start = "whole"
        lines.append(f"const long long whole = first + (last - first) / {WIDTH} * {WIDTH};")
        lines.append(f"for (long long k = first + (long long)THREAD * {WIDTH}; k < whole; k += THREADS * {WIDTH}) {{")
        lines += [f"const Quad<{STORAGE[flat[k]]}> q{k} = *(const Quad<{STORAGE[flat[k]]}>*)(x{k} + k);" for k in read]
        lines += [f"Quad<{STORAGE[flat[k]]}> r{k};" for k in outputs]
        lines += ["UNROLL", f"for (int v = 0; v < {WIDTH}; ++v) {{"]
        lines += [_loaded(flat[k], k, f"q{k}.at[v]") for k in read]
        lines += [_placed(line, {k: f"r{k}.at[v]" for k in outputs}) for line in writer.each]
        lines += ["}", *(f"*(Quad<{STORAGE[flat[k]]}>*)(x{k} + k) = r{k};" for k in outputs), "}"]
    lines.append(f"for (long long k = {start} + THREAD; k < last; k += THREADS) {{")
    lines += [_loaded(flat[k], k, f"x{k}[k]") for k in read]
    lines += [_placed(line, {k: f"x{k}[k]" for k in outputs}) for line in writer.each]
    lines += ["}", "}"]
    return named("\n".join(lines), device)


def slots_read(program: UpdateProgram) -> list[int]:
    """The flat slots that the kernel reads."""
    writer = _Writer(program)
    writer.run()
    return writer.read


def _loaded(dtype: ir.DataType, slot: int, place: str) -> str:
    return f"const {compute_type(dtype)} i{slot} = {expressions.load(dtype, place)};"


def _placed(line: str, places: Mapping[int, str]) -> str:
    """The statement with its result stored in the right place."""
    found = re.match(r"o(\d+)\b", line)
    return line if found is None else places[int(found[1])] + line[found.end() :]

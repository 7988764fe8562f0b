"""Counts, from a generated kernel's text and accesses, bytes moved, bytes in flight and instructions."""

from __future__ import annotations

import re

import onnx_ir as ir

from graphc.backends.cupy.codegen.launch_shape import Shape, batch
from graphc.backends.cupy.predict.hardware import SECTOR
from graphc.backends.fusion.kernel_source import Access, KernelSource
from graphc.backends.fusion.op_kernels import OP_KERNELS
from graphc.ir.facts import dtype_of, size_of

CACHED = 25 << 20
"""Bytes that stay in the L2 cache between loops over the columns: half of an H200's."""

RANDOM = {"philox_words": 60 / 4, "philox_word": 75}
"""Instructions per random word: one of a block of four, where multiplications count twice, or a single one."""

COSTLY = {
    r"\b(?:exp|log)f?\(": 12,
    r"\btanhf\(": 24,
    r"\berff\(": 24,
    r" / ": 9,
    r"sqrtf?\(": 8,
    r"add_exponential": 7,
    r"FAST_EXP\(": 2,
    **{rf"\b{name}\(": count for kernel in OP_KERNELS.values() for name, count in kernel.instructions.items()},
}
"""C text that takes more than one instruction → their number, as read from compiled kernels."""

SPARE = 28
"""Registers of a thread besides those that hold loads, as compiled kernels show."""


def traffic(source: KernelSource, parts: int = 1) -> int:
    """Bytes that a kernel moves between memory and its threads.

    Repeated reads by several loops over the columns count once if the rows in progress stay in the cache. So do overlapping
    reads of one loop in the same order, such as those of a window: neighbours hit each other's lines.
    """
    if not source.traffic:
        return source.moved or sum(nbytes(v) for v in source.operands)
    total = sum(source.partial_bytes(parts)) * (2 if source.finishes else 1)
    seen: dict[tuple[ir.Value, object], int] = {}
    walked: dict[tuple[ir.Value, int, tuple[str, ...]], int] = {}
    for access in source.traffic:
        again = seen.get((access.value, access.offset), 0)
        moved = _moved_by(access, source)
        if again and moved * min(1.0, 264 / max(1, source.rows)) < CACHED:
            moved //= 4  # from the cache
        order = tuple(dict.fromkeys(variable.name for variable, _ in access.offset.variables()))
        before = walked.get((access.value, access.loop, order), 0)
        if before and not again:
            moved = min(moved, max(0, nbytes(access.value) - before))
        walked[access.value, access.loop, order] = before + moved
        seen[access.value, access.offset] = again + 1
        total += moved
    return total


def _moved_by(access: Access, source: KernelSource) -> int:
    itemsize = int(access.value.dtype.itemsize) if access.value.dtype is not None else 4
    walked = source.rows * (max(1, source.columns) if access.inner else 1)
    distinct, found = 1, 1
    steps: dict[str, int] = {}
    for variable, coefficient in access.offset.variables():
        if variable.name not in steps and variable.name[0] in "rc":
            distinct *= variable.size
        elif variable.name not in steps:
            found *= variable.size  # an index that was read from memory
        steps[variable.name] = min(abs(coefficient) or 1, steps.get(variable.name, 1 << 30))
    if not any(name[0] == "r" for name in steps):
        distinct *= found
    distinct = min(walked, distinct, size_of(access.value))
    if distinct <= 1 << 10:
        return distinct * itemsize
    wanted = source.form.variable
    near = wanted is None or steps.get(wanted.name) in (1, None) or wanted.size == source.form.vector
    looped = any(step == 1 and name[0] in "rc" for name, step in steps.items())
    if not looped:  # scattered elements
        return min(distinct * SECTOR, nbytes(access.value))
    return distinct * itemsize * (1 if near else 4)  # the rest of a line is usually in the cache, for other threads


def in_flight(source: KernelSource, shape: Shape) -> int:
    """Bytes that a thread requests before it waits for one of them, if the compiler keeps the order of the text."""
    read = set(source.operands[: source.reads])
    large = [access for access in source.traffic if access.value in read and size_of(access.value) > max(1, source.columns)]
    main = [access for access in large if access.inner] or large
    first = min((access.loop for access in main), default=0)
    vector = source.form.vector
    once = sum(int(dtype_of(a.value).itemsize) * (vector if a.whole else 1) for a in main if a.loop == first)
    if source.form.strided:
        return once * batch(source)
    if source.columns > 1 and shape.lanes > 1:
        chunks = -(-source.columns // (shape.lanes * vector * shape.splits))
        return once * min(chunks, 8 if source.form.held else 2)
    return once


def resident_threads(source: KernelSource, shape: Shape, multiprocessors: int, most: int) -> int:
    """Threads of a multiprocessor that run at once, by a guess of their registers."""
    registers = SPARE + in_flight(source, shape) // 4 + (2 * source.form.vector if source.columns > 1 else 0)
    blocks = min(most // shape.threads, (1 << 16) // (registers * shape.threads), -(-shape.blocks // multiprocessors))
    return max(1, blocks) * shape.threads


def adds_partials(source: KernelSource) -> bool:
    """Whether this is the second half of a divided sum, which adds up the partial totals."""
    return "PARTS" in source.body and not source.finishes


def instructions(source: KernelSource) -> float:
    """Estimated instructions per element; a value shared by a vector is computed once."""
    form = source.form
    drawn = set(re.findall(r"(philox_words?)\b(.*?)\)[;, ]", source.body))  # equal draws are shared
    total = float(sum(RANDOM[name] for name, _ in drawn))
    varying = {form.variable.name} if form.variable is not None else set()
    for line in source.body.partition("is_last(")[0].splitlines():
        found = re.match(r"const \w+ (\w+) = (.*);|(s\d+)(?:\[v\])? = (.*);|(add_exponential.*)", line)
        if found is None or line.startswith("const Pack"):
            continue
        text = found[2] or found[4] or found[5]
        count = 1 + sum(many * len(re.findall(pattern, text)) for pattern, many in COSTLY.items())
        varies = not varying or ".at[v]" in text or not varying.isdisjoint(re.findall(r"\w+", text)) or found[2] is None
        if varies and found[1]:
            varying.add(found[1])
        total += count if varies or form.vector == 1 else count / form.vector
    return total


def nbytes(value: ir.Value) -> int:
    """Bytes of a value with a static shape."""
    return int(size_of(value) * dtype_of(value).itemsize)

"""Lets kernels write their results in place of operands that nothing reads afterwards.

    before   d = (exp(x − max) ÷ Σ − hot) · dy      x and d side by side; for logits, two gigabytes each
    after    the same kernel, with d in x's memory  d is an alias of x

A kernel may write over an operand when each thread reads an element before it writes the one in its place, and no thread reads
another's: both places are the same function of the loop variables, and in a row that several threads share, both are
accessed by column. What a row picks, such as its label's logit, is read before, and its threads meet in between. Such a
kernel makes no aliasing promise about these two arrays (no ``__restrict__``, no loads through the read-only cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from graphc.backends.cupy.codegen.launch_shape import render
from graphc.backends.cupy.segment.program import Call, KernelCall, reads, writes
from graphc.backends.fusion.indexing import Linear, Variable
from graphc.ir.facts import dtype_of, size_of

PLAIN, CHANGING = "load_pack", "load_changing"
"""Functions of the prelude that load a vector."""


def overwrite(
    graph: ir.Graph, calls: Sequence[Call], aliases: Mapping[ir.Value, ir.Value], *, device: bool
) -> tuple[list[Call], dict[ir.Value, ir.Value]]:
    """Return ``calls`` and ``aliases`` (value → the value whose memory it uses) with results in place of operands.

    Args:
        device: see :func:`.launch_shape.render`.
    """
    found, known = list(calls), dict(aliases)
    fixed = {*graph.inputs, *graph.outputs}

    def base(value: ir.Value) -> ir.Value:
        while value in known:
            value = known[value]
        return value

    last = {base(v): k for k, call in enumerate(calls) for v in (*reads(call), *writes(call))}
    made: set[ir.Value] = set()
    for k, call in enumerate(calls):
        free = {v for v in map(base, reads(call)) if v in made and v not in fixed and last[v] == k}
        for result in writes(call):
            target = base(result)
            if isinstance(call, KernelCall) and target is result and not {target} & (fixed | made):
                given = next((v for v in reads(call) if base(v) in free and _same_places(call, v, result)), None)
                if given is not None and _same_size(base(given), result):
                    free.discard(base(given))
                    last[base(given)] = last[result]
                    known[result] = base(given)
                    call = found[k] = _changing(call, given, result, device)
            made.add(base(result))
    return found, known


def _same_size(one: ir.Value, other: ir.Value) -> bool:
    return dtype_of(one) == dtype_of(other) and size_of(one) == size_of(other)


def _same_places(call: KernelCall, operand: ir.Value, result: ir.Value) -> bool:
    """Whether the thread that writes an element of ``result`` is the only one that reads the same element of ``operand``."""
    source = call.source
    if not _same_size(operand, result) or (source.form.strided and source.rows % call.shape.span):
        return False  # threads beyond the last strided row repeat its work
    read = [access for access in source.traffic if access.value is operand]
    written = [access for access in source.traffic if access.value is result]
    if "SYNC" in source.body:  # then what a row picked of its own before the loop that writes, its threads have all read
        read = [a for a in read if a.inner or any(a.loop >= w.loop or not _in_row_of(a.offset, w.offset) for w in written)]
    places = {access.offset for access in (*read, *written)}
    elements = source.form.along == "rows" and not source.form.strided
    return bool(read and written) and len(places) == 1 and all(elements or access.inner for access in (*read, *written))


def _in_row_of(picked: Linear, written: Linear) -> bool:
    """Whether an element that is read once a row lies among those that the loop over the columns of that row writes."""
    columns, picks = set(written.terms) - set(picked.terms), set(picked.terms) - set(written.terms)
    if len(columns) != 1 or picked.constant != written.constant:
        return False
    [(column, step)] = columns
    return (
        isinstance(column, Variable)
        and all(isinstance(index, Variable) and index.size <= column.size and each == step for index, each in picks)
        and len(picks) <= 1
    )


def _changing(call: KernelCall, operand: ir.Value, result: ir.Value, device: bool) -> KernelCall:
    """The call with a kernel that allows ``operand`` to change."""
    source = call.source
    start, end = source.body.index("("), source.body.index(")")
    parameters, body = source.body[start + 1 : end].split(", "), source.body[end:]
    for value in (operand, result):
        at = source.operands.index(value)
        parameters[at] = parameters[at].replace("* RESTRICT ", "* ")
    name = parameters[source.operands.index(operand)].split()[-1]
    body = body.replace(f"{PLAIN}<VECTOR>({name} +", f"{CHANGING}<VECTOR>({name} +")
    source = replace(source, body=source.body[: start + 1] + ", ".join(parameters) + body)
    name, text = render(source, call.shape, device=device, parts=call.parts)
    return replace(call, source=source, name=name, text=text)

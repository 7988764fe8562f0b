"""What all ranks must have in common before the first step, compared once and named where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

import graphc
from graphc.compiler import Program
from graphc.errors import WorldError
from graphc.frontends import files_of
from graphc.ir.facts import dims
from graphc.runtime.communicator import Communicator


def check_programs(communicator: Communicator, program: Program) -> None:
    """Check that all ranks run one version of graphc on one model file with one pipeline; every rank calls it.

    Raises:
        WorldError: on every rank, naming the first thing that differs and two ranks that differ in it.
    """
    if communicator.size == 1:
        return
    path, digest = _model_file(program.original)
    everyone = communicator.allgather_object((graphc.__version__, path, digest))
    _compare("versions of graphc", [version for version, _, _ in everyone], [version for version, _, _ in everyone])
    shown = [f"{path} (sha256 {digest[:12]}…)" for _, path, digest in everyone]
    digests = [digest for _, _, digest in everyone]
    if all(digests):  # models made in memory have no file; their graphs are compared below
        _compare("model files", digests, shown)
    agree(communicator, _signature(program), "program")


def _compare(what: str, values: Sequence[str], shown: Sequence[str]) -> None:
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise WorldError(f"the ranks have different {what}: {shown[0]} on rank 0 and {shown[other]} on rank {other}")


def _model_file(model: ir.Model) -> tuple[str, str]:
    """The path of the model's file, and a SHA-256 over it and the files of its tensors; empty for a model without one."""
    files = files_of(model)
    digest = hashlib.sha256()
    try:
        for file in files:
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError:  # moved away since it was read
        return "", ""
    return (str(Path(files[0])), digest.hexdigest()) if files else ("", "")


def _signature(program: Program) -> list[str]:
    graph = program.model.graph
    lines = [f"pipeline {program.pipeline}"]
    lines += [f"input {v.name} {v.dtype}" for v in graph.inputs]
    lines += [f"state {n} {v.dtype} {dims(v)}" for n, v in sorted(graph.initializers.items())]
    return lines


def agree(communicator: Communicator, entries: Sequence[str], what: str) -> None:
    """Check that all ranks hold the same list, for example their sequence of collectives.

    Only a hash travels while they agree.

    Raises:
        WorldError: on every rank, naming the first entry that differs and two ranks that differ in it.
    """
    mine = list(entries)
    digests = communicator.allgather_object(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    lists = communicator.allgather_object(mine)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, second = lists[0], lists[other]
    shared = min(len(first), len(second))
    index = next((k for k in range(shared) if first[k] != second[k]), shared)
    shown = [repr(entries[index]) if index < len(entries) else "nothing" for entries in (first, second)]
    raise WorldError(f"the ranks disagree on {what}: entry {index} is {shown[0]} on rank 0 and {shown[1]} on rank {other}")

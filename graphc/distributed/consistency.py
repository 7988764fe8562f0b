"""What all ranks must have in common before the first step, compared once and named where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

import graphc
from graphc.compiler import Program
from graphc.distributed.communicator import Communicator
from graphc.errors import WorldError
from graphc.frontends import files_of
from graphc.ir.declare import SHARD
from graphc.ir.facts import dims, is_float, state_updates
from graphc.parameter_server.split import server_options
from graphc.runtime.state import averaged_states, local_states


def check_programs(communicator: Communicator, program: Program, backend: str) -> None:
    """Check that all ranks run one version of graphc on one model file with one pipeline; every rank calls it.

    Args:
        backend: what this rank computes on.

    Raises:
        WorldError: on every rank, naming the first thing that differs and two ranks that differ in it.
    """
    if communicator.size == 1:
        return
    path, digest = _model_file(program.original)
    everyone = communicator.allgather_object((graphc.__version__, path, digest, backend))
    versions, _, digests, backends = zip(*everyone, strict=True)
    _compare("versions of graphc", versions, versions)
    if all(digests):  # models made in memory have no file; their graphs are compared below
        _compare("model files", digests, [f"{path} (sha256 {digest[:12]}…)" for _, path, digest, _ in everyone])
    other = next((rank for rank, name in enumerate(backends) if name != backends[0]), None)
    if other is None:
        agree(communicator, _signature(program), "program")
        return
    mixed = f"rank 0 computes on {backends[0]!r} and rank {other} on {backends[other]!r}"
    try:
        agree(communicator, _signature(program), "program")
    except WorldError as error:
        raise WorldError(f"{mixed}, which keep other state for it, as copies in low precision are: {error}") from error
    shared = updated_by_all(program.model.graph)
    if shared:
        raise WorldError(
            f"{mixed}, which round otherwise: their copies of {shared!r}, which every rank updates, would drift apart. Give"
            " all workers one backend, or let each value be updated by one of them: strategy='zero:stage=1' or"
            " 'central_storage'"
        )


def updated_by_all(graph: ir.Graph) -> str:
    """Some float state that every rank updates for itself, and that has to be equal on all of them; "" where there is none."""
    if server_options(graph) is not None:
        return ""
    apart = {*averaged_states(graph), *local_states(graph)}
    for node, state, _ in state_updates(graph):
        shared = is_float(state) and not node.attributes.get_string(SHARD, "")
        if shared and (state.name or "") not in apart:
            return state.name or ""
    return ""


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

"""Checks before the first step that all ranks run the same program."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx_ir as ir

import graphc
from graphc.compiler import Program
from graphc.distributed.communicator import Communicator
from graphc.distributed.consistency import agree, require_equal
from graphc.errors import WorldError
from graphc.frontends import files_of
from graphc.ir.declare import SHARD
from graphc.ir.facts import dims, is_float, state_updates
from graphc.ir.ops.parameter_server import server_options
from graphc.runtime.state import averaged_states, local_states


def check_programs(communicator: Communicator, program: Program, backend: str) -> None:
    """Check that all ranks run the same graphc version, model file and pipeline; every rank calls it.

    Args:
        backend: name of this rank's backend.

    Raises:
        WorldError: on every rank; names the first difference and two ranks that differ.
    """
    if communicator.size == 1:
        return
    path, digest = _model_file(program.original)
    everyone = communicator.allgather_object((graphc.__version__, path, digest, backend))
    versions, _, digests, backends = zip(*everyone, strict=True)
    require_equal("versions of graphc", versions, versions)
    if all(digests):  # in-memory models have no file; their graphs are compared below
        require_equal("model files", digests, [f"{path} (sha256 {digest[:12]}…)" for _, path, digest, _ in everyone])
    other = next((rank for rank, name in enumerate(backends) if name != backends[0]), None)
    if other is None:
        agree(communicator, _signature(program), "program")
        return
    mixed = f"rank 0 computes on {backends[0]!r} and rank {other} on {backends[other]!r}"
    try:
        agree(communicator, _signature(program), "program")
    except WorldError as error:
        raise WorldError(f"{mixed}, and these backends keep different state (low-precision copies, say): {error}") from error
    shared = updated_by_all(program.model.graph)
    if shared:
        raise WorldError(
            f"{mixed}. They round differently, so their copies of {shared!r}, which every rank updates, drift apart. Give"
            " all workers one backend, or let one worker update each value: strategy='zero:stage=1' or 'central_storage'"
        )


def updated_by_all(graph: ir.Graph) -> str:
    """Name a float state that every rank updates itself and that must stay equal on all ranks; "" if none."""
    if server_options(graph) is not None:
        return ""
    per_rank = {*averaged_states(graph), *local_states(graph)}
    for node, state, _ in state_updates(graph):
        shared = is_float(state) and not node.attributes.get_string(SHARD, "")
        if shared and (state.name or "") not in per_rank:
            return state.name or ""
    return ""


def _model_file(model: ir.Model) -> tuple[str, str]:
    """Path of the model's file, and SHA-256 of it and its external data; both empty for an in-memory model."""
    files = files_of(model)
    digest = hashlib.sha256()
    try:
        for file in files:
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    except OSError:  # the file was moved after it was read
        return "", ""
    return (str(Path(files[0])), digest.hexdigest()) if files else ("", "")


def _signature(program: Program) -> list[str]:
    """Describe a program's pipeline, inputs and state, one line each."""
    graph = program.model.graph
    lines = [f"pipeline {program.pipeline}"]
    lines += [f"input {v.name} {v.dtype}" for v in graph.inputs]
    lines += [f"state {n} {v.dtype} {dims(v)}" for n, v in sorted(graph.initializers.items())]
    return lines

"""Writes a training graph for other runtimes, in standard ONNX ops only.

standard_model   one graph; state s is an initializer and an optional input, its next value is output "s::next"
training_info    the inference model, and beside it a TrainingInfoProto: initialization, algorithm, update bindings
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from graphc.errors import ModelError, UnsupportedOpError
from graphc.frontends.writing import atomic_write, write_standard_output
from graphc.ir.builder import Builder, used_names
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import array_of, dims, dtype_of, state_updates, static_dims
from graphc.ir.names import RESERVED
from graphc.ir.serialize import to_proto
from graphc.pipeline import PASSES, Context, PassCall, run

if TYPE_CHECKING:
    from graphc.compiler import Program

NEXT = "::next"
"""Suffix of the output that holds the next value of a state."""

_MOST_BYTES = 2_000_000_000
"""Largest size of a protobuf message (2 GiB), rounded down."""


def standard_model(model: ir.Model) -> ir.Model:
    """A training graph in standard ONNX ops only, for any runtime.

    State, the learning rate and the other reserved scalars stay initializers but are listed as graph inputs too, so that a
    caller may feed them; the next value of state ``s`` is output ``"s::next"``. Collectives become identities: the graph is
    that of one worker. Symbolic dimensions stay symbols.

    Raises:
        UnsupportedOpError: an op without a standard form, or one whose standard form needs a shape that is not known.
    """
    copy = model.clone()
    graph = copy.graph
    op = Builder(graph)
    for _, state, value in list(state_updates(graph)):
        if value.is_graph_output():  # two states with one next value
            (value,) = op.emit("Identity", [value])
        if value.name != f"{state.name}{NEXT}":
            value.name = op.unique(f"{state.name}{NEXT}", value=True)
        graph.outputs.append(value)
        graph.inputs.append(state)
    graph.inputs.extend(v for name, v in graph.initializers.items() if name in RESERVED and v not in graph.inputs)
    _decompose(graph)
    PASSES["simplify"].function(copy, Context())
    return copy


def _decompose(graph: ir.Graph) -> None:
    try:
        decompose_graph(graph, lambda node: False)
    except UnsupportedOpError as error:
        if all(static_dims(value) is not None for value in graph.inputs):
            raise
        symbols = [f"{v.name}{list(dims(v) or ())}" for v in graph.inputs if static_dims(v) is None]
        raise UnsupportedOpError(
            f"{error}\nSome sizes are symbols: {', '.join(symbols)}; compile for a fixed batch with --batch N (batch=N)"
        ) from None


def training_info(program: Program) -> onnx.ModelProto:
    """The inference model of ``program`` with ONNX's training information.

    ``graph`` is the model itself, legalised and in inference mode, with its weights. ``training_info[0].algorithm`` is the
    training step in standard ops: its own nodes read inputs and weights of the inference graph by name; labels are its
    inputs, optimizer state and counters its initializers. ``update_binding`` says which output is the next value of which
    initializer. ``initialization`` sets optimizer state back to where it starts; for weights their initializers say that.

    Raises:
        UnsupportedOpError: as for :func:`standard_model`.
    """
    inference = program.original.clone()
    run(inference, [*program.imports, PassCall("inference_mode")])
    _decompose(inference.graph)
    PASSES["simplify"].function(inference, Context())
    training = standard_model(program.model)
    bindings = [(state.name or "", out) for state, out in _pairs(training.graph)]
    _make_names_unique(training.graph, inference.graph)
    main = to_proto(inference)
    step = to_proto(training).graph
    known = {v.name for v in main.graph.input} | {t.name for t in main.graph.initializer}
    held = {t.name for t in step.initializer}

    info = main.training_info.add()
    info.algorithm.name = f"{main.graph.name or 'model'}.training"
    info.algorithm.node.extend(step.node)
    info.algorithm.value_info.extend(step.value_info)
    info.algorithm.output.extend(step.output)
    info.algorithm.input.extend(v for v in step.input if v.name not in known | held)
    info.algorithm.initializer.extend(t for t in step.initializer if t.name not in known)
    for name, out in bindings:
        info.update_binding.add(key=name, value=out.name or "")
    own = {t.name for t in info.algorithm.initializer}
    _write_initialization(info, {s for s, _ in bindings if s in own}, training.graph)
    imports = {entry.domain for entry in main.opset_import}
    main.opset_import.extend(e for e in to_proto(training).opset_import if e.domain not in imports)
    return main


def _pairs(graph: ir.Graph) -> list[tuple[ir.Value, ir.Value]]:
    """(state, next value) pairs of a standard training graph."""
    outputs = {value.name: value for value in graph.outputs}
    states = (v for v in graph.initializers.values() if f"{v.name}{NEXT}" in outputs)
    return [(state, outputs[f"{state.name}{NEXT}"]) for state in states]


def _make_names_unique(graph: ir.Graph, other: ir.Graph) -> None:
    """Rename nodes and results of ``graph`` whose names ``other`` uses: both become parts of one graph."""
    op, (values, nodes) = Builder(graph), used_names(other)
    for node in graph.all_nodes():
        if node.name in nodes:
            node.name = op.unique(f"training/{node.name}")
        for value in node.outputs:
            if value.name in values:
                value.name = op.unique(f"training/{value.name}", value=True)


def _write_initialization(info: onnx.TrainingInfoProto, states: set[str], graph: ir.Graph) -> None:
    """Build the graph that makes the first values of ``states`` that hold one repeated number, and its bindings."""
    target = info.initialization
    target.name = f"{info.algorithm.name}.initialization"
    for name in sorted(states):
        initializer = graph.initializers[name]
        array = array_of(initializer)
        if array.size == 0 or (array != array.flat[0]).any():
            continue  # its initializer holds the first value
        out = f"{name}::first"
        shape = onnx.numpy_helper.from_array(np.array(array.shape, dtype=np.int64))
        fill = onnx.numpy_helper.from_array(array.reshape(-1)[:1])
        target.node.append(onnx.helper.make_node("Constant", [], [f"{out}.shape"], name=f"{out}.shape", value=shape))
        target.node.append(onnx.helper.make_node("ConstantOfShape", [f"{out}.shape"], [out], name=out, value=fill))
        target.output.append(onnx.helper.make_tensor_value_info(out, int(dtype_of(initializer)), list(array.shape)))
        info.initialization_binding.add(key=name, value=out)


def save_proto(proto: onnx.ModelProto, path: str) -> None:
    """Write ``proto`` to ``path`` (``"-"``: standard output), whole or not at all.

    Raises:
        ModelError: the file cannot be written, or the message is too large for one file.
    """
    size = proto.ByteSize()
    if size > _MOST_BYTES:
        raise ModelError(
            f"a model with training information must fit into one file of 2 GB, this one has {size:,} bytes; "
            "write it with --standard alone, which puts the weights into a file of their own"
        )
    data = proto.SerializeToString(deterministic=True)
    if path == "-":
        write_standard_output(data)
        return
    with atomic_write(Path(path)) as file:
        file.write(data)

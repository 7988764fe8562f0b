"""Inference: runs a model once through graphc's own plan and backend.

    legalize ─► simplify ─► plan ─► executor       tensors whose shapes follow from the feeds'
                       └─► the backend, whole      sequences, optionals, strings, shapes that depend on data

A file of a newer opset runs unchanged if one of its ops cannot be expressed in the legal opset.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc import frontends
from graphc.backend import Backend, make_backend
from graphc.compiler import ModelSource
from graphc.distributed.world import available_cores, usable_cores
from graphc.errors import DataDependentShapeError, FeedError, GraphcError, NewerOpsetError, nearest
from graphc.ir.bound_inputs import bind_inputs, choices
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import dims
from graphc.ir.serialize import to_proto
from graphc.options import ReadOptions
from graphc.pipeline import PassCall, run
from graphc.plan.partition import make_plan
from graphc.plan.specialise import specialise
from graphc.runtime.executor import Executor
from graphc.runtime.state import State

Feed: TypeAlias = "Any"
"""A numpy array; a list of arrays for a sequence; None for an optional without a value."""


def run_model(
    model: ModelSource,
    feeds: Mapping[str, Feed],
    backend: str = "auto",
    *,
    threads: int | None = None,
    max_model_bytes: int | None = None,
    external_data: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Compute the outputs of ``model`` for ``feeds``, in the mode in which the file was saved.

    Args:
        model: path, ``onnx.ModelProto`` or ``onnx_ir.Model``.
        feeds: one array per graph input, of its element type (``ml_dtypes`` for types that numpy lacks, ``object`` for
            strings); a list of arrays for a sequence, None for an empty optional. An input with an initializer may be
            omitted.
        backend: ``"auto"``, or a name that ``graphc backends`` lists.
        threads: threads of the backend; None: all cores that this process may use.
        max_model_bytes, external_data: as for :func:`graphc.compile`.

    Returns:
        Output name → array, or list of arrays for a sequence, or None for an empty optional.

    Raises:
        FeedError: a feed with a wrong name, shape or dtype.
    """
    original = frontends.load(model, reading=ReadOptions(max_model_bytes=max_model_bytes, external_data=external_data))
    given = _check_feeds(original.graph, feeds)
    engine = make_backend(backend, threads=threads or available_cores())
    engine.use_cores(usable_cores())
    try:
        legal = original.clone()
        _fed_initializers_are_inputs(legal.graph, given)
        known = {value.name or "": dims(value) for value in choices(legal.graph)}
        fitting = [name for name, shape in known.items() if name in given and np.shape(given[name]) == shape]
        bind_inputs(legal, {name: given[name] for name in fitting}, {}, {})
        try:
            run(legal, [PassCall("legalize"), PassCall("draws", {"seed": secrets.randbits(63)}), PassCall("simplify")])
        except NewerOpsetError:
            return _run_whole(engine, original.clone(), given)
        wanted = [value.name or "" for value in legal.graph.inputs]
        given = {name: given[name] for name in wanted}
        if _is_plannable(legal.graph):
            try:
                shapes = {name: np.shape(given[name]) for name in wanted}
                plan = make_plan(legal, shapes, engine)
            except DataDependentShapeError:
                pass  # runs whole, below
            else:
                executor = Executor(plan, State(legal, memory=engine.memory), engine)
                try:
                    executor.run(given)
                except RuntimeError as error:
                    fed = ", ".join(f"{name} {list(np.shape(given[name]))}" for name in wanted)
                    raise GraphcError(f"the model failed in the runtime, with the feeds {fed}: {error}") from error
                return {name: array.copy() for name, array in executor.outputs.items()}
        if any(node.op_type == "LateGradient" for node in legal.graph):
            legal = specialise(legal, {name: np.shape(given[name]) for name in wanted})
            run(legal, [PassCall("late_gradients")])
        decompose_graph(legal.graph, lambda node: False)
        return _run_whole(engine, legal, given)
    finally:
        engine.close()


def _check_feeds(graph: ir.Graph, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """Convert the feeds for the backend; check that each names an input and that no input is missing."""
    wanted = {value.name or "": value for value in graph.inputs}
    required = [name for name, value in wanted.items() if not value.is_initializer()]
    for name in feeds:
        if name not in wanted:
            raise FeedError(f"there is no input {name!r}{nearest(name, wanted)}; the inputs are {', '.join(required)}")
    for name in required:
        if name not in feeds:
            raise FeedError(f"the feed {name!r} is missing; the inputs are {', '.join(required)}")
    return {name: _check_feed(wanted[name], feed) for name, feed in feeds.items()}


def _check_feed(value: ir.Value, feed: Feed) -> Feed:
    type_ = value.type
    if isinstance(type_, ir.OptionalType):
        if feed is None:
            return None
        type_ = type_.elem_type
    if isinstance(type_, ir.SequenceType):
        if not isinstance(feed, (list, tuple)):
            raise FeedError(f"feed {value.name!r} is {type(feed).__name__}, the model wants a list of arrays")
        return [_check_array(value.name or "", type_.elem_type, item) for item in feed]
    return _check_array(value.name or "", type_, feed)


def _check_array(name: str, type_: ir.TypeProtocol | None, feed: Feed) -> Feed:
    if feed is None:
        raise FeedError(f"feed {name!r} is None, the model wants a tensor")
    array = np.asarray(feed)
    if not isinstance(type_, ir.TensorType):
        return array
    if type_.dtype == ir.DataType.STRING:
        if array.dtype.kind not in "OSU":
            raise FeedError(f"feed {name!r} is {array.dtype}, the model wants strings")
        return array.astype(object)
    if array.dtype != type_.dtype.numpy():
        raise FeedError(f"feed {name!r} is {array.dtype}, the model wants {type_.dtype.numpy()}")
    return array


def _fed_initializers_are_inputs(graph: ir.Graph, feeds: Mapping[str, Feed]) -> None:
    """Replace initializers that are also inputs (defaults) by their feeds."""
    for value in graph.inputs:
        if value.is_initializer() and value.name in feeds:
            del graph.initializers[value.name or ""]
            value.const_value = None


def _is_plannable(graph: ir.Graph) -> bool:
    """Whether every value is a tensor of a fixed-size element type, so that buffers can be planned."""
    values = [*graph.inputs, *graph.outputs, *(v for node in graph for v in node.outputs if v.name)]
    return all(isinstance(v.type, ir.TensorType) and v.dtype != ir.DataType.STRING for v in values)


def _run_whole(engine: Backend, model: ir.Model, feeds: Mapping[str, Feed]) -> dict[str, Any]:
    """Run the whole graph in the backend, which allocates buffers as it runs.

    Initializers are fed as arrays: weights inside a protobuf message would be copied and limited to 2 GiB.
    """
    graph, arrays = model.graph, dict(feeds)
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or value.is_graph_output():
            continue
        if name not in arrays:
            arrays[name] = np.asarray(tensor.numpy())
        value.type, value.shape, value.const_value = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy()), None
        del graph.initializers[name]
        if value not in graph.inputs:
            graph.inputs.append(value)
    return engine.bind_whole(to_proto(model))(arrays)

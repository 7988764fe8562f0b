"""Reads ONNX files with helpful errors and writes them back, whole, with trained values.

model = load("model.onnx")                          # a path, "-", onnx.ModelProto or onnx_ir.Model
trained = write_back(model, {"conv.weight": w})     # the user's own file with new values
save(trained, "trained.onnx")
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import google.protobuf.message
import numpy as np
import onnx
import onnx_ir as ir

from graphc.atomic_files import open_regular
from graphc.errors import ModelError, UnsupportedOpError, UsageError, nearest
from graphc.frontends import wire
from graphc.frontends.exporter_folding import restore
from graphc.frontends.external_data import Folders, bind_external, named_folders
from graphc.frontends.requantize import requantize
from graphc.frontends.sparse import with_dense_tensors
from graphc.frontends.tensors import check_inline, inner_tensors
from graphc.frontends.texts import check_texts
from graphc.frontends.wellformed import check_wellformed
from graphc.frontends.writing import APART, atomic_write, came_with_data, save
from graphc.ir import DOMAIN
from graphc.ir.decomposition import decompose_graph
from graphc.ir.exporter_records import recorded_kinds
from graphc.ir.infer import propagate
from graphc.ir.model_bytes import set_limit
from graphc.ir.quantized import Quantized
from graphc.ir.subgraphs import body_constants, body_initializers
from graphc.ir.text import from_text
from graphc.ir.toposort import silent_reader, sort_and_link
from graphc.ir.unknown_sizes import forget_unknown_sizes
from graphc.options import ReadOptions

Source: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"

TEXT = ".onnxtxt"
"""Suffix of files in ONNX text syntax."""

FILE = "graphc.file"
"""Entry of ``ir.Model.meta``: the path that the model was read from."""

_AS_USUAL = ReadOptions()

_OPSETS = 2**31
"""Numbers of operator sets are smaller."""

_SIGNATURES = (
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch or Keras checkpoint; export the model to ONNX first"),
    (b"\x89HDF", "an HDF5 file, perhaps Keras weights; export the model to ONNX first"),
    (b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (b"\x80\x02", "a Python pickle; export the model to ONNX first"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself; run 'git lfs pull'"),
)


def load(source: Source, reading: ReadOptions = _AS_USUAL) -> ir.Model:
    """Read a model.

    Args:
        source: a path, ``"-"`` for standard input, or a model already in memory (an ``onnx_ir.Model`` is returned as it is,
            or copied where its exporter recorded what it merged and folded).
        reading: how much the constants may take, and where external data may lie.

    More than a megabyte of weights stays in the file, and is read when somebody asks for it: the file may be deleted or
    replaced meanwhile, but not overwritten. External data is memory-mapped, not copied. It must lie in the folder of the model,
    or in a folder of ``reading``.

    Raises:
        UsageError: nothing that is or names a model.
        ModelError: no such file, no ONNX model, truncated, newer than this graphc knows, or external data that is
            missing, too short or outside the model's folder.
    """
    model = _load(source, reading)
    set_limit(model, reading.max_model_bytes)
    return model


def _load(source: Source, reading: ReadOptions) -> ir.Model:
    if isinstance(source, ir.Model):
        sort_and_link(source.graph)
        if recorded_kinds(source.graph):
            source = source.clone()
            restore(source.graph)
        return source
    if isinstance(source, onnx.ModelProto):
        return _from_proto(source, "the given ModelProto", Folders(named=named_folders(reading.external_data)))
    if not isinstance(source, str | os.PathLike):
        raise UsageError(
            f"a model is a path, an onnx.ModelProto, an onnx_ir.Model or a torch.nn.Module, not {_kind(source)};"
            " onnx.load_model_from_string reads bytes"
        )
    if os.fspath(source) == "-":
        folders = Folders(named=named_folders(reading.external_data))
        return _from_bytes(sys.stdin.buffer.read(), "standard input", folders)
    path = Path(source)
    if not os.fspath(source).strip():
        raise UsageError("the name of the model is empty")
    try:
        with open_regular(path) as opened:
            file = wire.OpenFile(str(path), opened.fileno())
            data = opened.read()
    except FileNotFoundError:
        near = [p.name for p in path.parent.glob("*.onnx")] if path.parent.is_dir() else []
        raise ModelError(f"no such file: {path}{nearest(path.name, near)}") from None
    except IsADirectoryError:
        raise ModelError(f"{path} is a folder; name the .onnx file in it") from None
    except (OSError, ValueError) as error:  # a name with a NUL character is a ValueError
        raise ModelError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except MemoryError:
        raise ModelError(f"cannot read {path}: it does not fit into memory") from None
    folders = Folders.of(path, reading.external_data)
    model = _from_text(data, str(path), folders) if path.suffix == TEXT else _from_bytes(data, str(path), folders, file)
    model.meta[FILE] = str(path.absolute())
    return model


def _kind(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"


def files_of(model: ir.Model) -> list[str]:
    """The file a model was read from and those of its external tensors, in a fixed order; empty for any other model."""
    if FILE not in model.meta:
        return []
    tensors = (value.const_value for value in model.graph.initializers.values())
    return [model.meta[FILE], *sorted({str(t.path) for t in tensors if isinstance(t, ir.ExternalTensor)})]


def _from_bytes(data: bytes, where: str, folders: Folders, file: wire.OpenFile | None = None) -> ir.Model:
    if not data:
        raise ModelError(f"{where} is empty")
    for signature, meaning in _SIGNATURES:
        if data.startswith(signature):
            raise ModelError(f"{where} is no ONNX model: it is {meaning}")
    proto = onnx.ModelProto()
    small, apart = wire.cut(data)
    try:
        proto.ParseFromString(small)
    except google.protobuf.message.DecodeError:
        if _is_text(data):
            raise ModelError(f"{where} is no ONNX model: it is a text file; a binary .onnx file is expected") from None
        kind = "is truncated or damaged; copy or export it again" if data[:1] == b"\x08" else "is no ONNX model"
        raise ModelError(f"{where} {kind} ({len(data)} bytes do not parse as a protobuf)") from None
    like = {k: ir.serde.deserialize_tensor(proto.graph.initializer[k]) for k in apart}
    return _from_proto(proto, where, folders, wire.tensors(data, apart, like, file))


def _from_text(data: bytes, where: str, folders: Folders) -> ir.Model:
    try:
        return from_text(data.decode(), link=lambda model: bind_external(model, where, folders))
    except UnicodeDecodeError as error:
        raise ModelError(f"{where} is no text in UTF-8: {error}") from None


def _is_text(data: bytes) -> bool:
    start = data[:512]
    return all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)


def _from_proto(
    proto: onnx.ModelProto, where: str, folders: Folders, apart: Mapping[int, ir.TensorProtocol] | None = None
) -> ir.Model:
    """Convert a parsed file; ``apart`` holds the initializers whose bytes were cut out of it, by index."""
    apart = apart or {}
    if not proto.HasField("graph") or not proto.ir_version:
        raise ModelError(f"{where} is no ONNX model: it has no graph; it may be truncated")
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{where} has ONNX format version {proto.ir_version}; the newest known here is {onnx.IR_VERSION}. "
            "Export it with an older format, or install a newer onnx"
        )
    newest = onnx.defs.onnx_opset_version()
    for opset in (*proto.opset_import, *(o for f in proto.functions for o in f.opset_import)):
        if not -1 <= opset.version < _OPSETS:  # -1 and 0 stand for the first
            raise ModelError(f"{where} imports version {opset.version} of {opset.domain!r}, which no operator set has")
        if opset.domain in ("", "ai.onnx") and opset.version > newest:
            raise ModelError(
                f"{where} uses opset {opset.version}; the newest known here is {newest}. "
                f"Export it with opset_version={newest} or less"
            )
    check_texts(proto, where)
    proto = with_dense_tensors(proto, where)
    _check_graph(proto.graph, where, apart)
    for tensor in inner_tensors((proto.graph, *proto.functions)):
        check_inline(tensor, where, "tensor")
    try:
        with silent_reader():
            model = ir.serde.deserialize_model(proto)
        _put_back(model, proto, apart)
    except (ir.serde.SerdeError, ValueError, KeyError, TypeError, AssertionError) as error:
        cause = error.__cause__ or error
        raise ModelError(f"{where} is a damaged ONNX model: {cause}") from None
    forget_unknown_sizes(model.graph)
    try:
        check_wellformed(model)
        sort_and_link(model.graph)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    bind_external(model, where, folders)
    restore(model.graph)
    return model


def _check_graph(graph: onnx.GraphProto, where: str, apart: Collection[int]) -> None:
    """Refuse what the reader would drop silently or fail at."""
    for k, tensor in enumerate(graph.initializer):
        if k not in apart:
            check_inline(tensor, where)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if _holds_a_map(value.type):
            raise UnsupportedOpError(
                f"{where}: {value.name!r} is a map or a sequence of maps, which cannot be trained through: export with plain"
                " tensors (skl2onnx: options={'zipmap': False}; onnxmltools: zipmap=False), or remove the ZipMap node"
            )
    for value in graph.input:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
            raise ModelError(f"{where}: the input {value.name!r} has no element type; the file is damaged, export it again")


def _holds_a_map(kind: onnx.TypeProto) -> bool:
    while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
        kind = kind.sequence_type.elem_type if kind.HasField("sequence_type") else kind.optional_type.elem_type
    return bool(kind.HasField("map_type"))


def _put_back(model: ir.Model, proto: onnx.ModelProto, apart: Mapping[int, ir.TensorProtocol]) -> None:
    """Give the initializers whose bytes were cut out of the file their tensors."""
    names = [tensor.name for tensor in proto.graph.initializer] if apart else []
    for k, tensor in apart.items():
        value = model.graph.initializers.get(names[k])  # an initializer without a name is dropped
        if value is not None and value.const_value is not None:
            value.const_value = tensor


def hold(model: ir.Model, apart: Collection[str]) -> None:
    """Take the initializers of ``model`` that stay in its file into memory, but for those whose names are in ``apart``.

    To write those back takes their new values alone; so nothing of the file is needed any more.
    """
    for name, value in model.graph.initializers.items():
        if isinstance(value.const_value, wire.FileTensor) and name not in apart:
            value.const_value.hold()


# Giving trained weights back ------------------------------------------------------------------------------------------


def write_back(
    original: ir.Model, values: Mapping[str, np.ndarray[Any, Any]], quantized: Mapping[str, Quantized] | None = None
) -> ir.Model:
    """Return the user's own file with trained values.

    Args:
        original: the model as it was loaded, before ``legalize``.
        values: name → array, for initializers and for values computed by ``ConstantOfShape``, ``Constant``, ``Identity``
            or ``Cast`` nodes, which become initializers of that name. An axis of size 1 is repeated to the file's size.
        quantized: parameters that the file holds as integers, and where.

    Returns:
        A new model of the same opset, names and element types, with BatchNormalization and Dropout in inference mode.

    Raises:
        ModelError: a name that the file does not have, or an array of the wrong shape.
    """
    model = original.clone()
    if came_with_data(original):
        model.meta[APART] = True
    graph = model.graph
    produced = {v.name: v for node in graph for v in node.outputs if v.name}
    inside = {name: value for _, value, name in body_initializers(graph)}
    held = {name: node for node, name in body_constants(graph)}
    if quantized:
        read = functools.partial(_constant, graph, produced)
        integers = requantize(quantized, values, read)
        values = {name: array for name, array in values.items() if name not in quantized} | integers
    for name, array in values.items():
        if name in graph.initializers:
            _set_initializer(graph.initializers[name], array)
        elif name in inside:
            _set_initializer(inside[name], array)
        elif name in held:
            _set_constant(held[name], array)
        elif name in produced:
            _replace_producer(model, produced[name], array)
        else:
            raise ModelError(f"the file has no parameter {name!r}{nearest(name, [*graph.initializers, *produced])}")
    for nodes in (graph.all_nodes(), *(f.all_nodes() for f in model.functions.values())):
        for node in list(nodes):
            to_inference(node)
    _write_out_own_ops(model)
    return model


def _write_out_own_ops(model: ir.Model) -> None:
    """Replace ops of graphc's own for which the file has no function, so that other runtimes can run it."""
    graph = model.graph
    defined = {name for domain, name, _ in model.functions if domain == DOMAIN}

    def stays(node: ir.Node) -> bool:
        return node.domain != DOMAIN or node.op_type in defined

    if all(map(stays, graph.all_nodes())):
        return
    propagate(graph, version=graph.opset_imports[""])
    decompose_graph(graph, stays)


def _constant(graph: ir.Graph, produced: Mapping[str, ir.Value], name: str) -> np.ndarray[Any, Any]:
    """The array of an initializer or ``Constant`` of the file."""
    value = graph.initializers.get(name) or produced.get(name)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise ModelError(f"the file has no constant {name!r}{nearest(name, [*graph.initializers, *produced])}")
    return np.asarray(tensor.numpy())


def _set_initializer(value: ir.Value, array: np.ndarray[Any, Any]) -> None:
    old = value.const_value
    dtype = old.dtype if old is not None else value.dtype
    shape = tuple(old.shape.numpy()) if old is not None else np.shape(array)
    if array.ndim == len(shape) and all(have in (size, 1) for have, size in zip(array.shape, shape, strict=True)):
        array = np.broadcast_to(array, shape)  # the file repeats it for each sample of its batch, see rebatch
    if tuple(array.shape) != shape:
        raise ModelError(f"the new value of {value.name!r} has shape {list(array.shape)}, the file has {list(shape)}")
    value.const_value = _tensor(array, dtype, value.name or "")


def _set_constant(node: ir.Node, array: np.ndarray[Any, Any]) -> None:
    """Give a ``Constant`` node inside a body a new tensor."""
    old = ir.convenience.get_const_tensor(node.outputs[0])
    node.attributes.clear()
    node.attributes["value"] = ir.AttrTensor("value", _tensor(array, old.dtype if old is not None else None, ""))


def _tensor(array: np.ndarray[Any, Any], dtype: ir.DataType | None, name: str) -> ir.TensorProtocol:
    if dtype is not None:
        array = np.asarray(array).astype(dtype.numpy(), copy=False)
    return ir.Tensor(np.ascontiguousarray(array).reshape(array.shape), dtype=dtype, name=name)


_FILLERS = frozenset({"Constant", "ConstantOfShape", "Identity", "Cast"})


def _replace_producer(model: ir.Model, old: ir.Value, array: np.ndarray[Any, Any]) -> None:
    """Replace the output of a node that only made a parameter by an initializer."""
    graph, producer, name = model.graph, old.producer(), old.name or ""
    if producer is None or producer.op_type not in _FILLERS:
        kind = producer.op_type if producer is not None else "graph input"
        raise ModelError(f"{name!r} is computed by the file ({kind}), so it cannot carry a trained value")
    dtype = old.dtype or _filled_dtype(producer)
    tensor = _tensor(array, dtype, name)
    new = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    _remove_unused(graph, producer)
    graph.register_initializer(new)
    if model.ir_version < 4:  # files of that version list every initializer among the graph's inputs
        graph.inputs.append(new)


def _filled_dtype(node: ir.Node) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type == "ConstantOfShape":
        return node.attributes["value"].as_tensor().dtype if "value" in node.attributes else ir.DataType.FLOAT
    if node.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
        return tensor.dtype if tensor is not None else None
    source = node.inputs[0]
    if source is None:
        return None
    if source.const_value is not None:
        return source.const_value.dtype
    producer = source.producer()
    return source.dtype or (_filled_dtype(producer) if producer is not None and producer.op_type in _FILLERS else None)


def _remove_unused(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a filler node, and the fillers and shape initializers that only it used."""
    sources = [v for v in node.inputs if v is not None]
    graph.remove(node, safe=True)
    for value in sources:
        if value.uses() or value.is_graph_output():
            continue
        producer = value.producer()
        if producer is not None and producer.op_type in _FILLERS:
            _remove_unused(graph, producer)
        elif value.is_initializer() and value.name is not None:
            if value in graph.inputs:
                graph.inputs.remove(value)
            del graph.initializers[value.name]


def to_inference(node: ir.Node) -> None:
    """Put a BatchNormalization or Dropout node of any opset into inference mode, in place."""
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type == "Dropout" and len(node.inputs) > 2:
        node.resize_inputs(2 if node.inputs[1] is not None else 1)
    elif node.op_type == "BatchNormalization":
        node.attributes.pop("training_mode", None)
        for k, out in enumerate(node.outputs[1:3]):
            statistic = node.inputs[3 + k]
            if statistic is not None and out.uses() and not out.is_graph_output():
                out.replace_all_uses_with(statistic)
        used = [v for v in node.outputs[1:] if v.uses() or v.is_graph_output()]
        if used:
            raise ModelError(
                f"{used[0].name!r} is a batch statistic of {node.name or 'a BatchNormalization'}, "
                "which inference does not compute"
            )
        node.resize_outputs(1)


__all__ = ["Source", "atomic_write", "files_of", "hold", "load", "save", "to_inference", "write_back"]

"""Checks that every name and text of a file is valid UTF-8.

Protobuf hands out bytes where a text field holds anything else, and code that expects ``str`` then fails in its depths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import onnx

from graphc.errors import ModelError


def check_texts(model: onnx.ModelProto, where: str) -> None:
    """Check names, comments, symbolic sizes and metadata of a model, its bodies and its functions.

    Raises:
        ModelError: one of them is not UTF-8.
    """
    for text in _of_model(model):
        if isinstance(text, bytes):
            raise ModelError(f"{where}: the text {text[:60]!r} is not UTF-8; the file is damaged, export it again")


def _of_model(model: onnx.ModelProto) -> Iterator[Any]:
    yield from (model.producer_name, model.producer_version, model.domain, model.doc_string)
    yield from _of_entries(model.metadata_props)
    yield from (opset.domain for opset in model.opset_import)
    yield from _of_graph(model.graph)
    for f in model.functions:
        yield from (f.name, f.domain, f.overload, f.doc_string, *f.input, *f.output, *f.attribute)
        yield from (opset.domain for opset in f.opset_import)
        yield from _of_entries(f.metadata_props)
        yield from _of_values(f.value_info)
        yield from _of_nodes(f.node)
        yield from _of_attributes(f.attribute_proto)


def _of_graph(graph: onnx.GraphProto) -> Iterator[Any]:
    yield from (graph.name, graph.doc_string)
    yield from _of_entries(graph.metadata_props)
    yield from _of_nodes(graph.node)
    yield from _of_values(chain(graph.input, graph.output, graph.value_info))
    for tensor in graph.initializer:
        yield from _of_tensor(tensor)
    for annotation in graph.quantization_annotation:
        yield annotation.tensor_name
        yield from _of_entries(annotation.quant_parameter_tensor_names)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[Any]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, node.overload, node.doc_string, *node.input, *node.output)
        yield from _of_entries(node.metadata_props)
        yield from _of_attributes(node.attribute)


def _of_attributes(attributes: Iterable[onnx.AttributeProto]) -> Iterator[Any]:
    for attribute in attributes:
        yield from (attribute.name, attribute.ref_attr_name, attribute.doc_string)
        if attribute.HasField("t"):
            yield from _of_tensor(attribute.t)
        for tensor in attribute.tensors:
            yield from _of_tensor(tensor)
        if attribute.HasField("g"):
            yield from _of_graph(attribute.g)
        for graph in attribute.graphs:
            yield from _of_graph(graph)


def _of_values(values: Iterable[onnx.ValueInfoProto]) -> Iterator[Any]:
    for value in values:
        yield from (value.name, value.doc_string)
        yield from _of_entries(value.metadata_props)
        yield from _of_type(value.type)


def _of_type(kind: onnx.TypeProto) -> Iterator[Any]:
    yield kind.denotation
    if kind.HasField("tensor_type"):
        for dim in kind.tensor_type.shape.dim:
            yield from (dim.dim_param, dim.denotation)
    elif kind.HasField("sequence_type"):
        yield from _of_type(kind.sequence_type.elem_type)
    elif kind.HasField("optional_type"):
        yield from _of_type(kind.optional_type.elem_type)


def _of_tensor(tensor: onnx.TensorProto) -> Iterator[Any]:
    yield from (tensor.name, tensor.doc_string)
    yield from _of_entries(tensor.external_data)
    yield from _of_entries(tensor.metadata_props)


def _of_entries(entries: Iterable[onnx.StringStringEntryProto]) -> Iterator[Any]:
    for entry in entries:
        yield from (entry.key, entry.value)

"""Prints and parses models in ONNX's textual syntax, readable and exact.

    <ir_version: 11, opset_import: ["" : 26, "graphc" : 1]>
    main (float[N,3] x) => (float[N,4] y)
      <float[3,4] w = {}, int64 "graphc.step" = {0}>
    {
       h = MatMul (x, w)
       ["l1/Relu"] y = Relu (h)  #@ {"y": {"graphc.loss_total": "1"}}
    }

A node without a label has the name of its first output. ``onnx.parser`` reads this form. ``onnx.printer`` is not used,
because it prints text that the parser rejects (quoted names of tensors, repeated initializers) and drops metadata.
Comments hold what the syntax cannot express:

* ``#@ {json}`` after a line holds the ``graphc.*`` metadata of the line's values by name, and of the node under ``""``.
* A tensor of more than 16 elements is written as ``{}``, read as zeros, unless weights are asked for or ``large`` writes it.

Element types float16 and narrower are written as the integers of their bits, as the syntax defines.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir import OPSET
from graphc.ir.facts import dims
from graphc.ir.infer import apply, fold, infer_node, version_of

Large: TypeAlias = "Callable[[ir.TensorProtocol], str]"
"""How a large tensor is written."""

ELIDED_ABOVE = 16
"""Larger tensors are written as ``{}`` unless weights are asked for."""

METADATA_PREFIX = "graphc."
"""Prefix of metadata that belongs to the graph's meaning, unlike exporters' notes."""

_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|#@[ \t]*([^\n]*)|#[^\n]*', flags=re.DOTALL)
"""Strings (skipped, because they may contain anything), metadata, other comments."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BITS = {2: np.int16, 1: np.int8}
_EXACT = frozenset({"f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"})


def to_text(model: ir.Model, *, weights: bool = False, large: Large | None = None) -> str:
    """The model in ONNX text syntax.

    Args:
        weights: write every tensor in full.
        large: the text of a tensor of more than 16 elements, such as a reference to a file; default ``{}``, which is read as
            zeros.

    Raises:
        ModelError: the model has local functions (``legalize`` inlines them) or attributes the syntax cannot express.
    """
    if model.functions:
        raise ModelError("a model with local functions has no text form; run 'legalize' first, which inlines them")
    return "\n".join(_Printer(weights, large).model(model)) + "\n"


def elided(tensor: ir.TensorProtocol) -> str:
    """``<elided 500 floats>``, for people; no parser reads it."""
    return f"<elided {tensor.size:,} {str(tensor.dtype).lower()}s>"


def node_text(node: ir.Node) -> str:
    """Print one node as one line, without metadata; tensors are shortened."""
    return _Printer(weights=False).node(node)[0]


def from_text(text: str, *, link: Callable[[ir.Model], None] | None = None) -> ir.Model:
    """Read a model from text; every value gets a type, ``graphc`` ops included.

    Args:
        link: finds the files of tensors that lie in one.

    Raises:
        ModelError: a syntax error, or an op that rejects its inputs.
    """
    try:
        proto = onnx.parser.parse_model(text)
    except onnx.parser.ParseError as error:
        detail = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ModelError(f"not a model in ONNX text syntax: {detail}") from None
    model = ir.serde.deserialize_model(proto)
    if link is not None:
        link(model)
    _name_nodes(model.graph)
    _fill_elided(model.graph)
    _type_values(model.graph, model.graph.opset_imports.get("", OPSET))
    _read_metadata(model.graph, text)
    return model


class _Printer:
    def __init__(self, weights: bool, large: Large | None = None) -> None:
        self.weights = weights
        self.large = large

    def model(self, model: ir.Model) -> Iterator[str]:
        opsets = ", ".join(f"{_quote(d)} : {v}" for d, v in sorted(model.graph.opset_imports.items()))
        fields = [f"ir_version: {model.ir_version}", f"opset_import: [{opsets}]"]
        if model.producer_name:
            fields.append(f"producer_name: {_quote(model.producer_name)}")
        if model.metadata_props:
            pairs = ", ".join(f"{_quote(k)}: {_quote(v)}" for k, v in model.metadata_props.items())
            fields.append(f"metadata_props: [{pairs}]")
        yield f"<{', '.join(fields)}>"
        yield from self.graph(model.graph, "")

    def graph(self, graph: ir.Graph, indent: str) -> Iterator[str]:
        inputs, outputs = (", ".join(self.value(v) for v in values) for values in (graph.inputs, graph.outputs))
        name = _name(graph.name or "graph") if not indent else re.sub(r"\W", "_", graph.name or "body")  # no quotes allowed
        yield f"{indent}{name} ({inputs}) => ({outputs})" + _metadata_comment(graph.inputs)
        declared = [(self.initializer(v), _metadata_comment([v])) for v in graph.initializers.values()]
        declared += [(self.value(v), "") for v in _not_inferred(graph)]
        for k, (item, comment) in enumerate(declared):
            opening, closing = "<" if k == 0 else " ", ">" if k == len(declared) - 1 else ","
            yield f"{indent}  {opening}{item}{closing}{comment}"
        yield f"{indent}{{"
        for node in graph:
            lines = self.node(node, indent + "   ")
            yield from lines[:-1]
            yield lines[-1] + _metadata_comment([v for v in node.outputs if v.name], node)
        yield f"{indent}}}"

    def node(self, node: ir.Node, indent: str = "") -> list[str]:
        implied = node.name == (node.outputs[0].name if node.outputs else None)
        label = f"[{_name(node.name)}] " if node.name and not implied else ""
        outputs = ", ".join(_name(v.name) if v.name else '""' for v in node.outputs)
        inputs = ", ".join(_name(v.name or "?") if v is not None else '""' for v in node.inputs)
        domain = f"{node.domain}." if node.domain else ""
        attributes = [self.attribute(name, attr, indent) for name, attr in node.attributes.items()]
        shown = f" <{', '.join(attributes)}>" if attributes else ""
        return f"{indent}{label}{outputs} = {domain}{node.op_type}{shown} ({inputs})".split("\n")

    def attribute(self, name: str, attr: ir.Attr, indent: str) -> str:
        kind, value = attr.type, attr.value
        if attr.is_ref():
            return f"{name}: {kind.name.lower()} = @{attr.ref_attr_name}"
        if kind in (ir.AttributeType.FLOAT, ir.AttributeType.INT, ir.AttributeType.STRING):
            shown = _scalar(value)
        elif kind in (ir.AttributeType.FLOATS, ir.AttributeType.INTS, ir.AttributeType.STRINGS):
            shown = f"[{', '.join(_scalar(v) for v in value)}]"
        elif kind == ir.AttributeType.TENSOR:
            tensor, shown = attr.as_tensor(), self.tensor(attr.as_tensor())
            equals = "= " if shown.startswith("[") else ""  # the syntax of a reference to a file
            shown = f"{_type(tensor.dtype, tensor.shape.numpy())} {equals}{shown}"
        elif kind == ir.AttributeType.GRAPH:
            shown = "\n".join(self.graph(attr.as_graph(), indent + "      ")).lstrip()
        else:
            raise ModelError(f"attribute {name!r} of kind {kind.name} has no text form")
        return f"{name}: {kind.name.lower()} = {shown}"

    def initializer(self, value: ir.Value) -> str:
        tensor = value.const_value
        if tensor is None:
            raise ModelError(f"initializer {value.name!r} has no data")
        return f"{_type(tensor.dtype, tensor.shape.numpy())} {_name(value.name or '')} = {self.tensor(tensor)}"

    def tensor(self, tensor: ir.TensorProtocol) -> str:
        if tensor.size > ELIDED_ABOVE and not self.weights:
            return "{}" if self.large is None else self.large(tensor)
        if tensor.dtype == ir.DataType.STRING:
            return "{" + ", ".join(_scalar(v.decode()) for v in tensor.numpy().reshape(-1)) + "}"
        array = np.asarray(tensor.numpy()).reshape(-1)
        if array.dtype == np.bool_:
            array = array.astype(np.int8)
        elif array.dtype.str[1:] not in _EXACT:
            if array.dtype.itemsize not in _BITS:
                raise ModelError(f"tensor {tensor.name!r} of type {tensor.dtype.name} has no text form")
            array = array.view(_BITS[array.dtype.itemsize])
        return "{" + ", ".join(str(v) for v in array) + "}"

    def value(self, value: ir.Value) -> str:
        if value.type is None:
            return _name(value.name or "")
        if isinstance(value.type, ir.TensorType):
            return f"{_type(value.type.dtype, dims(value))} {_name(value.name or '')}"
        proto = onnx.TypeProto()
        ir.serde.serialize_type_into(proto, value.type)
        return f"{_composite(proto)} {_name(value.name or '')}"


def _composite(proto: onnx.TypeProto) -> str:
    kind = proto.WhichOneof("value")
    if kind == "sequence_type":
        return f"seq({_composite(proto.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({_composite(proto.optional_type.elem_type)})"
    if kind == "tensor_type":
        return _type(ir.DataType(proto.tensor_type.elem_type), None)
    raise ModelError(f"type {kind} has no text form")


def _type(dtype: ir.DataType, shape: Sequence[Any] | None) -> str:
    name = str(dtype).lower()
    if shape is None:
        return f"{name}[]"
    shown = ["?" if d is None else _name(d) if isinstance(d, str) else str(d) for d in shape]
    return f"{name}[{','.join(shown)}]" if shown else name


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, float):
        return str(np.float32(value)) if np.isfinite(value) else str(value)
    return str(value)


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _name(text: str) -> str:
    return text if _IDENTIFIER.fullmatch(text) and text not in _RESERVED else _quote(text)


_RESERVED = frozenset({d.name.lower() for d in ir.DataType} | {"seq", "map", "optional", "sparse_tensor"})
"""Names that the parser would take for types."""


def _not_inferred(graph: ir.Graph) -> list[ir.Value]:
    """Node outputs whose stored type differs from what inference finds when the text is read."""
    version = graph.opset_imports.get("", OPSET)
    different = []
    for node in graph:
        try:
            found = infer_node(node, version)
        except ModelError:
            found = ((None, None),) * len(node.outputs)
        for value, (type_, shape) in zip(node.outputs, found, strict=False):
            same = shape is not None and value.shape is not None and shape == value.shape
            if value.name and value.type is not None and not value.is_graph_output() and not (same and type_ == value.type):
                different.append(value)
    return different


def _metadata_comment(values: Sequence[ir.Value], node: ir.Node | None = None) -> str:
    found: dict[str, Any] = {v.name or "": kept for v in values if (kept := graph_metadata(v.metadata_props))}
    if node is not None and (kept := graph_metadata(node.metadata_props)):
        found[""] = {node.name or "": kept}
    return f"  #@ {json.dumps(found)}" if found else ""


def graph_metadata(properties: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a value or node that belongs to the graph's meaning."""
    return {k: v for k, v in properties.items() if k.startswith(METADATA_PREFIX)}


def _read_metadata(graph: ir.Graph, text: str) -> None:
    written = [match.group(1) for match in _COMMENT.finditer(text) if match.group(1)]
    if not written:
        return
    try:
        comments = [json.loads(line) for line in written]
    except json.JSONDecodeError as error:
        raise ModelError(f"metadata after #@ is not JSON: {error.doc!r}") from None
    values: dict[str, ir.Value] = {v.name: v for v in graph.inputs if v.name}
    values.update(graph.initializers)
    nodes: dict[str, ir.Node] = {}
    for node in graph.all_nodes():
        nodes[node.name or ""] = node
        values.update({v.name: v for v in node.outputs if v.name})
    for comment in comments:
        for name, properties in comment.pop("", {}).items():
            nodes[name].metadata_props.update(properties)
        for name, properties in comment.items():
            if name not in values:
                raise ModelError(f"metadata for {name!r}, but the text has no such value")
            values[name].metadata_props.update(properties)


def _name_nodes(graph: ir.Graph) -> None:
    taken = {node.name for node in graph.all_nodes() if node.name}
    for node in graph.all_nodes():
        if not node.name and node.outputs:
            base = name = node.outputs[0].name or node.op_type
            for k in itertools.count(1):
                if name not in taken:
                    break
                name = f"{base}.{k}"
            node.name = name
            taken.add(name)


def _fill_elided(graph: ir.Graph) -> None:
    """Give tensors that were written as ``{}`` zeros of their shape."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.const_value = _filled(value.const_value)
            value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(value.const_value.shape.numpy())
    for node in graph.all_nodes():
        for name, attr in list(node.attributes.items()):
            if attr.type == ir.AttributeType.TENSOR and not attr.is_ref():
                node.attributes[name] = ir.AttrTensor(name, _filled(attr.as_tensor()))


def _filled(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if isinstance(tensor, ir.serde.TensorProtoTensor):
        raw = tensor.raw
        fields = (raw.float_data, raw.int32_data, raw.int64_data, raw.double_data, raw.uint64_data, raw.string_data)
        if not raw.raw_data and not any(fields):
            return ir.tensor(
                np.zeros(tuple(tensor.shape.numpy()), dtype=tensor.dtype.numpy()), dtype=tensor.dtype, name=tensor.name
            )
    return tensor


def _type_values(graph: ir.Graph, version: int) -> None:
    """Infer every type in node order; types declared in the text stay."""
    for node in graph:
        declared = [(v, v.type, v.shape) for v in node.outputs]
        apply(node, version=version_of(node, version))
        for value, type_, shape in declared:
            value.type = type_ if type_ is not None else value.type
            value.shape = shape if shape is not None else value.shape
        fold(node)

"""Creates nodes: schema-checked, typed at birth, deterministically named; indices are int64.

op = Builder(graph)                        # appends; Builder(graph, before=node) inserts
y = op.Mul(x, 2.0)                         # Python scalars and arrays become constants of x's type
dx = op.graphc.ReluGrad(dy, y)             # ops of the graphc domain
a, b = op.Split(x, axis=1, num_outputs=2, _outputs=2)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.errors import ModelError
from graphc.ir import DOMAIN, DOMAIN_VERSION, OPSET
from graphc.ir.declare import OPS, declared
from graphc.ir.facts import FLOATS, constant, dims, dtype_of, neighbourhood, rank, same_dims, static_dims
from graphc.ir.infer import apply, fold
from graphc.ir.signatures import declared_signature, index_operands, standard_signature
from graphc.ir.subgraphs import bodies

Operand = Any
"""An input: a value, None (left out), a Python number, a list of integers or a numpy array."""


class _Domain:
    def __init__(self, builder: Builder, domain: str) -> None:
        self._builder = builder
        self._domain = domain

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        return self._builder._emitter(op_type, self._domain)


@dataclass(eq=False)
class _Names:
    """Names in use by values and by nodes of a graph; all its builders share them, as long as one of them lives."""

    values: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)

    def add_all(self, others: tuple[set[str], set[str]]) -> None:
        self.values |= others[0]
        self.nodes |= others[1]


_NAMES: weakref.WeakKeyDictionary[ir.Graph, weakref.ref[_Names]] = weakref.WeakKeyDictionary()


class Builder:
    """Emits nodes into one graph. Builders of the same graph may take turns.

    Args:
        graph: the graph that receives the nodes.
        before: inserts the nodes in front of this one; None appends them.
        scope: prefix of the names of nodes and values, for example ``"grad/conv1"``.

    Attributes:
        marks: metadata of the nodes that it creates.
    """

    def __init__(self, graph: ir.Graph, *, before: ir.Node | None = None, scope: str = "") -> None:
        self.graph = graph
        self.before = before
        self.scope = scope
        self.marks: Mapping[str, str] = {}
        self._taken: _Names | None = None
        self._imports = graph.opset_imports
        self._counters: dict[str, int] = {}
        self._constants: dict[Any, ir.Value] = {}

    @property
    def graphc(self) -> _Domain:
        """Emits ops of the graphc domain."""
        # made when asked for: a builder in a cycle of references would keep its names for longer
        return _Domain(self, DOMAIN)

    def inside(self, body: ir.Graph) -> Builder:
        """A builder for a subgraph; its names are unique in the outer graph too.

        ``body`` belongs to a node of this builder's graph, or to one that will be emitted next.
        """
        inner = Builder(body, scope=self.scope)
        self._used().add_all(used_names(body))
        inner._taken, inner._counters, inner._imports = self._taken, self._counters, self._imports
        return inner

    def _used(self) -> _Names:
        """Names in use, collected on first use, because many builders emit nothing."""
        if self._taken is None:
            shared = _NAMES.get(self.graph)
            self._taken = (shared() if shared is not None else None) or _Names()
            self._taken.add_all(used_names(self.graph))
            _NAMES[self.graph] = weakref.ref(self._taken)
        return self._taken

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        return self._emitter(op_type, "")

    def _emitter(self, op_type: str, domain: str) -> Callable[..., Any]:
        def emit(
            *inputs: Operand, _outputs: int | Sequence[str] | None = None, _name: str | None = None, **attributes: Any
        ) -> Any:
            values = self.emit(op_type, inputs, attributes, domain=domain, outputs=_outputs, name=_name)
            return values[0] if len(values) == 1 else values

        return emit

    def emit(
        self,
        op_type: str,
        inputs: Sequence[Operand],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: int | Sequence[str] | None = None,
        name: str | None = None,
    ) -> tuple[ir.Value, ...]:
        """Create one node, check it against its schema, type its outputs, insert it.

        Args:
            outputs: how many outputs, or their names; None takes the op's required outputs (all, for ``graphc`` ops).
            name: the node's name; None derives one from scope and op type.

        Raises:
            ModelError: unknown op or attribute, wrong number of inputs, or types that the op rejects.
        """
        if isinstance(outputs, str):
            outputs = [outputs]
        values = self._operands(op_type, inputs)
        if domain == "":
            self._widen_indices(op_type, values)
        attrs, count = _check(op_type, domain, len(values), attributes or {})
        if outputs is not None:
            count = outputs if isinstance(outputs, int) else len(outputs)
        elif count < 0:
            count = len(values)  # a variadic op that returns one output per input
        node_name = self.unique(name or f"{self.scope}/{op_type}".lstrip("/"))
        node = ir.Node(domain, op_type, values, attrs, num_outputs=count, name=node_name)
        if self.marks:
            node.metadata_props.update(self.marks)
        for k, value in enumerate(node.outputs):
            if outputs is not None and not isinstance(outputs, int):
                value.name = outputs[k]
                self._used().values.add(outputs[k])
            else:
                value.name = self.unique(node_name if count == 1 else f"{node_name}.{k}", value=True)
        version = OPSET if domain == "" else DOMAIN_VERSION
        apply(node, version=version)
        for value in node.outputs:
            if value.type is None:
                raise ModelError(f"the type of {value.name!r} cannot be inferred\n{neighbourhood(node)}")
        fold(node)
        if domain and domain not in self._imports:
            self._imports[domain] = version
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        return tuple(node.outputs)

    def repeat(
        self, node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr]
    ) -> tuple[ir.Value, ...]:
        """Copy ``node`` with new ``inputs``; an op without a schema keeps its output types."""
        if declared(node.domain, node.op_type) is not None or onnx.defs.has(node.op_type, node.domain):
            return self.emit(node.op_type, inputs, attributes, domain=node.domain, outputs=len(node.outputs), name=node.name)
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(attributes.values()),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=self.unique(node.name or node.op_type),
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = self.unique(old.name or copy.name or "", value=True)
            new.type, new.shape = old.type, ir.Shape(old.shape.dims) if old.shape is not None else None
        if self.before is None:
            self.graph.append(copy)
        else:
            self.graph.insert_before(self.before, copy)
        return tuple(copy.outputs)

    def _widen_indices(self, op_type: str, values: list[ir.Value | None]) -> None:
        for k in index_operands(op_type, OPSET):
            value = values[k] if k < len(values) else None
            if value is not None and value.dtype == ir.DataType.INT32:
                values[k] = self.int64(value)

    def int64(self, value: ir.Value) -> ir.Value:
        """``value`` as int64; a constant stays one."""
        known = constant(value)
        if known is not None:
            return self.const(known.astype(np.int64))
        return self.Cast(value, to=int(ir.DataType.INT64))  # type: ignore[no-any-return]

    def _operands(self, op_type: str, inputs: Sequence[Operand]) -> list[ir.Value | None]:
        values = list(inputs)
        while values and values[-1] is None:
            values.pop()
        like = next((v.dtype for v in values if isinstance(v, ir.Value)), None)
        return [v if v is None or isinstance(v, ir.Value) else self.const(v, like) for v in values]

    def const(self, value: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """A ``Constant`` node; equal constants of one builder are one node.

        Python floats (and ints, when ``dtype`` is a float type) take ``dtype``; a list of ints is int64.
        """
        if isinstance(value, (bool, np.ndarray, np.generic)):
            array = np.asarray(value)
        elif isinstance(value, (int, float)) and dtype is not None:
            array = np.asarray(value, dtype=dtype.numpy())
        elif isinstance(value, float):
            array = np.asarray(value, dtype=np.float32)
        else:
            array = np.asarray(value, dtype=np.int64) if np.asarray(value).dtype.kind != "f" else np.asarray(value)
        key = (array.dtype.str, array.dtype.name, array.shape, array.tobytes())
        known = self._constants.get(key)
        if known is not None:
            return known
        name = self.unique("constant", value=True)
        tensor = ir.Tensor(array, name=name)
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1, name=name)
        out = node.outputs[0]
        out.name = name
        out.type = ir.TensorType(tensor.dtype)
        out.shape = ir.Shape(array.shape)
        out.const_value = tensor
        first = next(iter(self.graph), None)
        if first is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(first, node)  # before all other nodes, so that every later node may share it
        self._constants[key] = out
        return out

    def unique(self, name: str, *, value: bool = False) -> str:
        """``name``, or the first of ``name.1``, ``name.2`` … that the graph does not use."""
        table = self._used().values if value else self._used().nodes
        if name not in table:
            table.add(name)
            return name
        k = self._counters.get(name, 0) + 1
        while f"{name}.{k}" in table:
            k += 1
        self._counters[name] = k
        table.add(f"{name}.{k}")
        return f"{name}.{k}"

    # Formulas that all gradient rules share --------------------------------------------------------------------------

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape of ``value`` as int64: a constant when static, else a ``Shape`` node."""
        known = static_dims(value)
        if known is not None:
            return self.const(np.array(known, dtype=np.int64))
        return self.Shape(value)  # type: ignore[no-any-return]

    def lengths(self, *parts: int | tuple[ir.Value, int]) -> Any:
        """A shape from numbers and dimensions ``(value, axis)``: constant as far as they are static."""
        known: list[int] = []
        pieces: list[Any] = []
        for part in parts:
            found = part if isinstance(part, int) else (dims(part[0]) or {part[1]: None})[part[1]]
            if isinstance(found, int):
                known.append(found)
                continue
            assert not isinstance(part, int)
            pieces += [self.const(known)] if known else []
            pieces.append(self.Shape(part[0], start=part[1], end=part[1] + 1))
            known = []
        pieces += [self.const(known)] if known else []
        return pieces[0] if len(pieces) == 1 else self.Concat(*pieces, axis=0)

    def reshape_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Reshape ``value`` to the shape of ``like``; emits nothing when the shapes are equal."""
        if _same_shape(value, like):
            return value
        empty = 1 if 0 in (static_dims(like) or (0,)) else None  # a 0 in the shape means a size of 0, not "as in the input"
        return self.Reshape(value, self.shape(like), allowzero=empty)  # type: ignore[no-any-return]

    def expand_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """``value`` broadcast to the shape of ``like``."""
        if _same_shape(value, like):
            return value
        return self.Expand(value, self.shape(like))  # type: ignore[no-any-return]

    def scalar(self, number: float, like: ir.Value) -> ir.Value:
        """A rank-0 constant of ``like``'s element type."""
        return self.const(np.asarray(number, dtype=dtype_of(like).numpy()))

    def zeros_like(self, value: ir.Value) -> ir.Value:
        """Zeros of the type and shape of ``value``."""
        return self.expand_like(self.scalar(0, value), value)

    def ones_like(self, value: ir.Value) -> ir.Value:
        """Ones of the type and shape of ``value``."""
        return self.expand_like(self.scalar(1, value), value)

    def cast_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """``value`` in the element type of ``like``."""
        if value.dtype == like.dtype:
            return value
        return self.Cast(value, to=int(dtype_of(like)))  # type: ignore[no-any-return]

    def rank(self, value: ir.Value) -> int:
        return rank(value)

    def is_float(self, value: ir.Value) -> bool:
        return value.dtype in FLOATS


def used_names(graph: ir.Graph) -> tuple[set[str], set[str]]:
    """Names of all values and names of all nodes of the graph, subgraphs included."""
    values: set[str] = {v.name for v in graph.inputs if v.name} | set(graph.initializers)
    nodes: set[str] = set()
    for node in graph:
        for out in node.outputs:
            if out.name:
                values.add(out.name)
        if node.name:
            nodes.add(node.name)
        for body in bodies(node):
            inner_values, inner_nodes = used_names(body)
            values |= inner_values
            nodes |= inner_nodes
    return values, nodes


def _same_shape(a: ir.Value, b: ir.Value) -> bool:
    known_a = a.shape.dims if a.shape is not None else None
    known_b = b.shape.dims if b.shape is not None else None
    if known_a is None or known_b is None:
        return False
    return same_dims(
        [d if isinstance(d, int) else d.value for d in known_a], [d if isinstance(d, int) else d.value for d in known_b]
    )


def _check(op_type: str, domain: str, num_inputs: int, attributes: Mapping[str, Any]) -> tuple[list[ir.Attr], int]:
    """Attributes as ``ir.Attr`` of their declared kind, and the default number of outputs (-1: one per input)."""
    declaration = OPS[op_type] if domain == DOMAIN else declared(domain, op_type)
    if declaration is None:
        op, signature = op_type, standard_signature(op_type, domain, OPSET)
        if signature is None:
            raise ModelError(f"no operator {domain or 'ai.onnx'}::{op_type} in opset {OPSET}")
    else:
        op, signature = f"{domain}.{op_type}", declared_signature(declaration)
    if error := signature.input_error(op, num_inputs):
        raise ModelError(error)
    result = []
    for name, value in attributes.items():
        copied = isinstance(value, ir.Attr)  # the node's op may be of another opset
        if name not in signature.attributes and (declaration is not None or (value is not None and not copied)):
            raise ModelError(f"{op} has no attribute {name!r}")
        if copied:
            result.append(ir.Attr(name, value.type, value.value))
        elif value is not None:
            result.append(_attribute(name, value, signature.attributes[name]))
    for name in signature.required:
        if attributes.get(name) is None:
            raise ModelError(f"{op} needs the attribute {name!r}")
    return result, signature.default_outputs


def _attribute(name: str, value: Any, kind: ir.AttributeType | None) -> ir.Attr:
    """An attribute of the given kind, else of its value's kind; bypasses onnx_ir for plain numbers and strings."""
    if kind == ir.AttributeType.FLOAT:
        return ir.AttrFloat32(name, float(value))
    make = _PLAIN.get(type(value))
    if make is not None:
        return make(name, value)
    if kind in (None, ir.AttributeType.INTS) and isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
        return ir.AttrInt64s(name, value)
    if isinstance(value, np.ndarray) and kind == ir.AttributeType.TENSOR:
        value = ir.Tensor(value)
    return ir.convenience.convert_attribute(name, value, kind)


_PLAIN: Mapping[type, Callable[[str, Any], ir.Attr]] = {
    bool: ir.AttrInt64,
    int: ir.AttrInt64,
    float: ir.AttrFloat32,
    str: ir.AttrString,
}

"""Checks the invariants of the IR between passes.

An error names the rule, the node with its neighbours, and the ten lines around it. Signatures and inference are cached, so a
training graph of thousands of nodes takes a fraction of a second.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import onnx
import onnx_ir as ir

from graphc.errors import ModelError, nearest
from graphc.ir import DOMAIN, DOMAIN_VERSION, OPSET
from graphc.ir.declare import OPS, declaration_of
from graphc.ir.facts import describe_value, dims, neighbourhood
from graphc.ir.infer import infer_node, version_of
from graphc.ir.signatures import Signature, count_range, declared_signature, formal_of, standard_signature
from graphc.ir.text import node_text

_CONTEXT_LINES = 5


def verify_model(model: ir.Model, *, legal: bool = True) -> None:
    """Check that a model keeps the invariants of the IR.

    Always: known ops and attributes, number of inputs and outputs, definition before use, unique names, element types as
    bound by the op's schema, stored types that agree with inference, collectives with unique tags and properly paired
    starts and waits, at most one update per state. With ``legal`` also what ``legalize`` establishes: the opset,
    no functions, named nodes, typed values, initializers that are not inputs.

    Raises:
        ModelError: the first broken rule, with its place.
    """
    graph = model.graph
    opset = graph.opset_imports.get("")
    if legal:
        if opset != OPSET:
            raise ModelError(f"the graph is in opset {opset}, not {OPSET}; run 'legalize' first")
        if model.functions:
            raise ModelError(f"the model has {len(model.functions)} local functions; run 'legalize' first")
    if DOMAIN in graph.opset_imports and graph.opset_imports[DOMAIN] != DOMAIN_VERSION:
        raise ModelError(f"the graph uses version {graph.opset_imports[DOMAIN]} of the graphc ops; this is {DOMAIN_VERSION}")
    functions = {(key[0], key[1]) for key in model.functions}
    checker = _Checker(graph, opset or OPSET, legal, functions)
    checker.interface(graph)
    checker.nodes(graph, set())
    checker.collectives()
    checker.state()


@functools.cache
def _tensor_type_name(dtype: ir.DataType) -> str:
    return f"tensor({str(dtype).lower()})"


def _type_name(value: ir.Value) -> str | None:
    type_ = value.type
    if isinstance(type_, ir.TensorType):
        return _tensor_type_name(type_.dtype)
    if isinstance(type_, ir.SequenceType) and isinstance(type_.elem_type, ir.TensorType):
        return f"seq({_tensor_type_name(type_.elem_type.dtype)})"
    return None


def refused_type(node: ir.Node, version: int) -> str | None:
    """Describe the first input type that the op rejects in opset ``version``, or None."""
    signature = standard_signature(node.op_type, node.domain, version)
    if signature is None:
        return None
    for k, value in enumerate(node.inputs):
        actual = _type_name(value) if value is not None else None
        allowed = formal_of(signature.inputs, k).allowed
        if actual is not None and allowed is not None and actual not in allowed:
            return actual
    return None


class _Checker:
    def __init__(self, graph: ir.Graph, opset: int, legal: bool, functions: set[tuple[str, str]]) -> None:
        self.graph = graph
        self.opset = opset
        self.legal = legal
        self.functions = functions
        self.value_names: dict[str, ir.Value] = {}
        self.node_names: dict[str, ir.Node] = {}

    def interface(self, graph: ir.Graph) -> None:
        for value in graph.inputs:
            self.name(value, None)
            if value.is_initializer() and self.legal:
                raise ModelError(f"initializer {value.name!r} is also a graph input; run 'legalize' first")
        for name, value in graph.initializers.items():
            if name != value.name:
                raise ModelError(f"initializer {name!r} is registered under another name than its own, {value.name!r}")
            if not value.is_graph_input():
                self.name(value, None)
            if value.const_value is None:
                raise ModelError(f"initializer {name!r} has no data")
            if value.dtype != value.const_value.dtype or dims(value) != tuple(value.const_value.shape):
                tensor = value.const_value
                raise ModelError(
                    f"initializer {describe_value(value)} does not have the type of its data, "
                    f"{tensor.dtype.name.lower()}{list(tensor.shape)}"
                )
        if self.legal:
            for value in [*graph.inputs, *graph.outputs]:
                if value.type is None:
                    raise ModelError(f"{value.name!r} has no type")

    def name(self, value: ir.Value, node: ir.Node | None) -> None:
        if not value.name:
            self.fail(node, "a value has no name")
        other = self.value_names.setdefault(value.name, value)
        if other is not value:
            self.fail(node, f"two values are called {value.name!r}")

    def nodes(self, graph: ir.Graph, outer: set[ir.Value]) -> None:
        defined = outer | set(graph.inputs) | set(graph.initializers.values())
        for node in graph:
            self.node(node, defined)
            for value in node.outputs:
                if value.name:
                    self.name(value, node)
                    defined.add(value)
        for value in graph.outputs:
            if value not in defined:
                raise ModelError(f"no node of the graph produces the graph output {value.name!r}")

    def node(self, node: ir.Node, defined: set[ir.Value]) -> None:
        if not node.name:
            if self.legal:
                self.fail(node, "a node has no name")
        elif self.node_names.setdefault(node.name, node) is not node:
            self.fail(node, f"two nodes are called {node.name!r}")
        for k, value in enumerate(node.inputs):
            if value is not None and value not in defined:
                producer = value.producer()
                if producer is None or producer.graph is None:
                    self.fail(node, f"input {k}, {value.name!r}, is no graph input, initializer or node output (dangling)")
                self.fail(node, f"input {k}, {value.name!r}, is used before it is defined")
        signature = self.signature(node)
        if signature is None:
            return
        self.arity(node, signature)
        self.attributes(node, signature)
        for attr in node.attributes.values():
            if attr.type == ir.AttributeType.GRAPH and not attr.is_ref():
                self.body(attr.as_graph(), defined)
            elif attr.type == ir.AttributeType.GRAPHS and not attr.is_ref():
                for body in attr.as_graphs():
                    self.body(body, defined)
        self.types(node, signature)

    def body(self, graph: ir.Graph, defined: set[ir.Value]) -> None:
        outside = dict(self.value_names)  # two branches may share names
        for value in [*graph.inputs, *graph.initializers.values()]:
            self.name(value, None)
        self.nodes(graph, defined)
        self.value_names = outside

    def signature(self, node: ir.Node) -> Signature | None:
        declaration = declaration_of(node)
        if declaration is None and node.domain == DOMAIN:
            self.fail(node, f"no graphc op {node.op_type!r} is declared{nearest(node.op_type, OPS)}")
        if declaration is not None:
            if node.domain not in self.graph.opset_imports:
                self.fail(node, f"the model does not import the domain {node.domain!r}")
            return declared_signature(declaration)
        version = self.opset if node.domain == "" else self.graph.opset_imports.get(node.domain, 1)
        found = standard_signature(node.op_type, node.domain, version)
        if found is None and (self.legal or node.domain == "") and (node.domain, node.op_type) not in self.functions:
            known = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
            hint = nearest(node.op_type, known) if node.domain == "" else ""
            self.fail(node, f"no operator {node.domain or 'ai.onnx'}::{node.op_type} in opset {version}{hint}")
        return found

    def arity(self, node: ir.Node, signature: Signature) -> None:
        if error := signature.input_error(node.op_type, len(node.inputs)):
            self.fail(node, error)
        *_, least, most = signature.arity
        if not least <= len(node.outputs) <= most:
            self.fail(node, f"{node.op_type} has {count_range(least, most, 'output')}, not {len(node.outputs)}")
        for k, value in enumerate(node.inputs):
            if value is None and formal_of(signature.inputs, k).required:
                self.fail(node, f"{node.op_type} needs its input {k}, {signature.inputs[k].name!r}")

    def attributes(self, node: ir.Node, signature: Signature) -> None:
        for name, attr in node.attributes.items():
            if name not in signature.attributes:
                self.fail(node, f"{node.op_type} has no attribute {name!r}{nearest(name, signature.attributes)}")
            kind = signature.attributes[name]
            if kind is not None and attr.type != kind:
                self.fail(node, f"attribute {name!r} of {node.op_type} is {attr.type.name}, not {kind.name}")
            if self.legal and attr.is_ref():
                self.fail(node, f"attribute {name!r} refers to an attribute of a function")
        for name in signature.required:
            if name not in node.attributes:
                self.fail(node, f"{node.op_type} needs the attribute {name!r}")

    def types(self, node: ir.Node, signature: Signature) -> None:
        bound: dict[str, str] = {}
        for values, formals in ((node.inputs, signature.inputs), (node.outputs, signature.outputs)):
            for k, value in enumerate(values):
                if value is None or not value.name:
                    continue
                actual = _type_name(value)
                if actual is None:
                    if value.type is None and self.legal and node.graph is self.graph:
                        self.fail(node, f"{value.name!r} has no type")
                    continue
                formal = formal_of(formals, k)
                if formal.allowed is not None and actual not in formal.allowed:
                    allowed = ", ".join(sorted(formal.allowed))
                    self.fail(node, f"{node.op_type} does not take {actual} for {formal.name!r} ({allowed})")
                if formal.variable is not None and bound.setdefault(formal.variable, actual) != actual:
                    other = bound[formal.variable]
                    self.fail(node, f"{node.op_type} needs one type for {formal.variable}, not {other} and {actual}")
        if all(v is None or v.type is not None for v in node.inputs):
            self.inference(node)

    def inference(self, node: ir.Node) -> None:
        try:
            found = infer_node(node, version_of(node, self.opset))
        except ModelError as error:
            self.fail(node, str(error))
        for value, (type_, shape) in zip(node.outputs, found, strict=False):
            if type_ is not None and value.type is not None and type_ != value.type:
                self.fail(node, f"{describe_value(value)} should have type {type_}")
            if shape is not None and value.shape is not None and not _compatible(shape, value.shape):
                self.fail(node, f"{describe_value(value)} should have shape {shape}")

    def collectives(self) -> None:
        tags: dict[tuple[str, str], ir.Node] = {}
        for node in self.graph:
            declaration = declaration_of(node)
            if declaration is None or not declaration.effect or "tag" not in declaration.attributes:
                continue
            tag = node.attributes["tag"].as_string()
            role = "wait" if node.op_type.endswith("Wait") else "begin"
            if tags.setdefault((role, tag), node) is not node:
                self.fail(node, f"two collectives have the tag {tag!r}")
        for (role, tag), node in tags.items():
            if role == "wait":
                start = tags.get(("begin", tag))
                if start is None or start.op_type != node.op_type.removesuffix("Wait") + "Start":
                    self.fail(node, f"the collective with tag {tag!r} is waited for but never started")
                if _attribute_values(node) != _attribute_values(start):
                    self.fail(node, f"the start and the wait with tag {tag!r} differ in their attributes")
                if list(node.inputs) != list(start.outputs):
                    self.fail(node, f"the wait with tag {tag!r} does not take the outputs of its start, in order")
            elif node.op_type.endswith("Start"):
                wait = tags.get(("wait", tag))
                if wait is None:
                    self.fail(node, f"the collective with tag {tag!r} is started but never waited for")
                for value in node.outputs:
                    if value.is_graph_output() or any(user is not wait for user, _ in value.uses()):
                        self.fail(node, f"{value.name!r} is in flight and may only be used by {wait.name!r}")

    def state(self) -> None:
        updated: dict[ir.Value, ir.Node] = {}
        for node in self.graph:
            declaration = declaration_of(node)
            if declaration is None:
                continue
            for output, index in declaration.next_value.items():
                state = node.inputs[index] if index < len(node.inputs) else None
                if state is None or output >= len(node.outputs):
                    continue
                if not state.is_initializer():
                    self.fail(node, f"{state.name!r} is updated but is not an initializer")
                if updated.setdefault(state, node) is not node:
                    self.fail(node, f"{state.name!r} is updated twice, first by {updated[state].name!r}")
                following = node.outputs[output]
                if following.type != state.type or dims(following) != dims(state):
                    self.fail(node, f"the next value {describe_value(following)} differs in type from {describe_value(state)}")

    def fail(self, node: ir.Node | None, message: str) -> NoReturn:
        if node is None:
            raise ModelError(message)
        raise ModelError(f"{message}\n{neighbourhood(node)}\n{excerpt(node)}")


def _attribute_values(node: ir.Node) -> dict[str, Any]:
    """The attributes of a ``graphc`` node, defaults filled in."""
    declaration = declaration_of(node)
    return declaration.attribute_values(node) if declaration is not None else {}


def excerpt(node: ir.Node) -> str:
    """The lines of the graph's text around ``node``, marked with ``>``."""
    graph: Any = node.graph
    order = list(graph) if graph is not None else [node]
    here = next(k for k, other in enumerate(order) if other is node)
    first = max(0, here - _CONTEXT_LINES)
    lines = []
    for k, other in enumerate(order[first : here + _CONTEXT_LINES + 1], first):
        lines.append(f"  {'>' if other is node else ' '} {k:4d} │ {node_text(other)}")
    return "\n".join(lines)


def _compatible(a: ir.Shape, b: ir.Shape) -> bool:
    if len(a) != len(b):
        return False
    return all(not (isinstance(x, int) and isinstance(y, int)) or x == y for x, y in zip(a.dims, b.dims, strict=True))

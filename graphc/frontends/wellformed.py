"""Checks every node of a model against its operator's schema before anything else reads it.

Other code, and ONNX's own inference in C++, may then rely on the number of inputs, the kind and the range of attributes, and
the signature of bodies. Unknown operators and element types are left to ``legalize``, which names them with what to do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import onnx
import onnx_ir as ir

from graphc.errors import ModelError, nearest
from graphc.ir.declare import declaration_of
from graphc.ir.facts import describe, dims
from graphc.ir.signatures import Signature, count_range, declared_signature, formal_of, standard_signature

_STANDARD = ("", "ai.onnx")


def check_wellformed(model: ir.Model) -> None:
    """Check arity, attributes and bodies of all nodes, and that each name is defined once.

    Raises:
        ModelError: the first fault, with the node, the attribute or operand, and what the schema expects.
    """
    imports = {"" if domain == "ai.onnx" else domain: version for domain, version in model.opset_imports.items()}
    functions = {(key[0], key[1]) for key in model.functions}
    _check_graph(model.graph, imports, functions)
    for function in model.functions.values():
        _check_function(function)
        own = {"" if domain == "ai.onnx" else domain: version for domain, version in function.opset_imports.items()}
        _check_nodes(function, own or imports, functions, {v.name for v in function.inputs if v.name}, in_function=True)


def _check_function(function: ir.Function) -> None:
    """Check that a function reads only its own values; whether its calls end is found when it is inlined."""
    known = {*function.inputs, *(out for node in function for out in node.outputs)}
    for node in function:
        for value in node.inputs:
            if value is not None and value not in known:
                _fail(node, f"the function {function.name!r} reads {value.name!r}, which nothing in it produces")
    for value in function.outputs:
        if value not in known:
            raise ModelError(f"nothing produces the output {value.name!r} of the function {function.name!r}")


def _check_graph(
    graph: ir.Graph, imports: Mapping[str, int], functions: set[tuple[str, str]], *, in_function: bool = False
) -> None:
    taken: set[str] = set()
    for value in graph.inputs:
        if not value.name:
            raise ModelError(f"an input of the graph {graph.name or ''!r} has no name")
        if value.name in taken:
            raise ModelError(f"two inputs of the graph are called {value.name!r}")
        taken.add(value.name)
    taken.update(graph.initializers)
    _check_nodes(graph, imports, functions, taken, in_function=in_function)


def _check_nodes(
    graph: ir.Graph | ir.Function,
    imports: Mapping[str, int],
    functions: set[tuple[str, str]],
    taken: set[str],
    *,
    in_function: bool,
) -> None:
    for node in graph:
        domain = "" if node.domain == "ai.onnx" else node.domain
        for value in node.outputs:
            if value.name and value.name in taken:
                _fail(node, f"the value {value.name!r} is defined twice; give one of them another name")
            taken.add(value.name or "")
        if not in_function:
            _check_given(node)
        if (domain, node.op_type) in functions:
            continue
        signature = _signature(node, domain, imports)
        if signature is not None:
            _check_arity(node, signature)
            _check_attributes(node, signature)
            if domain == "":
                _check_values(node)
                _check_windows(node)
                _check_bodies(node, imports.get("", 1))
        for attr in node.attributes.values():
            if attr.is_ref():
                continue
            if attr.type == ir.AttributeType.GRAPH:
                _check_graph(attr.value, imports, functions, in_function=in_function)
            elif attr.type == ir.AttributeType.GRAPHS:
                for body in attr.value:
                    _check_graph(body, imports, functions, in_function=in_function)


def _signature(node: ir.Node, domain: str, imports: Mapping[str, int]) -> Signature | None:
    declaration = declaration_of(node)
    if declaration is not None:
        return declared_signature(declaration)
    found = standard_signature(node.op_type, domain, imports.get(domain, 1))
    # Exporters write ops that are newer than the opset of their file; the first version of the op then counts.
    return found or _first_signature(node.op_type, domain)


@functools.cache
def _first_signature(op_type: str, domain: str) -> Signature | None:
    versions = [s.since_version for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == (domain, op_type)]
    return standard_signature(op_type, domain, min(versions)) if versions else None


def _check_given(node: ir.Node) -> None:
    for name, attr in node.attributes.items():
        if attr.is_ref():
            _fail(node, f"the attribute {name!r} refers to {attr.ref_attr_name!r}; only nodes of functions may do so")


def _check_arity(node: ir.Node, signature: Signature) -> None:
    if error := signature.input_error(node.op_type, len(node.inputs)):
        _fail(node, error)
    *_, least, most = signature.arity
    if not least <= len(node.outputs) <= most:
        _fail(node, f"{node.op_type} has {count_range(least, most, 'output')}, not {len(node.outputs)}")
    for k, value in enumerate(node.inputs):
        if value is None and formal_of(signature.inputs, k).required:
            _fail(node, f"{node.op_type} needs its input {k}, {formal_of(signature.inputs, k).name!r}")


def _check_attributes(node: ir.Node, signature: Signature) -> None:
    for name, attr in node.attributes.items():
        if name not in signature.attributes:
            _fail(node, f"{node.op_type} has no attribute {name!r}{nearest(name, signature.attributes)}")
        kind = signature.attributes[name]
        if kind is not None and attr.type != kind:
            _fail(node, f"the attribute {name!r} of {node.op_type} is {attr.type.name}, not {kind.name}")
    for name in signature.required:
        if name not in node.attributes and name != "consumed_inputs":  # of opsets below 6, for runtimes; many files lack it
            _fail(node, f"{node.op_type} needs the attribute {name!r}")


# Ranges of attributes -------------------------------------------------------------------------------------------------


def _check_values(node: ir.Node) -> None:
    for name, attr in node.attributes.items():
        if attr.is_ref():
            continue
        allowed = _CHOICES.get((node.op_type, name)) or _CHOICES.get(("", name))
        if allowed is not None and attr.type == ir.AttributeType.STRING and attr.value not in allowed:
            _fail(node, f"the attribute {name!r} is {attr.value!r}; it may be {', '.join(sorted(filter(None, allowed)))}")
        rule = _RANGES.get((node.op_type, name)) or _RANGES.get(("", name))
        if rule is not None:
            holds, expected = rule
            if not holds(attr.value, node):
                _fail(node, f"the attribute {name!r} is {_shown(attr.value)}; it must be {expected}")
    if node.op_type == "Constant":
        values = [name for name in node.attributes if name == "value" or name.startswith("value_") or name == "sparse_value"]
        if len(values) != 1:
            _fail(node, f"a Constant has one attribute with its value, not {len(values)}")


_WINDOWED = frozenset({"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv", "AveragePool", "MaxPool", "LpPool"})
_PER_AXIS = ("kernel_shape", "strides", "dilations", "output_padding")


def _check_windows(node: ir.Node) -> None:
    """Check that the attributes of a convolution or pooling have one number for each spatial axis, ``pads`` two."""
    if node.op_type not in _WINDOWED:
        return
    given = [(name, node.attributes[name]) for name in (*_PER_AXIS, "pads") if name in node.attributes]
    counts = {name: len(attr.value) / (2 if name == "pads" else 1) for name, attr in given if not attr.is_ref()}
    rank = _rank(node)
    axes = rank - 2 if rank is not None else next(iter(counts.values()), 0)
    for name, count in counts.items():
        if count != axes:
            per = "two numbers" if name == "pads" else "one number"
            _fail(
                node, f"the attribute {name!r} is {_shown(node.attributes[name].value)}; {axes:g} spatial axes need {per} each"
            )


def _shown(value: Any) -> str:
    text = str(list(value)) if isinstance(value, tuple | list) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _rank(node: ir.Node, index: int = 0) -> int | None:
    """The rank of an operand that the file itself gives; what it says of computed values may be wrong."""
    value = node.inputs[index] if index < len(node.inputs) else None
    shape = dims(value) if value is not None and value.producer() is None else None
    return None if shape is None else len(shape)


def _is_permutation(value: Any, node: ir.Node) -> bool:
    rank = _rank(node)
    return sorted(value) == list(range(len(value))) and rank in (None, len(value))


def _is_dtype(value: Any, node: ir.Node) -> bool:
    if isinstance(value, str):  # before opset 6
        return value.upper() in {ir.DataType(d).name for d in _DTYPES}
    return value in _DTYPES


_DTYPES = frozenset(int(d) for d in ir.DataType if d != ir.DataType.UNDEFINED)

_Rule = tuple[Callable[[Any, ir.Node], bool], str]
_POSITIVE: _Rule = (lambda value, node: value > 0, "positive")
_NOT_NEGATIVE: _Rule = (lambda value, node: value >= 0, "at least 0")
_ALL_POSITIVE: _Rule = (lambda value, node: all(v > 0 for v in value), "positive numbers")
_ALL_NOT_NEGATIVE: _Rule = (lambda value, node: all(v >= 0 for v in value), "numbers of at least 0")
_DTYPE: _Rule = (_is_dtype, "the number of an element type")
_FLAG: _Rule = (lambda value, node: value in (0, 1), "0 or 1")
_AXIS: _Rule = (
    lambda value, node: abs(value) <= 64 and (_rank(node) is None or -(_rank(node) or 0) - 1 <= value <= (_rank(node) or 0)),
    "an axis of the input",
)

_RANGES: Mapping[tuple[str, str], _Rule] = {
    ("", "kernel_shape"): _ALL_POSITIVE,
    ("", "strides"): _ALL_POSITIVE,
    ("", "dilations"): _ALL_POSITIVE,
    ("Conv", "pads"): _ALL_NOT_NEGATIVE,
    ("ConvTranspose", "output_padding"): _ALL_NOT_NEGATIVE,
    ("AveragePool", "pads"): _ALL_NOT_NEGATIVE,
    ("MaxPool", "pads"): _ALL_NOT_NEGATIVE,
    ("LpPool", "pads"): _ALL_NOT_NEGATIVE,
    ("", "group"): _POSITIVE,
    ("", "blocksize"): _POSITIVE,
    ("", "hidden_size"): _POSITIVE,
    ("", "num_heads"): _POSITIVE,
    ("", "q_num_heads"): _POSITIVE,
    ("", "kv_num_heads"): _POSITIVE,
    ("", "num_groups"): _POSITIVE,
    ("", "output_height"): _POSITIVE,
    ("", "output_width"): _POSITIVE,
    ("", "sampling_ratio"): _NOT_NEGATIVE,
    ("LRN", "size"): _POSITIVE,
    ("LpPool", "p"): _POSITIVE,
    ("LpNormalization", "p"): (lambda value, node: value in (1, 2), "1 or 2"),
    ("", "ceil_mode"): _FLAG,
    ("", "storage_order"): _FLAG,
    ("", "layout"): _FLAG,
    ("", "is_causal"): _FLAG,
    ("", "qk_matmul_output_mode"): (lambda value, node: 0 <= value <= 3, "0, 1, 2 or 3"),
    ("GatherND", "batch_dims"): (
        lambda value, node: 0 <= value < min([64, *(r for r in (_rank(node, 0), _rank(node, 1)) if r is not None)]),
        "at least 0 and below the rank of both inputs",
    ),
    ("Split", "num_outputs"): (
        lambda value, node: value == len(node.outputs),
        "the number of outputs of the node",
    ),
    ("Split", "split"): _ALL_NOT_NEGATIVE,
    ("", "num_scan_inputs"): (
        lambda value, node: 0 < value <= len(node.inputs),
        "between 1 and the number of inputs",
    ),
    ("", "to"): _DTYPE,
    ("", "dtype"): _DTYPE,
    ("Transpose", "perm"): (_is_permutation, "a permutation of the input's axes"),
    ("", "axis"): _AXIS,
    ("", "axes"): (lambda value, node: all(abs(v) <= 64 for v in value) and len(set(value)) == len(value), "distinct axes"),
    ("Celu", "alpha"): (lambda value, node: value != 0 and math.isfinite(value), "a finite number other than 0"),
}
"""(op, attribute) → check of the value, and what is expected; an empty op stands for every op."""

_CONV = frozenset({"NOTSET", "", "SAME_UPPER", "SAME_LOWER", "VALID"})
_SCATTER = frozenset({"none", "add", "mul", "max", "min"})
_LOSSES = frozenset({"none", "mean", "sum"})
_CHOICES: Mapping[tuple[str, str], frozenset[str]] = {
    ("", "auto_pad"): _CONV,
    ("", "direction"): frozenset({"forward", "reverse", "bidirectional"}),
    ("BitShift", "direction"): frozenset({"LEFT", "RIGHT"}),
    ("ScatterND", "reduction"): _SCATTER,
    ("ScatterElements", "reduction"): _SCATTER,
    ("TensorScatter", "mode"): frozenset({"linear", "circular"}),
    ("SoftmaxCrossEntropyLoss", "reduction"): _LOSSES,
    ("NegativeLogLikelihoodLoss", "reduction"): _LOSSES,
    ("Resize", "mode"): frozenset({"nearest", "linear", "cubic"}),
    ("Resize", "nearest_mode"): frozenset({"round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "simple"}),
    ("Upsample", "mode"): frozenset({"nearest", "linear", "bilinear"}),
    ("Pad", "mode"): frozenset({"constant", "reflect", "edge", "wrap"}),
    ("DepthToSpace", "mode"): frozenset({"DCR", "CRD"}),
    ("GridSample", "mode"): frozenset({"bilinear", "linear", "nearest", "bicubic", "cubic"}),
    ("GridSample", "padding_mode"): frozenset({"zeros", "border", "reflection"}),
    ("RoiAlign", "mode"): frozenset({"avg", "max"}),
    ("Gelu", "approximate"): frozenset({"none", "tanh"}),
}
"""(op, attribute) → the texts that the specification allows; an empty op stands for every op."""


# Bodies ---------------------------------------------------------------------------------------------------------------


def _check_bodies(node: ir.Node, version: int) -> None:
    """Check the number of inputs and outputs of the bodies of ``If``, ``Loop``, ``Scan`` and ``SequenceMap``."""
    given, made = len(node.inputs), len(node.outputs)
    if node.op_type == "If":
        for name in ("then_branch", "else_branch"):
            _body_arity(node, name, 0, made)
    elif node.op_type == "Loop":
        carried = max(0, given - 2)
        if made < carried:
            _fail(node, f"a Loop with {carried} carried values has at least as many outputs, not {made}")
        _body_arity(node, "body", 2 + carried, 1 + made)
    elif node.op_type == "Scan":
        first = 1 if version < 9 else 0  # the lengths of the sequences come first there
        scanned = node.attributes.get("num_scan_inputs")
        states = given - first - (scanned.value if scanned is not None and not scanned.is_ref() else 0)
        if states < 0 or made < states:
            _fail(
                node, f"a Scan of {given - first} inputs, {given - first - states} of them scanned, cannot have {made} outputs"
            )
        _body_arity(node, "body", given - first, made)
    elif node.op_type == "SequenceMap":
        _body_arity(node, "body", given, made)


def _body_arity(node: ir.Node, name: str, inputs: int, outputs: int) -> None:
    attr = node.attributes.get(name)
    if attr is None or attr.is_ref():
        return
    body = attr.as_graph()
    for what, there, expected in (("input", len(body.inputs), inputs), ("output", len(body.outputs), outputs)):
        if there != expected:
            wanted = count_range(expected, expected, what)
            _fail(node, f"the body {name!r} of {node.op_type} needs {wanted}, it has {there}")
    _named(node, name, body.outputs)


def _named(node: ir.Node, name: str, values: Iterable[ir.Value]) -> None:
    if any(not value.name for value in values):
        _fail(node, f"an output of the body {name!r} has no name")


def _fail(node: ir.Node, message: str) -> NoReturn:
    raise ModelError(f"{message}: {describe(node)}; the file does not keep to the ONNX specification, export it again")

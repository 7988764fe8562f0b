"""Fixes names, links and order of a loaded model: the first step of ``legalize``."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir
import onnx_ir.passes.common

from graphc.errors import ModelError
from graphc.ir import OPSET
from graphc.ir.declare import declared, has_effect
from graphc.ir.subgraphs import remove_with_bodies
from graphc.passes.legalize.gradient_op import is_gradient, named_by


def opset_of(model: ir.Model) -> int:
    """The model's ``ai.onnx`` opset.

    Raises:
        ModelError: none is declared, or it is newer than can be converted.
    """
    for imports in (model.opset_imports, *(f.opset_imports for f in model.functions.values())):
        if "ai.onnx" in imports:
            imports[""] = imports.pop("ai.onnx")
    version, newest = model.opset_imports.get(""), onnx.defs.onnx_opset_version()
    standard = {n.op_type for n in _all_nodes(model) if n.domain in ("", "ai.onnx")}
    if version is None:
        if standard:
            raise ModelError(f"the model imports no ai.onnx opset; export it with one up to {OPSET}")
        return OPSET
    if version > newest:
        raise ModelError(f"opset {version} is not supported, {newest} is the newest; export the model with opset {OPSET}")
    return max(version, 1)


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def is_placed(model: ir.Model) -> bool:
    """Whether the file says which devices run its nodes, or how they share tensors (ONNX's multi-device fields)."""
    return bool(model.device_configurations) or any(node.device_configurations for node in _all_nodes(model))


def normalise_domains(model: ir.Model) -> None:
    """Rename the domain ``ai.onnx`` to the empty name: both mean the standard domain."""
    for node in _all_nodes(model):
        if node.domain == "ai.onnx":
            node.domain = ""


def inline_functions(model: ir.Model) -> None:
    """Replace calls of the model's functions by their bodies.

    Raises:
        ModelError: functions call each other in a circle, or are written for another opset than the model.
    """
    for key in [key for key in model.functions if declared(key[0], key[1]) is not None]:
        del model.functions[key]  # a body for who runs the file without graphc
    if not model.functions:
        return
    version = model.opset_imports[""]
    for function in model.functions.values():
        own = function.opset_imports.get("", version)
        if own != version:
            raise ModelError(
                f"function {function.domain}::{function.name} is written for opset {own}, the model for {version}; "
                "export both for one opset"
            )
    try:
        onnx_ir.passes.common.InlinePass()(model)
    except (ir.passes.PassError, ir.passes.InvariantError, ValueError, KeyError) as error:
        raise ModelError(f"the functions of the model cannot be inlined: {error.__cause__ or error}") from None


def name_everything(graph: ir.Graph) -> None:
    """Give every node and value a unique name; unique names that exist stay."""
    values = [v.name for v in [*graph.inputs, *graph.initializers.values()] if v.name]
    taken = set(values)
    for node in graph.all_nodes():
        for k, out in enumerate(node.outputs):
            if out.name == "" and not out.uses() and not out.is_graph_output():
                continue  # an absent optional output
            if not out.name or out.name in taken:
                out.name = _fresh(out.name or f"{node.name or node.op_type}.{k}", taken)
            taken.add(out.name)
    names: set[str] = set()
    for node in graph.all_nodes():
        if not node.name or node.name in names:
            first = next((v.name for v in node.outputs if v.name), None)
            node.name = _fresh(node.name or first or node.op_type, names)
        names.add(node.name)


def _fresh(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    k = 1
    while f"{name}.{k}" in taken:
        k += 1
    return f"{name}.{k}"


def initializers_are_no_inputs(graph: ir.Graph) -> None:
    """Take initializers out of the graph inputs and type them by their tensors.

    Raises:
        ModelError: an initializer without data, or with another type than the graph input of its name.
    """
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            raise ModelError(f"initializer {name!r} has no data")
        if value.dtype is not None and value.dtype != tensor.dtype:
            raise ModelError(f"initializer {name!r} is declared as {value.dtype.name} but holds {tensor.dtype.name}")
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    kept = [v for v in graph.inputs if not v.is_initializer()]
    if len(kept) != len(graph.inputs):
        graph.inputs.clear()
        graph.inputs.extend(kept)


def remove_dead(graph: ir.Graph) -> None:
    """Remove nodes and initializers that no output depends on; collectives and updates stay, and what a Gradient names."""
    named = {name for node in graph if is_gradient(node) for name in named_by(node)}
    for node in reversed(list(graph)):
        if not has_effect(node) and not any(v.uses() or v.is_graph_output() or v.name in named for v in node.outputs):
            remove_with_bodies(graph, node)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not name.startswith("graphc.") and name not in named:
            del graph.initializers[name]


def untyped(graph: ir.Graph) -> Iterator[ir.Value]:
    """Values without an element type."""
    for node in graph.all_nodes():
        yield from (v for v in node.outputs if v.type is None and v.name)

"""Separates tensors that PyTorch's exporter merged because their elements are equal, and mends its biases of zeros.

before  norm1 and norm2 read norm1.weight, an initializer of ones       after  norm2 reads norm2.weight
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphc.ir.exporter_records import folded_from, recorded_kinds
from graphc.ir.facts import FLOATS, static_dims
from graphc.ir.state import repeats_one_value


def _merged_uses(graph: ir.Graph) -> list[tuple[ir.Value, list[tuple[ir.Node, int]], str]]:
    """Uses of an initializer that stood for another tensor before the exporter merged equal ones.

    The optimizer of the exporter makes one initializer of all tensors of equal elements: fresh biases, scales, running
    variances. The module that a node came from tells which was meant. Only tensors of one repeated value are told apart;
    others are equal because the module shares them.

    Returns:
        (merged initializer, its uses, name of the tensor that they meant), in graph order.
    """
    recorded = recorded_kinds(graph)
    found: dict[tuple[ir.Value, str], list[tuple[ir.Node, int]]] = {}
    for node in graph if recorded else ():
        scope = _module_of(node)
        for index, value in enumerate(node.inputs):
            if scope is None or value is None or not value.is_initializer() or value.dtype not in FLOATS:
                continue
            if value.const_value is None or value.const_value.size < 2:
                continue
            meant = _meant(node, index, scope, value.name or "", recorded, graph)
            if meant is not None and repeats_one_value(value.const_value):
                found.setdefault((value, meant), []).append((node, index))
    return [(value, uses, meant) for (value, meant), uses in found.items()]


def separate_merged(graph: ir.Graph) -> None:
    """Give each tensor that the exporter merged with an equal one its own initializer again, under its own name."""
    for value, uses, meant in _merged_uses(graph):
        tensor = value.const_value
        assert tensor is not None
        if meant not in graph.initializers:
            own = ir.Value(name=meant, type=value.type, shape=value.shape, const_value=ir.Tensor(tensor.numpy(), name=meant))
            graph.register_initializer(own)
        for node, index in uses:
            node.replace_input_with(index, graph.initializers[meant])


def restore_biases(graph: ir.Graph) -> None:
    """Give products the biases of zeros again that the exporter dropped as additions of nothing."""
    recorded = recorded_kinds(graph)
    for node in list(graph) if recorded else ():
        if node.op_type == "Gemm" and len(node.inputs) == 2:
            name = _bias_of(node, 2)
        elif node.op_type == "MatMul" and re.search(r"'linear(_\d+)?'\]$", node.metadata_props.get(_SCOPES, "")):
            name = _bias_name(node.inputs[1])
        else:
            continue
        weight = node.inputs[1]
        sizes = static_dims(weight) if weight is not None else None
        if name not in recorded or name in graph.initializers or weight is None or sizes is None or weight.dtype is None:
            continue
        size = sizes[0 if node.attributes.get_int("transB", 0) else 1]
        tensor = ir.Tensor(np.zeros(size, weight.dtype.numpy()), dtype=weight.dtype, name=name)
        bias = ir.Value(name=name, type=ir.TensorType(weight.dtype), shape=ir.Shape([size]), const_value=tensor)
        graph.register_initializer(bias)
        if node.op_type == "Gemm":
            node.resize_inputs(3)
            node.replace_input_with(2, bias)
        else:
            _add_behind(graph, node, bias)


def drop_biases_of_volumes(graph: ir.Graph) -> None:
    """Remove the zeros that the exporter (onnxscript up to 0.7) adds to a convolution of volumes that has no bias.

    They get the shape [channels, 2], which ONNX does not allow.
    """
    for node in graph:
        if node.op_type != "Conv" or len(node.inputs) < 3 or node.inputs[2] is None:
            continue
        expand = node.inputs[2].producer()
        if expand is None or expand.op_type != "Expand":
            continue
        zero, shape = (value.producer() if value is not None else None for value in expand.inputs)
        parts = list(shape.inputs) if shape is not None and shape.op_type == "Concat" else []
        of_weight = parts[0].producer() if len(parts) > 1 and parts[0] is not None else None
        if of_weight is None or of_weight.op_type != "Shape" or of_weight.inputs[0] is not node.inputs[1]:
            continue
        number = zero.inputs[0] if zero is not None and zero.op_type == "CastLike" else None
        scalar = None if number is None else ir.convenience.get_const_tensor(number)
        if scalar is not None and scalar.size == 1 and not scalar.numpy().item():
            node.resize_inputs(2)


def _add_behind(graph: ir.Graph, product: ir.Node, bias: ir.Value) -> None:
    """Replace the result of a product by its sum with ``bias``, under the same name."""
    out = product.outputs[0]
    total = ir.node("Add", [out, bias], name=f"{product.name}/bias")
    out.replace_all_uses_with(total.outputs[0], replace_graph_outputs=True)
    total.replace_input_with(0, out)
    total.outputs[0].name, total.outputs[0].type, total.outputs[0].shape = out.name, out.type, out.shape
    out.name = f"{out.name}/product"
    graph.insert_after(product, total)


_SCOPES = "pkg.torch.onnx.name_scopes"

_LOCAL_NAMES = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}
"""Input of a normalisation, Conv or Gemm → the module's name of it."""


def _module_of(node: ir.Node) -> str | None:
    """Path of the module in which the node was written; None where nothing is recorded."""
    scopes = re.findall(r"'([^']*)'", node.metadata_props.get(_SCOPES, ""))
    return scopes[-2] if len(scopes) > 1 else None


def _meant(node: ir.Node, index: int, scope: str, name: str, recorded: Mapping[str, str], graph: ir.Graph) -> str | None:
    """The tensor that input ``index`` meant, if not ``name`` itself."""
    normalises = node.op_type.endswith("Normalization")
    if name not in recorded:
        return None  # computed by the exporter, not merged
    if node.op_type == "InstanceNormalization" and "group_norm" in node.metadata_props.get(_SCOPES, ""):
        return f"{scope}/Constant_{index}"  # ones and zeros; its parameters follow as Mul and Add
    sibling = _bias_of(node, index)
    if sibling in recorded:
        return sibling if sibling != name else None
    if normalises or node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        target = f"{scope}.{_LOCAL_NAMES.get(index, '')}".lstrip(".")
        if target in recorded:
            return target if target != name else None
        if normalises and name.rpartition(".")[0] != scope and not any(known.startswith(f"{scope}.") for known in recorded):
            return f"{scope}/Constant_{index}"  # a normalisation without parameters
        return None
    if name.rpartition(".")[0] == scope:
        return None
    missing = [known for known in recorded if known.rpartition(".")[0] == scope and known not in graph.initializers]
    return missing[0] if len(missing) == 1 and scope else None


def _bias_of(node: ir.Node, index: int) -> str:
    """Name of the bias that belongs to the weight of a product, if input ``index`` of ``node`` is its bias; else empty."""
    weight: ir.Value | None = None
    if node.op_type in ("Conv", "ConvTranspose", "Gemm") and index == 2:
        weight = node.inputs[1]
    elif node.op_type == "Add":
        other = node.inputs[1 - index]
        product = other.producer() if other is not None else None
        weight = product.inputs[1] if product is not None and product.op_type == "MatMul" else None
    return _bias_name(weight)


def _bias_name(weight: ir.Value | None) -> str:
    """Name of the bias beside a weight, or beside the one from which all of it was folded; else empty."""
    if weight is None:
        return ""
    sources = folded_from(weight) or [weight.name or ""]
    return f"{sources[0].removesuffix('weight')}bias" if len(sources) == 1 and sources[0].endswith("weight") else ""

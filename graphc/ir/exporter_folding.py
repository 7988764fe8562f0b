"""Undoes what PyTorch's exporter folded, where training would differ: tied weights, functions and copies of a parameter.

    before  val_12 = transpose of h.weight, an initializer    exp = e to the power of logit_scale      expand = cls, 4 times
    after   h.weight ─► Transpose ─► val_12                   logit_scale ─► Exp ─► exp                cls ─► Expand ─► expand

The exporter records from which parameters it computed an initializer. Other folded parameters (a transposed weight of one
layer) train as they are, to the same result.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.ir.exporter_records import folded_from, recorded_kinds
from graphc.ir.facts import FLOATS

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_INVERSES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "exp": ("Exp", np.log),
    "neg": ("Neg", np.negative),
    "sigmoid": ("Sigmoid", lambda y: np.log(y) - np.log1p(-y)),
    "softplus": ("Softplus", lambda y: y + np.log(-np.expm1(-y))),
    "tanh": ("Tanh", np.arctanh),
}
"""PyTorch's name of a function, which its results have → the op and the inverse."""


def unfold(graph: ir.Graph) -> bool:
    """Restore parameters of ``graph`` from which its exporter computed initializers; returns whether it changed."""
    recorded = recorded_kinds(graph)
    changed = False
    for value in list(graph.initializers.values()) if recorded else ():
        sources = [name for name in folded_from(value) or () if recorded.get(name) == "PARAMETER"]
        tensor = value.const_value
        if len(sources) != 1 or tensor is None or tensor.dtype not in FLOATS or value.is_graph_output():
            continue
        changed |= _unfold(graph, value, tensor, sources[0])
    return changed


def _unfold(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, name: str) -> bool:
    parameter = graph.initializers.get(name)
    function = re.sub(r"_\d+$", "", value.name or "")
    if parameter is not None and parameter.const_value is not None:
        if _is_transposed(tensor.numpy(), parameter.const_value.numpy()):
            _compute(graph, value, ir.node("Transpose", [parameter], {"perm": [1, 0]}))
            return True
        return False
    if function in _INVERSES and folded_from(value) == [name]:
        op_type, inverse = _INVERSES[function]
        original = inverse(tensor.numpy().astype(np.float64))
        if np.isfinite(original).all():
            _compute(graph, value, ir.node(op_type, [_restored(graph, name, original, tensor.dtype)]))
            return True
    if function == "expand" and len(tensor.shape) > 1 and tensor.shape[0] != 1:
        array = tensor.numpy()
        if bool((array == array[:1]).all()):
            sizes = ir.tensor(np.array(array.shape, np.int64), name=f"{value.name}/shape")
            shape = ir.Value(name=sizes.name, type=ir.TensorType(sizes.dtype), shape=ir.Shape(sizes.shape), const_value=sizes)
            graph.register_initializer(shape)
            _compute(graph, value, ir.node("Expand", [_restored(graph, name, array[:1], tensor.dtype), shape]))
            return True
    return False


def _is_transposed(array: Array, original: Array) -> bool:
    return array.ndim == 2 and array.shape == original.shape[::-1] and bool((array == original.T).all())


def _restored(graph: ir.Graph, name: str, array: Array, dtype: ir.DataType) -> ir.Value:
    tensor = ir.Tensor(np.ascontiguousarray(array.astype(dtype.numpy())).reshape(array.shape), dtype=dtype, name=name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def _compute(graph: ir.Graph, value: ir.Value, node: ir.Node) -> None:
    """Let ``node`` compute what the initializer ``value`` held, under its name."""
    name = value.name or ""
    del graph.initializers[name]
    value.replace_all_uses_with(node.outputs[0])
    node.name = f"{name}/{node.op_type}"
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
    first = next(iter(graph), None)
    if first is None:
        graph.append(node)
    else:
        graph.insert_before(first, node)

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

from graphc.frontends.exporter_merging import drop_biases_of_volumes, restore_biases, separate_merged
from graphc.ir.exporter_records import folded_from, recorded_kinds
from graphc.ir.facts import FLOATS
from graphc.ir.state import repeats_one_value

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_INVERSES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "exp": ("Exp", np.log),
    "neg": ("Neg", np.negative),
    "sigmoid": ("Sigmoid", lambda y: np.log(y) - np.log1p(-y)),
    "softplus": ("Softplus", lambda y: y + np.log(-np.expm1(-y))),
    "tanh": ("Tanh", np.arctanh),
}
"""PyTorch's name of a function, which its results have → the op and the inverse."""


def restore(graph: ir.Graph) -> None:
    """Give ``graph`` the parameters again that its exporter merged, dropped or computed something from.

    In files without the records of PyTorch's newer exporter, only tied weights and biases of another shape.
    """
    _tie(graph)
    drop_biases_of_volumes(graph)
    separate_merged(graph)
    restore_biases(graph)
    recorded = recorded_kinds(graph)
    for value in list(graph.initializers.values()) if recorded else ():
        sources = [name for name in folded_from(value) or () if recorded.get(name) == "PARAMETER"]
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS or value.is_graph_output():
            continue
        kept = [graph.initializers[name] for name in sources if name in graph.initializers]
        if not any(_copies(graph, value, tensor, parameter) for parameter in kept) and len(sources) == 1 and not kept:
            _unfold(graph, value, tensor, sources[0])


def _tie(graph: ir.Graph) -> None:
    """Read a transposed copy of a weight, which the older exporter folds, from the weight itself."""
    copies = [v for name, v in graph.initializers.items() if _TRANSPOSED.fullmatch(name) and v.const_value is not None]
    shapes = {tuple(v.const_value.shape)[::-1] for v in copies if v.const_value is not None}
    for value in list(graph.initializers.values()) if copies else ():
        if value in copies or value.const_value is None or tuple(value.const_value.shape) not in shapes:
            continue
        for copy in copies:
            tensor = copy.const_value
            if tensor is not None and copy.is_initializer() and copy.uses() and not repeats_one_value(tensor):
                _copies(graph, copy, tensor, value)


_TRANSPOSED = re.compile(r"onnx::MatMul_\d+")


def _copies(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, parameter: ir.Value) -> bool:
    """Read ``value`` from a parameter that is still there, where it is its transpose or repeats it along leading axes."""
    if parameter.const_value is None:
        return False
    array, original = tensor.numpy(), parameter.const_value.numpy()
    if _is_transposed(array, original):
        _compute(graph, value, ir.node("Transpose", [parameter], {"perm": [1, 0]}))
    elif array.ndim >= original.ndim > 0 and array.shape[array.ndim - original.ndim :] == original.shape:
        if not bool((array == original).all()):
            return False
        _compute(graph, value, ir.node("Expand", [parameter, _sizes(graph, value, array)]))
    else:
        return False
    return True


def _sizes(graph: ir.Graph, value: ir.Value, array: Array) -> ir.Value:
    """A new initializer with the shape of ``array``."""
    tensor = ir.tensor(np.array(array.shape, np.int64), name=f"{value.name}/shape")
    shape = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([array.ndim]), const_value=tensor)
    graph.register_initializer(shape)
    return shape


def _unfold(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, name: str) -> None:
    """Restore the parameter ``name`` from which ``value`` was computed, where the function is known."""
    function = re.sub(r"_\d+$", "", value.name or "")
    if function in _INVERSES and folded_from(value) == [name]:
        op_type, inverse = _INVERSES[function]
        original = inverse(tensor.numpy().astype(np.float64))
        if np.isfinite(original).all():
            _compute(graph, value, ir.node(op_type, [_restored(graph, name, original, tensor.dtype)]))
    elif function == "expand" and len(tensor.shape) > 1 and tensor.shape[0] != 1:
        array = tensor.numpy()
        if bool((array == array[:1]).all()):
            restored = _restored(graph, name, array[:1], tensor.dtype)
            _compute(graph, value, ir.node("Expand", [restored, _sizes(graph, value, array)]))


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

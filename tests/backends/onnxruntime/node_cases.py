"""Models of one node, run by its native kernel and by its decomposition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.backend import Binding, Pool, native_kernel
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of
from graphc.ir.ops.attention import written
from graphc.ir.ops.recurrent_gradient import GRADIENTS
from graphc.ir.ops.recurrent_training import OUTPUTS
from graphc.passes.legalize.decompose import decompose_graph

Arrays = Sequence["np.ndarray[Any, Any] | None"]
"""Operands of a node; None: omitted."""


def single_node(op: str, arrays: Arrays, attributes: Mapping[str, Any], constants: Sequence[int]) -> ir.Model:
    """A model of one node; ``constants`` are the inputs that are part of the graph, shapes above all."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": 1}, name="one")
    builder, values = Builder(graph), []
    for index, array in enumerate(arrays):
        if array is None or index in constants:
            values.append(None if array is None else builder.const(array))
            continue
        value = ir.Value(name=f"i{index}", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
        graph.inputs.append(value)
        values.append(value)
    domain = "graphc" if op.startswith("graphc::") else ""
    count = None
    if op.endswith("AttentionGrad"):  # one output for each of several operands: those that do not share a tensor
        count = len(written(attributes["layout"]))
    elif "cell" in attributes:
        count = (GRADIENTS if op.endswith("Grad") else OUTPUTS)[attributes["cell"]]
    graph.outputs.extend(builder.emit(op.removeprefix("graphc::"), values, attributes, domain=domain, outputs=count))
    return ir.Model(graph, ir_version=IR_VERSION)


def reference(
    op: str, arrays: Arrays, attributes: Mapping[str, Any], constants: Sequence[int] = ()
) -> list[np.ndarray[Any, Any]]:
    """The outputs of the op's decomposition in onnxruntime."""
    model = single_node(op, arrays, attributes, constants)
    decompose_graph(model.graph, lambda node: False)
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {f"i{k}": a for k, a in enumerate(arrays) if a is not None and k not in constants}
    return list(session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()}))


def native(
    op: str,
    arrays: Arrays,
    attributes: Mapping[str, Any],
    pool: Pool,
    like: Sequence[np.ndarray[Any, Any]],
    constants: Sequence[int] = (),
) -> list[np.ndarray[Any, Any]]:
    """The outputs of the native kernel, run twice into buffers that hold rubbish before, and in place of operands if it can."""
    node = next(n for n in single_node(op, arrays, attributes, constants).graph if n.op_type != "Constant")
    kernel = native_kernel("onnxruntime", node)
    assert kernel is not None
    outputs = [np.full(a.shape, 77, a.dtype) for a in like]
    declaration = declaration_of(node)
    values = declaration.attribute_values(node) if declaration else {k: a.value for k, a in node.attributes.items()}
    run = kernel.bind(Binding(node, arrays, outputs, values, pool, {}))
    run()
    first = [a.copy() for a in outputs]
    run()
    for a, b in zip(first, outputs, strict=True):
        assert a.tobytes() == b.tobytes()  # the same in every run
    own = [None if a is None else a.copy() for a in arrays]
    places = {k: i for k, i in kernel.inplace.items() if k < len(like) and i < len(own) and _fits(own[i], outputs[k])}
    within = [own[places[k]] if k in places else np.full(a.shape, 77, a.dtype) for k, a in enumerate(like)]
    if places:
        kernel.bind(Binding(node, own, within, values, pool, places))()
    for k in places:
        assert within[k].tobytes() == outputs[k].tobytes()  # and in the place of an operand
    return outputs


def used_pool(threads: int) -> Iterator[Any]:
    """A pool whose scratchpad holds what others leave there."""
    from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
    from graphc.backends.onnxruntime.pool import ThreadPool

    made = ThreadPool(threads)
    scratchpad_of(made).floats((1 << 22,))[0][:] = np.nan
    yield made
    made.close()


def _fits(operand: np.ndarray[Any, Any] | None, output: np.ndarray[Any, Any]) -> bool:
    return operand is not None and (operand.shape, operand.dtype) == (output.shape, output.dtype)


def compare(
    op: str,
    arrays: Arrays,
    attributes: Mapping[str, Any],
    pool: Pool,
    constants: Sequence[int] = (),
    tolerance: float = 2e-6,
) -> None:
    wanted = reference(op, arrays, attributes, constants)
    for got, want in zip(native(op, arrays, attributes, pool, wanted, constants), wanted, strict=True):
        scale = float(np.abs(np.nan_to_num(want)).max(initial=1e-30))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)

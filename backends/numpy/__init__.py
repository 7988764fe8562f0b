"""The reference backend: slow and obviously right. ``onnx.reference`` runs segments; there are no native kernels.

Where the evaluator of ``onnx.reference`` is wrong, :mod:`graphc.backends.numpy.operators` replaces its implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from graphc.backend import BACKENDS, Backend, Whole
from graphc.backends.numpy.operators import REPAIRED
from graphc.device import Array, Arrays, HostMemory, Memory, Run
from graphc.errors import ExecutionError, ModelError, UnsupportedOpError
from graphc.ir import OPSET
from graphc.ir.builder import Builder
from graphc.ir.decomposition import replace_nodes
from graphc.ir.infer import propagate
from graphc.ir.ops.recurrent import RECURRENT, recurrence
from graphc.ir.ops.sampling import deform_conv, grid_sample
from graphc.ir.serialize import to_proto


class NumpyBackend(Backend):
    """Runs every ``graphc`` op through its decomposition; ``threads`` and ``spin`` are accepted and unused."""

    name = "numpy"

    def __init__(self, *, threads: int = 1, spin: bool = False) -> None:
        del threads, spin
        self.memory: Memory = HostMemory()

    def bind_segment(
        self, model: onnx.ModelProto, inputs: Arrays, outputs: Arrays, *, reusable_buffers: Sequence[Array] = ()
    ) -> Run:
        evaluator, names = _evaluator(model), list(outputs)

        def run() -> None:
            for name, value in zip(names, _evaluated(evaluator, names, inputs), strict=True):
                if np.shape(value) != outputs[name].shape:
                    raise ModelError(f"{name!r} has shape {list(np.shape(value))}, {list(outputs[name].shape)} was planned")
                np.copyto(outputs[name], value)

        return run

    def bind_whole(self, model: onnx.ModelProto) -> Whole:
        names, evaluator = [value.name for value in model.graph.output], _evaluator(model)
        return lambda feeds: dict(zip(names, _evaluated(evaluator, names, feeds), strict=True))


PARTS: Mapping[str, Any] = {
    **dict.fromkeys(RECURRENT, recurrence),
    "DeformConv": lambda op, node: (deform_conv(op, node),),
    "GridSample": lambda op, node: (grid_sample(op, node),),
}
"""Ops that run through simpler ones. The RNN, GRU and LSTM of ``onnx.reference`` ignore lengths, activations and clipping; the
others compute positions in float32.
"""


def _evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    try:
        return ReferenceEvaluator(_simpler(model), new_ops=list(REPAIRED))
    except Exception as error:
        raise UnsupportedOpError(f"the numpy backend cannot run this model: {error}") from error


def _evaluated(evaluator: ReferenceEvaluator, names: list[str], feeds: Mapping[str, Any]) -> list[Any]:
    try:
        return list(evaluator.run(names, dict(feeds)))
    except Exception as error:
        raise ExecutionError(f"a segment failed in the numpy backend: {error}") from error


def _simpler(model: onnx.ModelProto) -> onnx.ModelProto:
    version = next((o.version for o in model.opset_import if o.domain == ""), None)
    if version != OPSET or not any(node.op_type in PARTS for node in model.graph.node):
        return model
    copy = ir.from_proto(model)
    propagate(copy.graph)
    replace_nodes(Builder(copy.graph), copy.graph, PARTS)
    return to_proto(copy)


BACKENDS.register("numpy", NumpyBackend, origin=__name__)

"""The reference backend: slow, obviously right. Segments run in ``onnx.reference``; there are no native kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from graphc.backend import BACKENDS, Array, Run
from graphc.errors import UnsupportedOpError


class NumpyBackend:
    """Every ``graphc`` op runs through its decomposition. ``threads`` and ``spin`` are accepted and unused."""

    name = "numpy"

    def __init__(self, *, threads: int = 1, spin: bool = False) -> None:
        del threads, spin

    def prefers_native(self, node: ir.Node) -> bool:
        return False

    def bind_segment(self, model: onnx.ModelProto, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Run:
        try:
            evaluator = ReferenceEvaluator(model)
        except Exception as error:
            raise UnsupportedOpError(f"the numpy backend cannot run this segment: {error}") from error
        names = list(outputs)

        def run() -> None:
            for name, value in zip(names, evaluator.run(names, dict(inputs)), strict=True):
                np.copyto(outputs[name], value)

        return run

    def bind_kernel(
        self, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array], aliases: Mapping[int, int]
    ) -> Run:
        raise UnsupportedOpError(f"the numpy backend has no native kernel for {node.op_type}")

    def inplace(self, node: ir.Node) -> Mapping[int, int]:
        return {}

    def all_finite(self, array: Array) -> bool:
        return bool(np.isfinite(array).all())

    def close(self) -> None:
        """Nothing to release."""


BACKENDS.register("numpy", NumpyBackend, origin=__name__)

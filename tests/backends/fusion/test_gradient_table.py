"""A sample of the table of gradient rules on the kernels of the GPU backend: on a GPU, and on the host in its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphc.backends.cupy import CupyBackend
from graphc.ir.facts import static_dims
from graphc.plan.specialise import prepare
from tests.backends.host_kernels import HostDevice, run_segment
from tests.passes.gradients.table_cases import CASES, NO_KERNEL, SINGLE, Case, label

SAMPLE = [case for case in CASES if case[0] not in NO_KERNEL]


def on(device: Any) -> Callable[[ir.Model], Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """What compiles a model for ``device``, with the ops that its segments hold left whole."""
    backend = CupyBackend(device=device)

    def compile_with(model: ir.Model) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        copy = ir.from_proto(ir.to_proto(model))

        def run(feeds: Mapping[str, Any]) -> dict[str, Any]:
            arrays = {v.name or "": np.asarray(feeds[v.name or ""]) for v in copy.graph.inputs}
            ready = prepare(copy, {name: array.shape for name, array in arrays.items()}, backend)
            if any(static_dims(v) is None for node in ready.graph for v in node.outputs):
                return backend.bind_whole(ir.to_proto(ready))(arrays)  # no plan holds shapes that depend on data
            found, _ = run_segment(ir.to_proto(ready), arrays, device)
            return {name: np.asarray(array) for name, array in found.items()}

        return run

    return compile_with


def check(case: Case, device: Any) -> None:
    """The gradients of one row of the table are those of central differences, in float32."""
    from tests.gradient_check import check_op

    op_type, inputs, attributes = case
    domain, _, name = op_type.rpartition("::")
    single = [x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x for x in inputs]
    options: dict[str, Any] = {**attributes, **SINGLE, "tolerance": 2e-2, "symbolic": 0, "compile_with": on(device)}
    if name == "Cast":
        options["to"] = 1
    check_op(name, single, domain=domain, **options)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", SAMPLE[5::20], ids=label)
def test_rules_of_a_sample_on_generated_kernels(case: Case) -> None:
    check(case, HostDevice())


@pytest.mark.gpu
@pytest.mark.parametrize("case", SAMPLE[::3], ids=label)
def test_rules_on_a_gpu(case: Case) -> None:
    from graphc.backends.cupy.device.cuda_device import CudaDevice

    check(case, CudaDevice())

"""The kernel that runs products without an algorithm in cuBLASLt gives the numbers that the library would give."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from graphc.backends.cupy.libraries import gemm_kernel
from graphc.backends.cupy.libraries.gemm import DOMAIN, product_of
from tests.backends.cupy.libraries.gemm_cases import CASES, FEEDS, TORCH, by_torch, check_case, gradients_segment, network
from tests.backends.host_kernels import EmulatedDevice, HostDevice, run_segment

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def bind(device: Any, library: Any, node: ir.Node, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], None]:
    if node.domain == DOMAIN:
        return gemm_kernel.bind_product(device, product_of(node), inputs, outputs)
    return library.bind(device, node, inputs, outputs)  # type: ignore[no-any-return]


class HostWithoutLibrary(HostDevice):
    call_library = bind  # type: ignore[assignment]


class EmulatedWithoutLibrary(EmulatedDevice):
    call_library = bind  # type: ignore[assignment]


@pytest.mark.parametrize("name", [*CASES])
def test_views_sums_and_factors(name: str) -> None:
    check_case(name, HostWithoutLibrary(), 2e-6)


@pytest.mark.parametrize(
    ("kind", "precision", "device"),
    [
        ("relu", None, HostWithoutLibrary),
        pytest.param("relu", "bf16", EmulatedWithoutLibrary, marks=pytest.mark.full),
        ("tanh", "bf16", HostWithoutLibrary),
        pytest.param("tanh", "fp16", HostWithoutLibrary, marks=pytest.mark.full),
    ],
)
def test_every_epilogue_has_the_gradients_of_pytorch(kind: str, precision: str | None, device: Callable[[], Any]) -> None:
    model = gradients_segment(network("Relu") if kind == "relu" else network("Gelu"), precision)
    results, _ = run_segment(model, FEEDS, device(), choose=lambda *_: True)
    expected = by_torch(TORCH[kind], {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    tolerance = {None: 2e-6, "bf16": 2**-6, "fp16": 2**-9}[precision]
    for name, value in expected.items():
        got = results[name] / (1024.0 if precision == "fp16" and name != "loss" else 1.0)
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(got / scale, value / scale, rtol=0, atol=tolerance, err_msg=name)

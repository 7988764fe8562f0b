"""Gradients of ONNX's own cases through the GPU backend's kernels, against the same graphs in float64."""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.test_case import TestCase

from graphc.training.inference import run_model
from tests.backends.host_kernels import HostDevice, cupy_on
from tests.conformance import gradient_suite as suite
from tests.conformance.gradient_cases import EXCEPTIONS, ROUGH, SINGLE, UNMATCHED_SINGLE, check
from tests.tiers import params

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="the kernels of the tests need a C++ compiler"
)

OPS = frozenset(
    {"AveragePool", "Conv", "ConvTranspose", "CumSum", "Det", "Einsum", "GRU", "Gather", "GatherElements", "GatherND"}
    | {"GridSample", "InstanceNormalization", "LRN", "LSTM", "LpPool", "MaxPool", "Pad", "RNN", "Resize", "ReverseSequence"}
    | {"ScatterElements", "ScatterND", "TopK"}
)
"""Ops with kernels written by hand, or with gradients made of those."""

EACH = 3
"""Cases of an op."""


def on_gpu_backend(outcome: Any, backward: onnx.ModelProto, names: Mapping[str, str], feeds: Any, gradients: Any) -> None:
    """In place of the comparison with onnxruntime."""
    wanted = {v.name for v in backward.graph.input}
    found = run_model(backward, {k: suite.cast(v, np.float32) for k, v in feeds.items() if k in wanted}, "cupy")
    for name, output in names.items():
        exact, got = np.asarray(gradients[output], np.float64), np.asarray(found[output], np.float64)
        outcome.single[name] = float(np.abs(exact - got).max(initial=0.0)) / max(float(np.abs(exact).max(initial=0.0)), 1e-3)


def chosen() -> list[TestCase]:
    found: dict[str, list[TestCase]] = {}
    for case in sorted(suite.collect(), key=lambda case: case.name):
        op = suite.op_of(case)
        if op in OPS and not {op, case.name} & {*EXCEPTIONS, *UNMATCHED_SINGLE}:
            found.setdefault(op, []).append(case)
    return [case for cases in found.values() for case in cases[:: max(1, len(cases) // EACH)][:EACH]]


@pytest.mark.full
@pytest.mark.parametrize("part", params(range(3), large=[1]))
def test_gradients_of_ops_with_kernels_of_their_own(
    part: int, monkeypatch: pytest.MonkeyPatch, register_backend: Callable[..., None]
) -> None:
    register_backend("cupy", lambda **_: cupy_on(HostDevice()))
    monkeypatch.setattr(suite, "_compare_single", on_gpu_backend)
    logging.getLogger("graphc.cupy").setLevel(logging.ERROR)
    wrong, compared = [], 0
    for case in chosen()[part::3]:
        limit = ROUGH.get(suite.op_of(case), (SINGLE, ""))[0]
        outcome = check(case)
        compared += len(outcome.single)
        wrong += [f"{case.name} {name}: {error:.1e}" for name, error in outcome.single.items() if not error <= limit]
    assert compared > 15
    assert not wrong, "\n".join(wrong)

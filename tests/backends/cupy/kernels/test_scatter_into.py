"""Weights that an embedding and a product share: the embedding's gradient is added to the product's where that lies."""

from __future__ import annotations

import shutil
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

from graphc.backends.cupy.segment.program import KernelCall
from tests.backends.host_kernels import EmulatedDevice, HostDevice, run_segment

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

WORDS, WIDTH, TOKENS = 40, 24, 96

TEXT = f"""<ir_version: 10, opset_import: ["" : 26]>
g (bfloat16[{TOKENS},{WORDS}] dlogits, bfloat16[{TOKENS},{WIDTH}] h, int64[{TOKENS},1] ids, float[{TOKENS},{WIDTH}] dx,
   float[{WORDS},{WIDTH}] w) => (RESULTS) {{
  t = Transpose<perm=[1,0]>(dlogits)
  head = MatMul(t, h)
  wide = Cast<to=1>(head)
  zero = Constant<value_float=0.0>()
  shape = Constant<value_ints=[{WORDS},{WIDTH}]>()
  zeros = Expand(zero, shape)
  rows = ScatterND<reduction="add">(zeros, ids, dx)
  dw = Add(SUM)
}}"""


def model(operands: str, *more: str) -> onnx.ModelProto:
    results = ", ".join(f"float[{WORDS},{WIDTH}] {name}" for name in ("dw", *more))
    return onnx.parser.parse_model(TEXT.replace("SUM", operands).replace("RESULTS", results))


def feeds() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    low = {name: rng.standard_normal((TOKENS, n)).astype(ml_dtypes.bfloat16) for name, n in (("dlogits", WORDS), ("h", WIDTH))}
    ids = rng.integers(0, WORDS, (TOKENS, 1))
    w = np.ones((WORDS, WIDTH), np.float32)
    return {**low, "w": w, "ids": np.minimum(ids, 30), "dx": rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)}


def expected(given: dict[str, Any]) -> Any:
    dlogits, h = (torch.from_numpy(given[name].astype(np.float64)) for name in ("dlogits", "h"))
    ids, dx = torch.from_numpy(given["ids"][:, 0]), torch.from_numpy(given["dx"]).double()
    return (dlogits.T @ h).index_add(0, ids, dx).numpy()


@pytest.mark.parametrize("device", [HostDevice(), EmulatedDevice(1)], ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("order", ["wide, rows", "rows, wide"])
def test_the_sum_is_pytorchs_and_no_kernel_walks_over_all_weights(device: HostDevice, order: str) -> None:
    given = feeds()
    found, segment = run_segment(model(order), given, device)
    np.testing.assert_allclose(found["dw"], expected(given), rtol=0, atol=1e-4)  # the product is summed in float32
    kernels = [call.source for call in segment.calls if isinstance(call, KernelCall)]
    assert not [source for source in kernels if source.rows == WORDS * WIDTH], "neither zeros nor a sum"


def test_what_somebody_else_reads_is_not_added_to() -> None:
    given = feeds()
    found, _ = run_segment(model("wide, rows", "wide"), given, HostDevice())
    none = {**given, "dx": np.zeros_like(given["dx"])}
    np.testing.assert_allclose(found["dw"], expected(given), rtol=0, atol=0.1)  # the product is rounded to bfloat16
    np.testing.assert_allclose(found["wide"], expected(none), rtol=0, atol=0.1)


def test_what_comes_from_outside_is_not_overwritten() -> None:
    given = feeds()
    found, _ = run_segment(model("w, rows"), given, HostDevice())
    total = np.ones((WORDS, WIDTH))
    np.add.at(total, given["ids"][:, 0], given["dx"])
    np.testing.assert_allclose(found["dw"], total, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(given["w"], 1)

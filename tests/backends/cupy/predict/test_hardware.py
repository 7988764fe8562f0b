"""Predictions are ranges, for any described GPU, from constants that name their source."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.libraries.gemm import Matrix, Product
from graphc.backends.cupy.predict import hardware
from graphc.backends.cupy.predict.cost_model import CostModel
from graphc.backends.cupy.predict.hardware import GPUS, Figure, Machine, gpu_named, gpu_of
from graphc.backends.cupy.predict.library_cost import product
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import KernelCall
from graphc.errors import UsageError
from tests.backends.cupy.predict.cost_cases import HEAD

RECTIFIED = "(bfloat16[16384,4096] x) => (bfloat16[16384,4096] y) { y = Relu(x) }"


def kernel() -> KernelCall:
    (call,) = compile_segment(onnx.parser.parse_model(HEAD + RECTIFIED)).calls
    assert isinstance(call, KernelCall)
    return call


def seconds(m: int, n: int, k: int, gpu: str = "h200", **more: str) -> tuple[float, float]:
    """Least and most time of a bfloat16 product."""
    a, b, d = Matrix(m, k, k, 1), Matrix(k, n, 1, k), Matrix(m, n, n, 1)
    estimate, _, _ = product(Product(a, b, d, ir.DataType.BFLOAT16, ir.DataType.BFLOAT16, **more), 0)  # type: ignore[arg-type]
    return estimate(Machine(gpu_of(gpu), fast=True)), estimate(Machine(gpu_of(gpu), fast=False))


def test_every_constant_says_where_it_comes_from() -> None:
    held = [value for value in vars(hardware).values() if isinstance(value, Figure)]
    held += [figure for gpu in GPUS.values() for figure in (gpu.clock, gpu.memory, gpu.product)]
    assert len(held) > 30
    assert all(figure.source.startswith(("measured", "data sheet", "assumed")) for figure in held)


def test_a_kernel_takes_its_bytes_at_the_memory_s_rate_within_a_range() -> None:
    cost = CostModel().call(kernel())
    assert cost.nbytes == 2 * 2 * 16384 * 4096
    assert cost.low < cost.nbytes / (0.9 * 4.27e12) < cost.high
    others = {name: CostModel(gpu_of(name)).call(kernel()) for name in GPUS}
    assert others["l4"].low > others["rtx4090"].high > others["a100"].high > others["h200"].high > others["b200"].high


def test_few_bytes_in_flight_cost_more_than_their_number_says() -> None:
    call = kernel()
    few = KernelCall(call.source, call.name, call.text, Shape(32, 1, 256, 1, 132), call.parts)
    found = CostModel().call(few)
    assert found.note == "bound by loads in flight"
    assert found.low > 4 * CostModel().call(call).high


def test_a_product_s_tiles_go_in_whole_waves_and_a_long_sum_is_split() -> None:
    low, high = seconds(16384, 3072, 768)
    rate = 2 * 16384 * 3072 * 768 / 1e12
    assert rate / high < 605 < rate / low, "TFLOP/s as measured over GPT-2's layers"
    one, two = seconds(132 * 256, 128, 8192), seconds(133 * 256, 128, 8192)
    assert two[1] > 1.2 * one[1], "one tile more than the multiprocessors"
    few_tiles, many_tiles = seconds(768, 768, 16384), seconds(16384, 768, 768)
    assert few_tiles[1] < 1.6 * many_tiles[1], "36 tiles would leave most multiprocessors idle; the sum is split"
    assert seconds(16384, 3072, 768, epilogue="gelu")[1] > 1.1 * high


def test_a_gpu_is_found_by_its_driver_s_name_and_an_unknown_one_is_named() -> None:
    assert gpu_named("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpu_named("NVIDIA GeForce RTX 4090") is GPUS["rtx4090"]
    with pytest.raises(UsageError, match=r"no GPU 'h20' is described; did you mean 'h200'.* there are a100"):
        gpu_of("h20")

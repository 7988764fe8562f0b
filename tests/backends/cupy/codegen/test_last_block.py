"""The last block of those that share a sum adds up the totals of all: the bits of a second kernel, without its launch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphc.backends.cupy.codegen import vectorize
from graphc.backends.cupy.codegen.launch_shape import Shape
from graphc.backends.cupy.predict.cost_model import CostModel
from graphc.backends.cupy.predict.hardware import FINISH, KERNEL_MEMORY, LAST_BLOCK, TICKET, Figure
from graphc.backends.cupy.predict.traffic import adds_partials
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.backends.cupy.segment.program import Call, KernelCall
from graphc.ir.facts import static_dims
from graphc.plan.specialise import prepare
from tests.backends.cupy.predict.cost_cases import HEAD, NORMALISED
from tests.backends.host_kernels import EmulatedDevice, HostDevice, run_segment
from tests.backends.strict import host_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

STATISTICS = """(float[700,72] x, float[72] running) => (float[72] mean, float[72] next, float[72] norm) {
    a = Constant<value_ints=[0]>() m = Constant<value=float {0.9}>() n = Constant<value=float {0.1}>()
    mean = ReduceMean<keepdims=0>(x, a) norm = ReduceL2<keepdims=0>(x, a)
    old = Mul(running, m) new = Mul(mean, n) next = Add(old, new) }"""
"""A batch statistic with its running average, and a sum beside it; neighbouring rows of the kernel are neighbours in memory."""

LOSS = """(float[3,5000] x) => (float[3] mean, double[3] most) {
    a = Constant<value_ints=[1]>() mean = ReduceMean<keepdims=0>(x, a)
    d = Cast<to=11>(x) most = ReduceMax<keepdims=0>(d, a) }"""
"""Sums of few long rows, of two types."""


def feeds() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((700, 72)).astype(np.float32), "running": rng.standard_normal(72).astype(np.float32)}


def of_loss() -> dict[str, Any]:
    return {"x": np.random.default_rng(1).standard_normal((3, 5000)).astype(np.float32)}


def check_statistics(found: dict[str, Any]) -> None:
    x, running = (feeds()[name].astype(np.float64) for name in ("x", "running"))
    np.testing.assert_allclose(found["mean"], x.mean(0), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["next"], 0.9 * running + 0.1 * x.mean(0), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["norm"], np.sqrt((x * x).sum(0)), rtol=1e-6)


def check_loss(found: dict[str, Any]) -> None:
    x = of_loss()["x"].astype(np.float64)
    np.testing.assert_allclose(found["mean"], x.mean(1), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(found["most"], x.max(1))


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "order"), [(HostDevice, None), (EmulatedDevice, 0), (EmulatedDevice, 1), (EmulatedDevice, 2)], ids=str
)
@pytest.mark.parametrize(("text", "given", "check"), [(STATISTICS, feeds, check_statistics), (LOSS, of_loss, check_loss)])
def test_one_kernel_gives_the_bits_of_two(
    kind: type[HostDevice], order: int | None, text: str, given: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds the counters that the first has left. The emulation checks every access to memory."""
    model, device = onnx.parser.parse_model(HEAD + text), kind() if order is None else kind(order, watched=True)
    found, segment = run_segment(model, given(), device, splits=5)
    check(found)
    assert len(segment.calls) == 1
    monkeypatch.setattr(vectorize, "MOST_TOTALS", 0)
    other, apart = run_segment(model, given(), device, splits=5)
    assert len(apart.calls) == 2
    assert all(value.tobytes() == other[name].tobytes() for name, value in found.items())


@needs_compiler
def test_counters_are_zero_afterwards_and_belong_to_one_launch_each() -> None:
    """Two sums that do not depend on each other might run at once."""
    text = """(float[700,72] x, float[500,72] y) => (float[72] s, float[72] t) {
        a = Constant<value_ints=[0]>() s = ReduceSum<keepdims=0>(x, a) t = ReduceSum<keepdims=0>(y, a) }"""
    device = _Listening()
    rng = np.random.default_rng(2)
    given = {name: rng.standard_normal((rows, 72)).astype(np.float32) for name, rows in (("x", 700), ("y", 500))}
    found, segment = run_segment(onnx.parser.parse_model(HEAD + text), given, device, splits=5)
    np.testing.assert_allclose(found["s"], given["x"].astype(np.float64).sum(0), rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["t"], given["y"].astype(np.float64).sum(0), rtol=0, atol=1e-4)
    assert [call.source.finishes for call in segment.calls if isinstance(call, KernelCall)] == [True, True]
    first, second = device.counters
    assert first.nbytes == second.nbytes > 0
    assert not np.shares_memory(host_of(first), host_of(second))
    assert not device.fetch(first).any()
    assert not device.fetch(second).any()


class _Listening(EmulatedDevice):
    """Keeps the counters of every launch."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: list[Any] = []

    def launch(self, kernel: Any, arrays: Sequence[Any], shape: Shape) -> Any:
        self.counters += [array for array in arrays if array.dtype == np.uint32]
        return super().launch(kernel, arrays, shape)


BROKEN = {
    "no fence before the ticket": ("  __threadfence();  // each thread's totals", "  // each thread's totals"),
    "no fence behind it": ("  __threadfence();\n  return true;", "  return true;"),
    "no barrier before it": (
        "__threadfence();  // each thread's totals, before the block is counted\n  __syncthreads();",
        "__threadfence();",
    ),
}
"""Fault → the text of the kernel that is replaced, and by what."""


@needs_compiler
@pytest.mark.parametrize("fault", BROKEN)
def test_the_emulation_reports_what_a_gpu_would_only_rarely_show(fault: str) -> None:
    class Broken(EmulatedDevice):
        def compile(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
            assert all(BROKEN[fault][0] in text for text in texts.values())
            return super().compile({name: text.replace(*BROKEN[fault]) for name, text in texts.items()})

    with pytest.raises(AssertionError, match=r"fenced|reads what another writes"):
        run_segment(onnx.parser.parse_model(HEAD + STATISTICS), feeds(), Broken(watched=True), splits=5)


def mean(figure: Figure) -> float:
    return (figure.fast + figure.slow) / 2


def test_a_last_block_is_taken_where_it_is_estimated_to_take_less_than_a_second_kernel() -> None:
    most = vectorize.MOST_TOTALS

    def last(nbytes: float) -> float:
        return mean(TICKET) + nbytes * (1 / LAST_BLOCK.fast + 1 / LAST_BLOCK.slow) / 2

    assert last(most) < mean(FINISH) < last(1.1 * most)
    pair = (
        "(bfloat16[400000,1024] x) => (bfloat16[1024] y, bfloat16[1024] z) { a = Constant<value_ints=[0]>()"
        " y = ReduceSum<keepdims=0>(x, a) s = Mul(x, x) z = ReduceSum<keepdims=0>(s, a) }"
    )
    few = [len(compile_segment(onnx.parser.parse_model(HEAD + pair.replace("1024", str(n)))).calls) for n in (64, 1024)]
    assert few == [2, 1], "one block of 64 columns would add up the totals of 264, 135 KB"


def test_a_batch_normalisation_and_its_gradient_take_two_kernels_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def finishing(text: str) -> tuple[int, int]:
        calls = [call for call in compiled(text) if isinstance(call, KernelCall)]
        return len(calls), sum(adds_partials(call.source) for call in calls)

    batch, finishes = finishing(NORMALISED)
    assert finishes == 0
    monkeypatch.setattr(vectorize, "MOST_TOTALS", 0)
    assert finishing(NORMALISED) == (batch + 2, 2), "statistics and sums of the gradient"


def compiled(text: str) -> list[Call]:
    model = ir.from_proto(onnx.parser.parse_model(HEAD + text))
    shapes = {v.name or "": list(static_dims(v) or ()) for v in model.graph.inputs}
    return compile_segment(ir.to_proto(prepare(model, shapes))).calls


def test_a_last_block_costs_time() -> None:
    text = "(float[65536,1024] x) => (float[1024] y) { a = Constant<value_ints=[0]>() y = ReduceSum<keepdims=0>(x, a) }"
    (call,) = compile_segment(onnx.parser.parse_model(HEAD + text)).calls
    assert isinstance(call, KernelCall)
    cost = CostModel().call(call)
    moved = 65536 * 1024 * 4 / 4.27e12
    assert cost.low > moved / KERNEL_MEMORY.fast + TICKET.fast
    assert cost.nbytes > 65536 * 1024 * 4

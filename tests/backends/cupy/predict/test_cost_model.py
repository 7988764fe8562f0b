"""What plans move through memory, counted: the passes over large arrays that a training step of each kind should make."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from graphc.backends.cupy.predict.cost_model import CostModel
from graphc.backends.cupy.segment.compile import compile_segment
from graphc.bench.gpu_specs import JOBS
from graphc.bench.predicted import predicted
from graphc.errors import UsageError
from graphc.report.step_time import Cost
from tests.backends.cupy.predict.cost_cases import CROSS_ENTROPY, HEAD, NORMALISED, passes


def test_cross_entropy_reads_the_scores_once_and_writes_their_gradient_once() -> None:
    assert passes(CROSS_ENTROPY, "logits") == pytest.approx(2, abs=0.1)


def test_batch_normalisation_with_its_gradient_takes_seven_passes() -> None:
    """Statistics; normalise and rectify beside the two sums of the gradient; the gradient. The mask is computed again.

    In a network, where the gradient comes later, the sums read x once more.
    """
    assert passes(NORMALISED, "x") == pytest.approx(7, abs=0.2)


def test_a_column_that_lies_apart_costs_what_it_fetches() -> None:
    text = "(float[4096,4096] x) => (float[4096] y) { i = Constant<value_ints=[7]>() a = Constant<value_int=0>()"
    picked = text + " s = Gather<axis=1>(x, i) f = Constant<value_ints=[4096]>() r = Reshape(s, f) y = Exp(r) }"
    (call,) = compile_segment(onnx.parser.parse_model(HEAD + picked)).calls
    assert CostModel().call(call).nbytes == 4096 * (32 + 4), "a sector for each element read, four bytes for each written"


@pytest.mark.full
def test_a_small_job_is_predicted_and_its_products_are_counted_exactly() -> None:
    job = JOBS["mlp-wide"].smaller(batch=64)
    found = predicted("mlp-wide", job=job)
    widths = (784, 4096, 4096, 10)
    forward = sum(2 * 64 * a * b for a, b in itertools.pairwise(widths))
    assert sum(c.flops for c in found.costs if c.centre == "products") == 3 * forward - 2 * 64 * 784 * 4096
    assert not [c.name for c in found.costs if c.centre == "on the host"]
    parameters = sum(a * b + b for a, b in itertools.pairwise(widths))
    updates = sum(c.nbytes for c in found.costs if c.name.startswith("Momentum") or c.name.startswith("SGD"))
    assert updates == pytest.approx(5 * 4 * parameters, rel=0.01), "parameter, gradient and momentum read, two of them written"


@pytest.mark.full
def test_the_check_reads_each_gradient_once_and_no_low_copy() -> None:
    found = predicted("bert", job=JOBS["bert"].tiny())
    (check,) = (cost for cost in found.costs if cost.name == "check of the gradients")
    updates = sum(cost.nbytes for cost in found.costs if cost.name.startswith("AdamW"))
    assert 7 <= updates / check.nbytes < 8, "parameter, both moments, read and written, the gradient, and a low copy of some"


def test_python_costs_time_only_where_the_calls_take_less() -> None:
    """The next step is queued while one runs; between them the GPU copies results and feeds."""

    def calls(seconds: float) -> list[Cost]:
        return [Cost("products", "p", seconds)]

    feeds = 427 << 20
    copied = 2 * feeds / 4.27e12
    long, short = CostModel().step(calls(1e-3), feeds), CostModel().step(calls(20e-6), 0)
    assert (long.low, long.high) == pytest.approx((6e-6 + copied, 15e-6 + copied))
    assert (short.low, short.high) == pytest.approx((40e-6, 130e-6)), "60 to 150 µs with the calls"


def test_an_unknown_job_is_named_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'gpt2'"):
        predicted("gpt-2")


@pytest.mark.full
def test_the_gpu_benchmark_says_why_it_measures_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    command = [sys.executable, "-m", "graphc.bench.gpu", "--output", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(target.read_text())
    if "skipped" not in result:
        pytest.skip("there is a GPU")
    assert "gpu-bench is skipped" in done.stdout
    assert result["skipped"]

"""draws: random ops train, repeat with the seed, have their distributions, and do not depend on how a batch is divided."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import graphc
from graphc.errors import UnsupportedOpError
from graphc.ir.text import from_text
from graphc.training.inference import run_model

RANDOM = {
    "RandomNormalLike": "n = RandomNormalLike <mean = 1.0, scale = 2.0> (h)",
    "RandomUniformLike": "n = RandomUniformLike <low = -1.0, high = 3.0> (h)",
    "RandomNormal": "n = RandomNormal <shape = [8], seed = 3.5> ()",
    "RandomUniform": "n = RandomUniform <shape = [8]> ()",
    "Bernoulli": "p = Sigmoid (h) n = Bernoulli (p)",
    "Multinomial": "m = Multinomial <sample_size = 8> (h) n = Cast <to = 1> (m)",
}


def noisy(node: str, batch: int | str = "N") -> ir.Model:
    weights = ", ".join(f"{0.1 * (k % 7 - 3):.1f}" for k in range(32))
    return from_text(
        f"""<ir_version: 10, opset_import: ["" : 17]>
        main (float[{batch},4] x) => (float[{batch},8] y) <float[4,8] w = {{{weights}}}>
        {{ h = MatMul (x, w)  {node}  y = Add (h, n) }}"""
    )


def feeds(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((rows, 4)).astype(np.float32), "label": rng.integers(0, 8, rows)}


def program(model: Any, **options: Any) -> graphc.Program:
    return graphc.compile(model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), **options)


def losses(compiled: graphc.Program, steps: int = 3, **options: Any) -> list[float]:
    with graphc.Trainer(compiled, threads=1, **options) as trainer:
        return [trainer.step(feeds(8))["loss"] for _ in range(steps)]


@pytest.mark.parametrize("op", RANDOM)
def test_a_random_op_trains_and_repeats_with_the_seed(op: str) -> None:
    model = noisy(RANDOM[op])
    first = losses(program(model, seed=1))
    assert losses(program(model, seed=1)) == first
    assert len(set(first)) == 3, "every step draws other numbers"
    same = losses(program(model, seed=2)) == first
    assert same == ("seed =" in RANDOM[op]), "a node's own seed takes the place of the program's"


@pytest.mark.parametrize("op", RANDOM)
def test_micro_batches_draw_what_the_whole_batch_draws(op: str) -> None:
    model = noisy(RANDOM[op])
    np.testing.assert_allclose(losses(program(model, accumulate=4)), losses(program(model)), rtol=2e-6)


@pytest.mark.parametrize("op", RANDOM)
def test_evaluation_and_a_single_run_draw_too(op: str) -> None:
    model = noisy(RANDOM[op])
    with graphc.Trainer(program(model), threads=1) as trainer:
        found = [trainer.evaluate([feeds(8)])["loss"] for _ in range(2)]
    assert found[0] == found[1]
    drawn = [run_model(model, {"x": feeds(8)["x"]})["y"] for _ in range(2)]
    assert np.array_equal(*drawn) == ("seed =" in RANDOM[op]), "as in other runtimes, each run draws other numbers"


def sample(node: str, rows: int = 4000) -> Any:
    """What a node draws in one run, of five classes with the logarithms of their probabilities as input."""
    text = f"""<ir_version: 10, opset_import: ["" : 17]>
    main (float[N,5] x) => (float[N,5] y) {{ {node} }}"""
    x = np.tile(np.log(np.array([0.1, 0.2, 0.3, 0.15, 0.25], np.float32)), (rows, 1))
    return run_model(from_text(text), {"x": x})["y"].astype(np.float64)


def test_distributions() -> None:
    normal = sample("y = RandomNormalLike <mean = 1.0, scale = 2.0> (x)")
    assert abs(normal.mean() - 1) < 0.08
    assert abs(normal.std() - 2) < 0.06
    assert abs(np.mean(np.abs(normal - 1) < 2) - 0.6827) < 0.02
    assert abs(np.corrcoef(normal[:, 0], normal[:, 1])[0, 1]) < 0.08
    uniform = sample("y = RandomUniformLike <low = -1.0, high = 3.0> (x)")
    assert uniform.min() >= -1
    assert uniform.max() <= 3
    assert abs(uniform.mean() - 1) < 0.05
    assert abs(uniform.var() - 16 / 12) < 0.05
    shares = np.array([0.1, 0.2, 0.3, 0.15, 0.25])
    np.testing.assert_allclose(sample("p = Exp (x) y = Bernoulli (p)").mean(axis=0), shares, atol=0.04)
    classes = sample("m = Multinomial <sample_size = 5> (x) y = Cast <to = 1> (m)").reshape(-1).astype(int)
    np.testing.assert_allclose(np.bincount(classes, minlength=5) / classes.size, shares, atol=0.02)


def test_a_double_and_a_half_have_their_types() -> None:
    for number, dtype in ((11, np.float64), (10, np.float16)):
        model = from_text(
            f"""<ir_version: 10, opset_import: ["" : 17]>
            main (float[N,5] x) => (y) {{ y = RandomNormalLike <dtype = {number}> (x) }}"""
        )
        assert run_model(model, {"x": np.zeros((3, 5), np.float32)})["y"].dtype == dtype


def test_inside_a_loop_it_is_named() -> None:
    model = from_text(
        """<ir_version: 10, opset_import: ["" : 17]>
        main (float[N,4] x) => (float[N,4] y) <float[4,4] w = {}, int64 n = {3}>
        { h = MatMul (x, w)
          y = Loop (n, , h) <body = body (int64 i, bool c, float[N,4] a) => (bool d, float[N,4] b)
            { d = Identity (c)  e = RandomNormalLike (a)  b = Add (a, e) }> }"""
    )
    with pytest.raises(UnsupportedOpError, match=r"(?s)RandomNormalLike.*inside the Loop.*as an input"):
        program(model)


class Auto(nn.Module):
    """A variational autoencoder's sampling behind a dropout of whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.drop(self.first(x)).flatten(1).chunk(2, 1)
        return self.last(mean + torch.randn_like(spread) * torch.exp(0.5 * spread))  # type: ignore[no-any-return]


@pytest.mark.full
def test_a_pytorch_module_samples_and_drops_channels() -> None:
    x = torch.randn(6, 1, 6, 6)
    compiled = graphc.compile(
        Auto(), example_inputs=(x,), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.Adam(lr=0.01)
    )
    name = next(v.name for v in compiled.model.graph.inputs if v.name != "label")
    with graphc.Trainer(compiled, threads=1) as trainer:
        found = [trainer.step({name: x.numpy(), "label": np.arange(6) % 3})["loss"] for _ in range(80)]
    assert np.mean(found[-10:]) < np.mean(found[:10]) - 0.2

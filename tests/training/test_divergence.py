"""Training that diverges is told once, before a NaN stops it, and broken weights replace no file."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphc
from graphc.errors import NonFiniteError
from graphc.training.divergence import DivergenceWarning, LossWatch

X = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
FEEDS = {"x": X, "label": X @ np.array([[1.0], [2], [3], [4]], np.float32)}


def program() -> graphc.Program:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N,4] x) => (float[N,1] y)
        <float[4,1] w = {0, 0, 0, 0}, float[4] far = {0, 0, 0, 0}> { y = MatMul(x, w) }"""
    )
    return graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.01))


def test_a_thousandfold_loss_is_told_once_with_step_and_rate() -> None:
    """Gradient descent on a quadratic multiplies the error by 1 - 2·lr·λ in each step."""
    with graphc.Trainer(program(), threads=1) as trainer, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = [trainer.step(FEEDS)["loss"] for _ in range(12)]
        assert not told
        assert losses[-1] < losses[0]
        trainer.learning_rate = 3.0
        for _ in range(10):
            losses.append(trainer.step(FEEDS)["loss"])
        assert trainer.loss_watch.diverging
    (one,) = [w for w in told if issubclass(w.category, DivergenceWarning)]
    level = float(np.sort(losses[:10])[4])
    first = next(k for k, loss in enumerate(losses) if loss > 1000 * level)
    assert f"in step {first + 1} the loss is {losses[first]:.4g}" in str(one.message)
    assert f"of the first steps, {level:.4g}, at a learning rate of 3" in str(one.message)
    assert np.isfinite(losses[first])


@pytest.mark.parametrize(
    ("losses", "diverges"),
    [
        ([2.0, 300.0, 1e5], True),  # within the first steps
        ([2.0] * 20 + [1500.0, 2.0], False),
        ([2.0] * 20 + [2500.0, 2.0], True),  # though it comes back
        ([0.0, 0.0, 5.0], False),  # the first batches had nothing to learn
        ([-3.0] * 10 + [-1e6], False),  # a likelihood that grows
        ([-3.0] * 10 + [4e3], True),
        ([2.0, float("nan"), 3.0], False),  # a step that was skipped
    ],
)
def test_the_level_is_that_of_the_first_steps(losses: list[float], diverges: bool) -> None:
    watch = LossWatch()
    assert [watch.see(loss) for loss in losses].count(True) == diverges


def test_weights_that_overflow_replace_no_file(tmp_path: Path) -> None:
    target, folder = tmp_path / "trained.onnx", tmp_path / "checkpoint"
    with graphc.Trainer(program(), threads=1) as trainer:
        trainer.step(FEEDS)
        trainer.export(target)
        trainer.save(folder)
        before = target.read_bytes(), (folder / "state.safetensors").read_bytes()
        trainer.learning_rate = 3e38
        trainer.step(FEEDS)
        for write in (trainer.export, trainer.save):
            with pytest.raises(
                NonFiniteError, match=r"'w' holds a NaN or infinity after step 2, so .* was not written.*3e\+38"
            ):
                write(target if write == trainer.export else folder)
    assert before == (target.read_bytes(), (folder / "state.safetensors").read_bytes())


def test_infinities_of_the_file_are_no_fault(tmp_path: Path) -> None:
    """A mask of -inf, say, is exported as it came."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N,4] x) => (float[N,4] p)
        <float[4,4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}, float[4] "fc.bias" = {0, 0, 0, 0}>
        { y = MatMul(x, w) z = Add(y, "fc.bias") p = Softmax(z) }"""
    )
    mask = np.array([0, 0, 0, -np.inf], np.float32)
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(mask, "fc.bias"))
    compiled = graphc.compile(
        model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.01), freeze=["fc.bias"]
    )
    with graphc.Trainer(compiled, threads=1) as trainer:
        trainer.step({"x": X, "label": np.arange(16) % 3})
        trainer.export(tmp_path / "trained.onnx")
    saved = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    np.testing.assert_array_equal(saved["fc.bias"], mask)


@pytest.mark.parametrize(("steps", "words"), [(0, "no update has changed a weight yet"), (1, "a smaller learning rate")])
def test_the_advice_fits_the_step(steps: int, words: str) -> None:
    """In the first step no learning rate has had a part in it."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N,4] x, float[N,1] d) => (float[N,1] y)
        <float[4,1] w = {1, 1, 1, 1}> { a = MatMul(x, w) y = Div(a, d) }"""
    )
    compiled = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.01))
    with graphc.Trainer(compiled, threads=1) as trainer:
        for _ in range(steps):
            trainer.step(FEEDS | {"d": np.ones((16, 1), np.float32)})
        with pytest.raises(NonFiniteError, match=words):
            trainer.step(FEEDS | {"d": np.zeros((16, 1), np.float32)})

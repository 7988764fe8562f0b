"""Gradients of embedding tables, of whose memory a step clears and checks only the rows that are not zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

import graphc
from graphc.errors import NonFiniteError

ROWS, WIDTH = 900, 24
Array = np.ndarray[Any, Any]


def weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"a": (ROWS, WIDTH), "b": (ROWS, WIDTH), "w": (WIDTH, ROWS)}
    return {name: rng.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in shapes.items()}


def program(tied: bool, **options: Any) -> graphc.Program:
    """logits = (Σ √(a[ids] · b[ids])) · w, or · aᵀ"""
    head = "t = Transpose <perm = [1, 0]> (a) logits = MatMul (m, t)" if tied else "logits = MatMul (m, w)"
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        net (int64[N, 5] ids) => (float[N, {ROWS}] logits)
        {{ x = Gather (a, ids) y = Gather (b, ids) p = Mul (x, y) s = Sqrt (p) m = ReduceMean <keepdims = 0> (s, axes)
           {head} }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axes"))
    for name, array in weights().items():
        if not (tied and name == "w"):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    optimizer = graphc.optim.AdamW(lr=0.01)
    return graphc.compile(
        model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=optimizer, backend="onnxruntime", **options
    )


def pytorch_loss(given: Mapping[str, torch.Tensor], ids: Array, label: Array) -> torch.Tensor:
    where = torch.from_numpy(ids)
    mean = (given["a"][where] * given["b"][where]).sqrt().mean(1)
    return functional.cross_entropy(mean @ (given["w"] if "w" in given else given["a"].T), torch.from_numpy(label))


def batch(size: int, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, ROWS, (size, 5))
    ids[0, :2] = 3  # several tokens add to this row
    return ids, rng.integers(0, ROWS, size)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(("options", "threads"), [({}, 1), ({}, 3), ({"clip_norm": 0.05}, 1), ({"accumulate": 2}, 2)])
def test_steps_of_two_batch_sizes_train_as_pytorch_does(tied: bool, options: dict[str, Any], threads: int) -> None:
    given = {name: torch.tensor(array, requires_grad=True) for name, array in weights().items() if not (tied and name == "w")}
    optimizer = torch.optim.AdamW(given.values(), lr=0.01)
    with graphc.Trainer(program(tied, **options), threads=threads) as trainer:
        for step, size in enumerate((4, 8, 4, 4, 8, 8)):
            ids, label = batch(size, step)
            found = trainer.step({"ids": ids, "label": label})["loss"]
            optimizer.zero_grad()
            loss = pytorch_loss(given, ids, label)
            loss.backward()
            if "clip_norm" in options:
                torch.nn.utils.clip_grad_norm_(given.values(), options["clip_norm"])
            optimizer.step()
            assert found == pytest.approx(loss.item(), rel=1e-5)
        state = trainer.state.snapshot()
    for name, parameter in given.items():
        np.testing.assert_allclose(state[name], parameter.detach().numpy(), rtol=0, atol=2e-5, err_msg=name)


def test_an_infinity_in_one_row_stops_the_step_and_leaves_no_trace() -> None:
    """√ has an infinite slope at 0, where the loss is finite: only the check of the gradient sees it."""
    made = program(False)
    good = [dict(zip(("ids", "label"), batch(6, seed), strict=True)) for seed in range(3)]
    bad = {"ids": np.where(np.arange(30).reshape(6, 5) == 17, 0, good[1]["ids"]), "label": good[1]["label"]}
    states = []
    for feeds in (good, [good[0], bad, *good[1:]]):
        with graphc.Trainer(made, threads=1) as trainer:
            trainer.state.array("b")[0, 5] = 0.0
            for each in feeds:
                if each is bad:
                    before = trainer.state.snapshot()
                    with pytest.raises(NonFiniteError):
                        trainer.step(each)
                    for name, array in trainer.state.snapshot().items():
                        np.testing.assert_array_equal(array, before[name], err_msg=name)
                else:
                    trainer.step(each)
            states.append(trainer.state.snapshot())
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)

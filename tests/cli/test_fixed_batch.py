"""``graphc train`` on files whose batch is fixed, compared with PyTorch: as they are, in micro-batches, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from graphc.cli import main
from tests.cli.models import blobs, parse

TABLE = """
<ir_version: 9, opset_import: ["" : 17]>
table (float[4,4] x) => (float[4,3] logits)
<float[4,8] w1, float[4,8] t, float[8,3] w2>
{
  h = MatMul (x, w1)
  a = Add (h, t)
  r = Relu (a)
  logits = MatMul (r, w2)
}
"""
"""A row of ``t`` for each of the 4 samples: no other batch has a meaning."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(parse(TABLE), "table.onnx")
    return tmp_path


def arguments(samples: int, *more: object) -> list[str]:
    np.savez("d.npz", **blobs(samples))
    fixed = ["train", "table.onnx", "--data", "d.npz", "--loss", "softmax_cross_entropy", "--optimizer", "sgd:lr=0.1"]
    return [*fixed, "--backend", "numpy", "--no-shuffle", "--format", "json", "--log-every", "1", *map(str, more)]


def train(capfd: pytest.CaptureFixture[str], samples: int, *more: object) -> tuple[list[dict[str, Any]], str]:
    assert main(arguments(samples, *more)) == 0
    out, err = capfd.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["event"] == "step"]


def parameters() -> dict[str, torch.Tensor]:
    stored = parse(TABLE).graph.initializer
    return {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()).requires_grad_() for t in stored}


def loss_of(p: dict[str, torch.Tensor], x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    rows = p["t"].repeat(len(x) // 4 + 1, 1)[: len(x)]
    return torch.nn.functional.cross_entropy(torch.relu(x @ p["w1"] + rows) @ p["w2"], label)


def trained_by_pytorch(samples: int, batch: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    p, found = parameters(), []
    optimizer = torch.optim.SGD(p.values(), lr=0.1)
    data = {k: torch.from_numpy(v) for k, v in blobs(samples).items()}
    for k in range(0, samples, batch):
        loss = loss_of(p, data["x"][k : k + batch], data["label"][k : k + batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, p


@pytest.mark.parametrize(
    ("batch", "more", "says"),
    [
        (4, (), "the model is fixed at batches of 4, and trains at that"),
        (8, ("--accumulate", 2), "the model is fixed at batches of 4, and trains at that"),
        (8, (), "each step takes 2 micro-batches of 4 a worker, as --accumulate 2 does"),
        (8, ("-n", 2, "--transport", "threads"), ""),
    ],
)
def test_a_share_of_the_files_batch_or_a_multiple_trains(
    here: Path, capfd: pytest.CaptureFixture[str], batch: int, more: tuple[object, ...], says: str
) -> None:
    events, err = train(capfd, 24, "--batch-size", batch, *more)
    np.testing.assert_allclose(losses(events), trained_by_pytorch(24, batch)[0], rtol=1e-5)
    assert says in err
    assert "rebatch" not in err


def test_the_last_batch_is_filled_up_with_samples_that_do_not_count(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    np.savez("e.npz", **blobs(6, seed=1))
    events, err = train(capfd, 10, "--batch-size", 4, "--eval-data", "e.npz", "-o", "t.onnx")
    expected, p = trained_by_pytorch(10, 4)
    np.testing.assert_allclose(losses(events), expected, rtol=1e-5)
    assert "the last batch of an epoch is filled up with samples that do not count" in err
    (epoch,) = [event for event in events if event["event"] == "epoch"]
    held = {k: torch.from_numpy(v) for k, v in blobs(6, seed=1).items()}
    assert epoch["eval_loss"] == pytest.approx(loss_of(p, held["x"], held["label"]).item(), rel=1e-5)
    trained = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("t.onnx").graph.initializer}
    np.testing.assert_allclose(trained["t"], p["t"].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_other_batches_are_refused_with_the_options_that_work(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(24, "--batch-size", 6)) == 2
    err = capfd.readouterr().err
    assert "fixed at batches of 4 and cannot be changed" in err
    assert "--per-worker-batch 4, or at 4 × K with --accumulate K; here a worker gets 6 samples" in err
    assert "t:float[4,8] has other entries for each of the 4 samples" in err


def test_a_batch_that_micro_batches_do_not_divide_is_refused_before_training(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    onnx.save(parse(TABLE.replace("float[4,4] x", "float[N,4] x").replace("float[4,8] t", "float[1,8] t")), "table.onnx")
    assert main(arguments(64, "--batch-size", 32, "--accumulate", 3)) == 2
    out, err = capfd.readouterr()
    assert "accumulate=3 does not divide the batch: 32 samples over 1 worker" in err
    assert out == ""


def test_a_table_that_repeats_for_each_sample_trains_as_one(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = parse(TABLE)
    (table,) = [t for t in model.graph.initializer if t.name == "t"]
    row = onnx.numpy_helper.to_array(table)[:1]
    table.CopyFrom(onnx.numpy_helper.from_array(np.repeat(row, 4, axis=0), "t"))
    onnx.save(model, "table.onnx")
    events, _ = train(capfd, 24, "--batch-size", 4, "-o", "t.onnx")
    p = parameters() | {"t": torch.from_numpy(row.copy()).requires_grad_()}
    data = {k: torch.from_numpy(v) for k, v in blobs(24).items()}
    optimizer, expected = torch.optim.SGD(p.values(), lr=0.1), []
    for k in range(0, 24, 4):
        hidden = torch.relu(data["x"][k : k + 4] @ p["w1"] + p["t"])
        loss = torch.nn.functional.cross_entropy(hidden @ p["w2"], data["label"][k : k + 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses(events), expected, rtol=1e-5)
    trained = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("t.onnx").graph.initializer}
    np.testing.assert_allclose(trained["t"], p["t"].detach().repeat(4, 1).numpy(), rtol=1e-5, atol=1e-6)

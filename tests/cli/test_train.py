"""``graphc train``, compared with PyTorch and onnxruntime and with itself on another number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from graphc.cli import main
from tests.cli.models import MLP, blobs, cli, parse, write_blobs, write_mlp

LOSS = "softmax_cross_entropy:logits=logits,label=label"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    return tmp_path


def arguments(*more: object, optimizer: str = "sgd:lr=0.1,momentum=0.9", epochs: int = 2) -> list[str]:
    fixed = ["train", "mlp.onnx", "--data", "d.npz", "--loss", LOSS, "--optimizer", optimizer]
    return [*fixed, "--epochs", str(epochs), "--batch-size", "16", "--backend", "numpy", *map(str, more)]


def events(capfd: pytest.CaptureFixture[str], *more: object, **options: Any) -> list[dict[str, Any]]:
    assert main(arguments("--format", "json", *more, **options)) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def weights(path: str) -> dict[str, np.ndarray[Any, Any]]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def accuracy(path: str, data: dict[str, np.ndarray[Any, Any]]) -> float:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": data["x"]})
    return float(np.mean(np.argmax(logits, axis=1) == data["label"]))


def test_losses_are_those_of_pytorch(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = events(capfd, "--no-shuffle", "--log-every", 1, "-o", "t.onnx")
    start = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in parse(MLP).graph.initializer}
    parameters = {name: value.requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    data, expected = {k: torch.from_numpy(v) for k, v in blobs().items()}, []
    for _ in range(2):
        for k in range(0, 96, 16):
            x, label = data["x"][k : k + 16], data["label"][k : k + 16]
            hidden = torch.relu(x @ parameters["w1"] + parameters["b1"])
            loss = torch.nn.functional.cross_entropy(hidden @ parameters["w2"] + parameters["b2"], label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    steps = [e for e in found if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 13))
    np.testing.assert_allclose([e["loss"] for e in steps], expected, rtol=1e-5)
    for name, value in weights("t.onnx").items():
        np.testing.assert_allclose(value, parameters[name].detach().numpy(), rtol=1e-4, atol=1e-6)


def test_events(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_blobs(here, "e.npz", seed=1)
    found = events(capfd, "--log-every", 5, "--eval-data", "e.npz", "-o", "t.onnx", epochs=3)
    kinds = [e["event"] for e in found]
    assert kinds == ["step", "epoch", "step", "epoch", "step", "epoch", "end"]
    epoch, end = found[-2], found[-1]
    assert epoch["epoch"] == 3
    assert epoch["eval_accuracy"] == pytest.approx(accuracy("t.onnx", blobs(seed=1)))
    assert 0.5 < epoch["accuracy"] <= 1
    assert end["steps"] == 18
    assert end["world_size"] == 1
    assert end["allreduces_per_step"] == 0
    assert len(end["state_sha256"]) == 64


def test_two_workers_follow_one(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = events(capfd, "--log-every", 1)
    two = events(capfd, "--log-every", 1, "-n", 2, "--transport", "threads")
    for a, b in zip(one[:-1], two[:-1], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
    assert two[-1]["world_size"] == 2
    assert two[-1]["allreduces_per_step"] >= 1


def test_a_collective_of_every_fourth_step_counts_a_quarter(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = {}
    for every in (1, 4):
        strategy = f"local_sgd:every={every},states=false"
        found[every] = events(capfd, "-n", 2, "--transport", "threads", "--strategy", strategy)[-1]["allreduces_per_step"]
    assert found[1] == 2, "the average of the parameters, and the sums of the loss"
    assert found[4] == 1.25


@pytest.mark.mpi
def test_two_mpi_processes(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = events(capfd, "--log-every", 1)
    done = cli(*arguments("--format", "json", "--log-every", 1, "-n", 2, "-o", "t.onnx"))
    assert done.returncode == 0, done.stderr
    two = [json.loads(line) for line in done.stdout.splitlines()]
    assert [e["event"] for e in two] == [e["event"] for e in one]
    np.testing.assert_allclose([e["loss"] for e in two[:-1]], [e["loss"] for e in one[:-1]], rtol=1e-5)
    assert two[-1]["world_size"] == 2
    assert accuracy("t.onnx", blobs()) > 0.9


@pytest.mark.mpi
def test_a_diverging_run_on_two_processes_is_told_once(here: Path) -> None:
    done = cli(*arguments("-n", 2, "-o", "t.onnx", optimizer="sgd:lr=1e30"))
    text = done.stderr.decode()
    assert done.returncode == 1
    assert text.count("a NaN or infinity appeared in step") == 1
    assert "Traceback" not in text
    assert (here / "t.last-good.onnx").exists()


def test_resumed_is_uninterrupted(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = events(capfd, optimizer="adam:lr=0.01", epochs=4)
    events(capfd, "--checkpoint", "c", optimizer="adam:lr=0.01", epochs=2)
    rest = events(capfd, "--resume", "c", optimizer="adam:lr=0.01", epochs=4)
    assert rest[-1]["steps"] == whole[-1]["steps"] == 24
    assert rest[-1]["state_sha256"] == whole[-1]["state_sha256"]
    assert [e["loss"] for e in rest if e["event"] == "epoch"] == [e["loss"] for e in whole if e["event"] == "epoch"][2:]


def test_resume_with_nothing_left(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = events(capfd, "--checkpoint", "c")
    again = events(capfd, "--resume", "c")
    assert [e["event"] for e in again] == ["end"]
    assert again[-1]["state_sha256"] == first[-1]["state_sha256"]


def test_divergence_keeps_the_last_good_state(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("-o", "t.onnx", optimizer="sgd:lr=1e30")) == 1
    text = capfd.readouterr().err
    assert "graphc: error: a NaN or infinity appeared in step" in text
    assert "first in tensor" in text
    assert "t.last-good.onnx holds the last good state" in text
    assert not (here / "t.onnx").exists()
    assert all(np.isfinite(value).all() for value in weights("t.last-good.onnx").values())


def test_frozen_parameters_stay(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    events(capfd, "--freeze", "?1", "-o", "t.onnx")
    before, after = weights("mlp.onnx"), weights("t.onnx")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"w2", "b2"}


def test_a_fixed_batch_becomes_dynamic(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(parse(MLP.replace("[N,", "[1,")), here / "mlp.onnx")
    assert main(arguments("--format", "json", "-o", "t.onnx")) == 0
    out, err = capfd.readouterr()
    assert "exported for batches of 1" in err
    assert json.loads(out.splitlines()[-1])["steps"] == 12
    assert onnx.load("t.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1


def test_lossless_conversions_are_noted(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exact = events(capfd)
    data = blobs()
    np.savez("d.npz", x=data["x"].astype(np.float64), label=data["label"].astype(np.int32))
    assert main(arguments("--format", "json")) == 0
    out, err = capfd.readouterr()
    assert "array 'x' converted from float64 to float32" in err
    assert "array 'label' converted from int32 to int64" in err
    assert json.loads(out.splitlines()[-1])["state_sha256"] == exact[-1]["state_sha256"]


def test_initialize(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = parse(MLP)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), tensor.name))
    onnx.save(model, here / "mlp.onnx")
    found = events(capfd, "--initialize", "he", "--seed", 3, "-o", "t.onnx", epochs=5)
    again = events(capfd, "--initialize", "he", "--seed", 3, epochs=5)
    assert found[-1]["state_sha256"] == again[-1]["state_sha256"]
    assert accuracy("t.onnx", blobs()) > 0.9


@pytest.mark.full
def test_piped_text_is_plain(here: Path) -> None:
    done = cli(*arguments("-o", "t.onnx"))
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == ["epoch", "loss", "accuracy", "seconds"]
    assert lines[1].split()[0] == "1"
    assert "wrote t.onnx" in lines


@pytest.mark.full
def test_model_from_standard_input(here: Path) -> None:
    line = arguments("--format", "json")
    line[1] = "-"
    done = cli(*line, stdin=(here / "mlp.onnx").read_bytes())
    assert json.loads(done.stdout.splitlines()[-1])["event"] == "end"

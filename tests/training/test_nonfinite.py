"""A NaN or infinity: the run stops, or all workers together skip the step, count it and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphc
from graphc.cli import main
from graphc.distributed.threads import run_threads
from graphc.errors import NonFiniteError, UsageError
from tests.training import small

pytestmark = pytest.mark.full

BAD = (2, 5)
"""Steps whose batch holds an infinity."""


def train(comm: Any, program: graphc.Program, steps: range, *, bad: tuple[int, ...] = (), leave_out: bool = False) -> Any:
    """Steps of one rank; in the ``bad`` ones the first sample of the last rank is broken, or the step is left out."""
    events: list[dict[str, Any]] = []
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        for step in steps:
            if leave_out and step in BAD:
                continue
            x, y = small.batch(16, step)
            mine = graphc.data.share(16, comm.rank, comm.size)
            if step in bad:
                x[-1, 3] = np.inf
            trainer.fit([{"input": x[mine], "label": y[mine]}], callbacks=[events.append])
        return {"events": events, "state": trainer.state.snapshot(), "hash": trainer.state_sha256(), "n": trainer.skipped_steps}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.5}, {"compress": "bf16"}, {"backend": "numpy"}], ids=["plain", "clip", "bf16", "numpy"]
)
def test_a_skipped_step_leaves_no_trace_but_its_count(workers: int, options: dict[str, Any]) -> None:
    program = small.compiled("adam:lr=0.01", nonfinite="skip", **options)
    found = run_threads(workers, lambda comm: train(comm, program, range(8), bad=BAD))
    without = run_threads(workers, lambda comm: train(comm, program, range(8), leave_out=True))
    assert len({rank["hash"] for rank in found}) == 1
    for rank in found:
        assert [e["skipped"] for e in rank["events"] if e["event"] == "skipped"] == [1, 2]
        assert rank["n"] == 2
    for name, array in without[0]["state"].items():
        if name != "graphc.skipped":
            np.testing.assert_array_equal(found[0]["state"][name], array, err_msg=name)


def test_only_skipped_steps_make_no_epoch_mean() -> None:
    program = small.compiled(nonfinite="skip")
    x, y = small.batch(8, 0)
    with graphc.Trainer(program, threads=1) as trainer:
        before = trainer.state.snapshot()
        assert trainer.fit([{"input": x * np.float32(np.nan), "label": y}]) == {}
        assert all(np.array_equal(before[n], a) for n, a in trainer.state.snapshot().items() if n != "graphc.skipped")


def test_command_line_reports_skipped_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ir.save(small.model(), tmp_path / "m.onnx")
    x, y = small.batch(64, 0)
    x[17, 0] = np.nan  # in the second of four batches
    np.savez(tmp_path / "d.npz", input=x, label=y)
    job = ["train", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--loss", "softmax_cross_entropy"]
    job += ["--optimizer", "sgd", "--epochs", "1", "--batch-size", "16", "--no-shuffle", "--format", "json"]
    assert main([*job, "--nonfinite", "skip"]) == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [e for e in events if e["event"] == "skipped"] == [{"event": "skipped", "step": 2, "skipped": 1}]
    (epoch,) = (e for e in events if e["event"] == "epoch")
    assert np.isfinite(epoch["loss"])
    assert main(job) == 1


def test_unknown_mode() -> None:
    with pytest.raises(UsageError, match="it is stop or skip"):
        small.compiled(nonfinite="ignore")


def test_a_nan_out_of_a_body_that_reads_a_feed_is_named() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[n,4] x, float[n,4] z, int64 count, bool go) => (float[n,4] y) {
        h = Mul(x, w)
        s = Loop(count, go, h) <body = b (int64 i, bool c, float[n,4] before) => (bool d, float[n,4] after) {
            d = Identity(c)  l = Log(z)  after = Add(before, l)
        }>
        y = Add(h, s)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    ones = np.ones((2, 4), np.float32)
    feeds = {"x": ones, "z": -ones, "count": np.array(3), "go": np.array(True), "label": ones}
    with graphc.Trainer(program, threads=1) as trainer, pytest.raises(NonFiniteError, match="first in tensor 's'"):
        trainer.step(feeds)

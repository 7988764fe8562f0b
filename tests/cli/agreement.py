"""Whether ``graphc check`` and ``graphc train`` agree: the command that check prints trains on data as it describes them."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import graphc
from graphc.cli import main

STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """What the two commands said of a model.

    Attributes:
        code: exit code of check.
        report: its JSON; empty where it printed none.
        error: what check wrote as an error.
        trained: exit code of the command that it printed, 0 if a trainer ran in its place; None: neither ran.
        losses: of the steps.
        complaint: what train wrote as an error.
    """

    code: int
    report: dict[str, Any]
    error: str
    trained: int | None = None
    losses: list[float] = field(default_factory=list)
    complaint: str = ""

    @property
    def agrees(self) -> bool:
        """Whether check says no, or yes and the command trains."""
        return self.code == 3 if self.trained is None else self.code == 0 == self.trained and len(self.losses) == STEPS


def call(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def arrays(report: dict[str, Any], samples: int | None, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Data as check describes them: floats in [0, 1), labels in their range, other integers 0 or 1; None: of one step."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in report["data"].items():
        example, dtype = array["example"], np.dtype(array["dtype"])
        shape = example if samples is None else [samples, *example[1:]]
        if dtype.kind in "iu":
            found[name] = np.asarray(rng.integers(array.get("low", 0), array.get("high", 1) + 1, shape)).astype(dtype)
        else:
            found[name] = (np.ones(shape) if dtype.kind == "b" else rng.random(shape)).astype(dtype)
    return found


def train_in_a_script(path: Path | str, report: dict[str, Any]) -> list[float]:
    """Losses of steps on a model that the command cannot feed."""
    loss, optimizer = graphc.losses.parse(report["loss"]), graphc.optim.parse(report["optimizer"])
    with graphc.Trainer(graphc.compile(path, loss=loss, optimizer=optimizer), threads=1) as trainer:
        return [trainer.step(arrays(report, None, seed=step))["loss"] for step in range(STEPS)]


def check_and_train(path: Path | str, folder: Path, *options: str) -> Outcome:
    """Check a model, then run the printed command on generated data for two steps."""
    code, out, err = call("check", str(path), "--format", "json", *options)
    report: dict[str, Any] = json.loads(out) if out else {}
    if code != 0:
        return Outcome(code, report, err)
    command = report["command"]
    if command is None:
        return Outcome(code, report, err, 0, train_in_a_script(path, report))
    np.savez(folder / "data.npz", **arrays(report, STEPS * report["batch_size"]))
    words = shlex.split(command)[1:]
    words[words.index("data.npz")] = str(folder / "data.npz")
    words[words.index("trained.onnx")] = str(folder / "trained.onnx")
    trained, out, complaint = call(*words, "--format", "json", "--log-every", "1")
    losses = [event["loss"] for event in map(json.loads, out.splitlines()) if event["event"] == "step"]
    return Outcome(code, report, err, trained, losses, complaint)

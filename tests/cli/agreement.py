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

from graphc.cli import main

STEPS = 2


@dataclass(frozen=True)
class Outcome:
    """What the two commands said of a model.

    Attributes:
        code: exit code of check.
        report: its JSON; empty where it printed none.
        error: what check wrote as an error.
        trained: exit code of the command that it printed; None: it printed none.
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


def arrays(report: dict[str, Any], samples: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Data as check describes them: floats in [0, 1), labels in their range, other integers 0 or 1."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in report["data"].items():
        shape, dtype = [samples, *array["example"][1:]], np.dtype(array["dtype"])
        if dtype.kind in "iu":
            found[name] = rng.integers(array.get("low", 0), array.get("high", 1) + 1, shape).astype(dtype)
        else:
            found[name] = (np.ones(shape) if dtype.kind == "b" else rng.random(shape)).astype(dtype)
    return found


def check_and_train(path: Path | str, folder: Path, *options: str) -> Outcome:
    """Check a model, then run the printed command on generated data for two steps."""
    code, out, err = call("check", str(path), "--format", "json", *options)
    report: dict[str, Any] = json.loads(out) if out else {}
    command = report.get("command") if code == 0 else None
    if command is None:
        return Outcome(code, report, err)
    np.savez(folder / "data.npz", **arrays(report, STEPS * report["batch_size"]))
    words = shlex.split(command)[1:]
    words[words.index("data.npz")] = str(folder / "data.npz")
    words[words.index("trained.onnx")] = str(folder / "trained.onnx")
    trained, out, complaint = call(*words, "--format", "json", "--log-every", "1")
    losses = [event["loss"] for event in map(json.loads, out.splitlines()) if event["event"] == "step"]
    return Outcome(code, report, err, trained, losses, complaint)

"""``graphc show plan``: the grid of ranks and steps says what the plan does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphc.cli import main
from graphc.grid import SYMBOLS
from tests.cli.models import write_mlp


@pytest.fixture
def training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    write_mlp(tmp_path)
    target = str(tmp_path / "t.onnx")
    options = ["--loss", "softmax_cross_entropy", "--optimizer", "adam", "--bucket-mb", "0.0001", "--workers", "2"]
    assert main(["compile", str(tmp_path / "mlp.onnx"), "-o", target, *options]) == 0
    capfd.readouterr()
    return target


def test_the_grid_is_the_plan(training: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "plan", training, "--workers", "3", "--batch", "4", "--format", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    kinds = [step["kind"] for step in found["steps"]]
    flights = found["collectives"]
    assert len(flights) == kinds.count("start") == kinds.count("wait") >= 2
    for flight in flights:
        assert found["steps"][flight["start"]]["name"] == f"start {flight['tag']}"
        assert found["steps"][flight["wait"]]["name"] == f"wait {flight['tag']}"
        between = range(flight["start"] + 1, flight["wait"])
        assert flight["computing"] == [k for k in between if kinds[k] in ("segment", "kernel", "update")]
    assert any(flight["computing"] for flight in flights)

    assert main(["show", "plan", training, "--workers", "3", "--batch", "4"]) == 0
    lines = capfd.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("ranks 0-2")]
    margin = len(row) - len(kinds)
    assert row[margin:] == "".join(SYMBOLS[kind] for kind in kinds)
    bars = [line for line in lines if "═" in line and "in flight" not in line]
    assert [(bar.index("═"), len(bar)) for bar in bars] == [(margin + f["start"], margin + f["wait"]) for f in flights]
    hidden = {k for flight in flights for k in flight["computing"]}
    computing = sum(kind in ("segment", "kernel", "update") for kind in kinds)
    assert f"  {len(hidden)} of {computing} computing steps run while a collective is in flight" in lines


def test_one_worker_has_no_grid(training: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", training, "--workers", "1"]) == 0
    alone = capfd.readouterr().out
    assert alone.startswith("plan for 1 worker(s)")
    assert main(["show", "plan", training, "-n", "1"]) == 0
    assert capfd.readouterr().out == alone

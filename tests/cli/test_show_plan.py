"""``graphc show plan``: the grid of ranks and steps says what the plan does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphc.cli import main
from graphc.plan.overlap_view import SYMBOLS
from tests.cli.models import write_mlp


def compiled(folder: Path, capfd: pytest.CaptureFixture[str], *more: str) -> str:
    """A training graph with several small buckets, for two workers."""
    write_mlp(folder)
    target = str(folder / "t.onnx")
    options = ["--loss", "softmax_cross_entropy", "--optimizer", "adam", "--bucket-mb", "0.0001", "--workers", "2", *more]
    assert main(["compile", str(folder / "mlp.onnx"), "-o", target, *options]) == 0
    capfd.readouterr()
    return target


@pytest.fixture
def training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    return compiled(tmp_path, capfd)


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


@pytest.mark.parametrize("bucket_mb", ["0.0001", "25"])
def test_schedule_counts_the_overlaps_that_the_plan_shows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], bucket_mb: str
) -> None:
    write_mlp(tmp_path)
    target = str(tmp_path / "t.onnx")
    options = ["--loss", "softmax_cross_entropy", "--optimizer", "adam", "--bucket-mb", bucket_mb, "--workers", "2"]
    assert main(["compile", str(tmp_path / "mlp.onnx"), "-o", target, *options]) == 0
    notes = capfd.readouterr()
    assert main(["show", "plan", target, "--workers", "2", "--batch", "4", "--format", "json"]) == 0
    flights = json.loads(capfd.readouterr().out)["collectives"]
    hidden = sum(bool(flight["computing"]) for flight in flights)
    assert (hidden == 0) == (bucket_mb == "25"), "one bucket is complete when nothing is left to compute"
    number = f"{len(flights)} collective" + "s" * (len(flights) != 1)
    assert f"schedule: {hidden} of {number} overlap with the computation" in notes.out + notes.err


def test_one_worker_has_no_grid(training: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", training, "--workers", "1"]) == 0
    alone = capfd.readouterr().out
    assert alone.startswith("plan for 1 worker:")
    assert main(["show", "plan", training, "-n", "1"]) == 0
    assert capfd.readouterr().out == alone


def test_ranks_with_different_plans_have_a_row_each(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With central storage rank 0 updates everything, rank 1 nothing but what every rank keeps."""
    training = compiled(tmp_path, capfd, "--strategy", "central_storage")
    assert main(["show", "plan", training, "--batch", "4"]) == 0
    lines = capfd.readouterr().out.splitlines()
    first, second = (next(line for line in lines if line.startswith(f"rank {rank} ")) for rank in range(2))
    assert "-" not in first
    assert second.count("-") >= 2
    assert len(first) == len(second)
    assert first.count("u") == second.count("u") + second.count("-")


def test_the_plan_of_a_backend_is_that_of_the_state_it_keeps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The GPU backend keeps low copies of weights, which its updates write, so that no segment casts a weight."""
    training = compiled(tmp_path, capfd, "--precision", "bf16")

    def shown(backend: str) -> list[dict[str, object]]:
        assert main(["show", "plan", training, "-n", "1", "--backend", backend, "--format", "json"]) == 0
        return json.loads(capfd.readouterr().out)["steps"]  # type: ignore[no-any-return]

    steps = {backend: shown(backend) for backend in ("numpy", "cupy", "cupy:tf32=true")}
    assert steps["cupy:tf32=true"] == steps["cupy"]
    narrow = {backend: [s for s in found if str(s["name"]).startswith("Narrow")] for backend, found in steps.items()}
    assert not narrow["numpy"]
    assert narrow["cupy"]
    nodes = {b: [n for s in found if s["kind"] == "segment" for n in s["nodes"]] for b, found in steps.items()}  # type: ignore[attr-defined]
    assert {"w1/bfloat16/Cast", "w2/bfloat16/Cast"} <= set(nodes["numpy"])
    assert not {"w1/bfloat16/Cast", "w2/bfloat16/Cast"} & set(nodes["cupy"])


def test_a_pipeline_prints_its_schedule_and_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    training = compiled(tmp_path, capfd, "--mesh", "pipe=2", "--schedule", "1f1b", "--accumulate", "3")
    assert main(["show", "plan", training, "--batch", "4"]) == 0
    shown = capfd.readouterr().out
    assert "rank 0  0F0 0F1 ·   0B0 0F2 0B1 ·   0B2\nrank 1  ·   1F0 1B0 1F1 1B1 1F2 1B2 ·" in shown
    assert "send 0F→1F" in shown
    assert main(["show", "plan", training, "--batch", "4", "--format", "json"]) == 0
    ranks = json.loads(capfd.readouterr().out)["ranks"]
    assert [row["schedule"][-1] for row in ranks] == ["0U", "1U"]
    sizes = []
    for schedule in ("1f1b", "gpipe"):
        training = compiled(tmp_path, capfd, "--mesh", "pipe=2", "--schedule", schedule, "--accumulate", "8")
        assert main(["inspect", training, "--memory", "--batch", "4", "--format", "json"]) == 0
        sizes.append(json.loads(capfd.readouterr().out))
    first, second = sizes
    assert first["pipe 1"]["activations"] < second["pipe 1"]["activations"], "1F1B holds one micro-batch, GPipe eight"
    assert first["pipe 0"]["parameters"] == second["pipe 0"]["parameters"]


def test_the_kernels_of_a_segment_are_listed_with_their_nodes(training: str, capfd: pytest.CaptureFixture[str]) -> None:
    def segments(batch: str, *more: str) -> list[dict[str, Any]]:
        assert main(["show", "plan", training, "-n", "1", "--batch", batch, *more, "--format", "json"]) == 0
        return [step for step in json.loads(capfd.readouterr().out)["steps"] if step["kind"] == "segment"]

    fused = [step for step in segments("4000") if step["parts"]]
    assert fused
    for step in fused:
        assert {node for part in step["parts"] for node in part["nodes"]} <= set(step["nodes"])
    assert any(part["runs"] == "kernel" for step in fused for part in step["parts"])
    assert not any(step["parts"] for step in segments("4000", "--backend", "onnxruntime:fuse=false"))
    small = [step for step in segments("4") if step["parts"]]
    assert [step["name"].split("/")[0] for step in small] in (["grad"], ["loss"]), "a segment of single numbers alone"

    assert main(["show", "plan", training, "-n", "1", "--batch", "4000"]) == 0
    lines = capfd.readouterr().out.splitlines()
    listed = [line.split(maxsplit=1) for line in lines if line.split()[:1] in (["kernel"], ["onnxruntime"])]
    assert listed == [[p["runs"], ", ".join(p["nodes"])] for step in segments("4000") for p in step["parts"]]

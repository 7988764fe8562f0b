"""``graphc plan``: what it proposes runs, fits, and is what it plays on the simulated clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphc
from graphc.cli import main
from graphc.errors import UsageError
from graphc.mesh import Mesh
from graphc.planner.costs import Line, ModelCosts, StageCosts, TensorCosts
from graphc.planner.division import Division, refused
from graphc.planner.network import Curve, Link, Network
from graphc.planner.search import best, memory_of_choice, predict, steps, timeline

NETWORK = Network(8, Link(Curve.line(450e9, 0.0)), Link(Curve.line(50e9, 0.0)))


def stage(part: float, rest: float = 1e9, **more: object) -> StageCosts:
    """A part of a model with 18 GB of state that takes 0.1 s a sample."""
    state = (round(part * nbytes) for nbytes in (2_000_000_000, 4_000_000_000, 12_000_000_000))
    times = Line(0.0, 0.1 * part / 3), Line(0.0, 0.2 * part / 3)
    return replace(StageCosts(*times, *state, Line(0.0, rest)), **more)  # type: ignore[arg-type]


WHOLE, HALF = stage(1.0), stage(0.5)
COSTS = ModelCosts("a device", WHOLE, None, {2: (HALF, HALF)}, 50_000_000)


def model(folder: Path) -> Path:
    found = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[batch, 8] x) => (float[batch, 4] y) {
            a = MatMul (x, w0)  b = Relu (a)  c = MatMul (b, w1)  d = Relu (c)
            e = MatMul (d, w2)  f = Relu (e)  y = MatMul (f, w3)
        }
    """)
    rng = np.random.default_rng(0)
    for name, shape in {"w0": (8, 16), "w1": (16, 16), "w2": (16, 16), "w3": (16, 4)}.items():
        found.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
    onnx.save(found, folder / "m.onnx")
    (folder / "n.toml").write_text("[inside]\ngigabytes_per_second = 10\nlatency_us = 20\n")
    np.savez(folder / "d.npz", x=rng.standard_normal((16, 8), np.float32), label=rng.integers(0, 4, 16))
    return folder / "m.onnx"


def plan(folder: Path, *more: str) -> int:
    network = ["--network", str(folder / "n.toml"), "--loss", "softmax_cross_entropy", "--optimizer", "adam"]
    return main(["plan", str(model(folder)), "--devices", "2", "--batch-size", "8", *network, *more])


@pytest.mark.full
def test_the_file_of_a_plan_trains_and_its_timeline_is_that_of_the_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, timeline = tmp_path / "plan.json", tmp_path / "trace.json"
    words = ["--memory", "1GB", "-o", str(config), "--simulate", "3", "--trace", str(timeline), "--json"]
    assert plan(tmp_path, *words) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert len(plans) == 10  # of which kinds, is up to this machine; test_proposals has fixed times
    times = [round(p["step_ms"], 6) for p in plans]
    assert times == sorted(times)
    events = json.loads(timeline.read_text())["traceEvents"]
    played = [e["dur"] for e in events if e.get("cat") == "step"]
    assert len(played) == 2 * 3
    assert played == pytest.approx([plans[0]["step_ms"] * 1e3] * 6, rel=1e-3, abs=1e-2)
    train = ["train", "--config", str(config), "--data", str(tmp_path / "d.npz"), "--transport", "threads", "--json"]
    assert main([*train, "--epochs", "2"]) == 0
    end = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (end["world_size"], end["steps"]) == (2, 4)
    assert main([*train, "--batch-size", "4"]) == 0  # the command line wins
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 4


@pytest.mark.full
def test_a_plan_of_gpus_has_times_of_the_gpu_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--memory", "80GB", "--gpu", "h100", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "H100" in found["machine"]
    assert all(0 < p["memory_bytes"] < 80e9 and p["step_ms"] > 0 for p in found["plans"])
    assert any("tensor=2" in p["options"]["mesh"] for p in found["plans"])
    assert any("pipe=2" in p["options"]["mesh"] for p in found["plans"])
    assert any("tensor axis" in note for note in found["not_modelled"])


def test_memory_is_that_of_the_formulas() -> None:
    one = {zero: memory_of_choice(COSTS, Division(Mesh(data=8), zero, 1, 3)) for zero in range(4)}
    rest = 3e9
    bucket = 50e6
    assert one[0] == 18e9 + rest
    assert one[1] == 6e9 + 12e9 / 8 + rest
    assert one[2] == 2e9 + 16e9 / 8 + 2 * bucket + rest, "gradients on the way"
    assert one[3] == 18e9 / 8 + 5 * bucket + rest, "and parameters"
    several = memory_of_choice(COSTS, Division(Mesh(data=8), 2, 2, 3))
    assert several == one[1] + bucket, "sums over micro-batches stay whole, and one bucket is added to them at a time"
    assert memory_of_choice(COSTS, Division(Mesh(data=4, pipe=2), 0, 4, 1)) == 9e9 + 1e9


@pytest.mark.full
def test_replicas_that_fill_nodes_are_proposed_with_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {(str(p.choice.mesh), p.choice.zero): p for p in best(COSTS, NETWORK, 16, 80e9, 16)}
    assert found["node=2,data=8", 0].choice.options()["allreduce"] == "hierarchical"
    hybrid, whole = found["node=2,data=8", 2], found["data=16", 2]
    assert (hybrid.memory, whole.memory) == (4e9 + 1.1e9, 3e9 + 1.1e9)
    assert hybrid.seconds < whole.seconds  # parameters are gathered inside the nodes
    model(tmp_path)
    (tmp_path / "n.toml").write_text(
        "node = 2\n[inside]\ngigabytes_per_second = 10\nlatency_us = 20\n[between]\ngigabytes_per_second = 1\nlatency_us = 50\n"
    )
    words = ["--devices", "4", "--batch-size", "8", "--memory", "1GB", "--network", str(tmp_path / "n.toml")]
    job = ["--loss", "softmax_cross_entropy", "--optimizer", "adam", "-o", str(tmp_path / "plan.json")]
    assert main(["plan", str(tmp_path / "m.onnx"), *words, *job, "--json"]) == 0
    plans = [p["options"] for p in json.loads(capsys.readouterr().out)["plans"]]
    assert any("node=2" in p["mesh"] or "tensor" in p["mesh"] for p in plans)
    for options in (Division(Mesh(data=2, node=2), zero, 1, 2).options() for zero in (0, 2)):
        config = json.loads((tmp_path / "plan.json").read_text()) | options
        config.pop("schedule", None)
        (tmp_path / "own.json").write_text(json.dumps(config))
        train = ["train", "--config", str(tmp_path / "own.json"), "--data", str(tmp_path / "d.npz"), "--transport", "threads"]
        assert main([*train, "--epochs", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["world_size"] == 4


def test_too_little_memory_says_the_smallest_number_of_devices() -> None:
    data_only = replace(COSTS, pipes={})
    with pytest.raises(UsageError, match=r"does not fit 2 devices of 4 GB.*can train it is 32$"):
        best(data_only, NETWORK, 2, 4e9, 64)  # 18/N + 0.2 + 64/N GB: 2.8 on 32, 5.3 on 16; micro-batches need 4 GB for sums
    with pytest.raises(UsageError, match="no number of devices is enough"):
        best(data_only, NETWORK, 2, 1e9, 64)
    with pytest.raises(UsageError, match="cannot be shared by 3 devices"):
        best(data_only, NETWORK, 3, 80e9, 64)


@pytest.mark.full
def test_schedules_zero_and_the_tensor_axis_are_candidates(tmp_path: Path) -> None:
    """Everything that is proposed compiles, and none of what is considered is refused."""
    pipes = {count: (stage(1 / count, stash=Line(0.0, 2e8)),) * count for count in (2, 4)}
    costs = replace(COSTS, pipes=pipes, recomputed=WHOLE, tensors={2: TensorCosts(stage(0.5, 6e8), 4, Line(0.0, 45e6))})
    found = best(costs, NETWORK, 8, 80e9, 16)
    kinds = {(p.choice.mesh, p.choice.zero, p.choice.schedule, p.choice.recompute) for p in found}
    mixed = Mesh(data=2, pipe=2, tensor=2)
    assert {(mixed, zero, name, False) for zero in (0, 1, 2) for name in ("1f1b", "gpipe", "zero-bubble")} <= kinds
    assert (Mesh(data=4, pipe=2), 1, "gpipe", True) in kinds
    assert (mixed, 0, "interleaved:stages=4", False) in kinds
    assert (mixed, 3, "1f1b", False) in kinds
    assert not refused(costs)
    source = model(tmp_path)
    for mesh, zero, schedule, recompute in sorted((kind for kind in kinds if kind[0].pipe < 4), key=str):
        stages = {"schedule": schedule} if mesh.pipe > 1 else {}
        more = {"strategy": f"zero:stage={zero}" if zero else "mirrored", "recompute": "all" if recompute else None}
        loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.Adam(lr=0.1)
        graphc.compile(source, loss=loss, optimizer=optimizer, mesh=mesh, accumulate=2, **more, **stages)


def test_schedules_hold_as_many_micro_batches_as_they_promise() -> None:
    """1F1B as many as there are ranks, GPipe all of them; zero-bubble idles less."""
    costs = replace(COSTS, pipes={2: (replace(HALF, stash=Line(0.0, 2e8)),) * 2})
    one, all_ = (memory_of_choice(costs, Division(Mesh(pipe=2), 0, 8, 1, schedule=name)) for name in ("1f1b", "gpipe"))
    assert all_ - one == pytest.approx((8 - 2) * 2e8)
    bubbles = [
        predict(costs, NETWORK, Division(Mesh(pipe=2), 0, 4, 1, schedule=name)).bubble for name in ("zero-bubble", "1f1b")
    ]
    assert bubbles[0] < bubbles[1] == pytest.approx(1 / 5)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (2, 8), (4, 8)])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_interleaved_stages_idle_less_and_send_more(ranks: int, count: int, virtual: int) -> None:
    """The bubble takes (p − 1) / (v·m) of the time of the work: Narayanan et al., SC 2021, section 2.2."""
    stages = ranks * virtual
    schedule = f"interleaved:stages={stages}" if virtual > 1 else "1f1b"
    part = stage(1 / stages)
    sending = replace(part, results=Line(0.0, 1e6), adjoints=Line(0.0, 1e6))
    choice = Division(Mesh(pipe=ranks), 0, count, 1, schedule=schedule)
    quiet, busy = (predict(replace(COSTS, pipes={stages: (one,) * stages}), NETWORK, choice) for one in (part, sending))
    ideal = count * 0.1 / ranks
    assert quiet.seconds / ideal - 1 == pytest.approx((ranks - 1) / (virtual * count))
    assert quiet.bubble == pytest.approx((ranks - 1) / (virtual * count + ranks - 1))
    message = NETWORK.send(1e6, 1)
    assert busy.seconds - quiet.seconds >= 2 * (stages - 1) * message * 0.999, "a micro-batch goes through all stages and back"
    lanes = timeline(replace(COSTS, pipes={stages: (part,) * stages}), NETWORK, choice)
    passes = [span for lane in lanes for span in lane.computing if span.kind == "segment"]
    assert len(passes) == 2 * count * stages
    assert sum(span.stop - span.start for span in passes) == pytest.approx(count * 0.1)


def test_a_rank_holds_the_micro_batches_of_all_its_interleaved_stages() -> None:
    """Rank 0 of 2 with 2 stages each has 2·(p − 1) + (v − 1)·p + 1 = 5 passes in flight; each stage has its own places."""
    quarter = stage(1 / 4, 0.0, stash=Line(0.0, 1e8))
    costs = replace(COSTS, pipes={4: (quarter,) * 4})
    found = memory_of_choice(costs, Division(Mesh(pipe=2), 0, 8, 1, schedule="interleaved:stages=4"))
    assert 18e9 / 2 + 5e8 <= found <= 18e9 / 2 + 6e8


def test_a_tensor_axis_pays_for_its_messages() -> None:
    """Half of the work, and 4 AllReduces that nothing hides for each micro-batch."""
    costs = replace(COSTS, tensors={2: TensorCosts(stage(0.5), 4, Line(0.0, 45e7))})
    found = predict(costs, NETWORK, Division(Mesh(tensor=2), 0, 2, 4))
    messages = 4 * NETWORK.allreduce(4 * 45e7 / 4, 2)
    assert found.seconds == pytest.approx(2 * (0.4 / 2 + messages))
    assert found.exposed == pytest.approx(2 * messages)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_clock_plays_the_bubble_and_exposed_communication(count: int) -> None:
    pipe = predict(COSTS, NETWORK, Division(Mesh(pipe=2), 0, count, 1))
    assert pipe.bubble == pytest.approx(1 / (count + 1))
    assert pipe.seconds == pytest.approx((count + 1) * 0.05)
    data = predict(COSTS, NETWORK, Division(Mesh(data=8), 0, count, 1))
    tail = 2 * 7 / 8 * 4e9 / 160 / 450e9  # the last of 160 buckets
    assert data.exposed == pytest.approx(tail, rel=0.01)
    assert data.seconds == pytest.approx(count * 0.1 + data.exposed)


def test_thousands_of_ranks_are_played() -> None:
    mesh = Mesh(data=1024, pipe=2)
    choice = Division(mesh, 0, 4, 1)
    played = dict(steps(predict(COSTS, NETWORK, choice), timeline(COSTS, NETWORK, choice), 2))
    assert len(played) == 2048
    assert [s.name for s in played[2047].computing if s.kind == "segment"][:2] == ["1F0", "1B0"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--memory", "many"], "--memory 'many': write a size"),
        (["--memory", "1GB", "--simulate", "2"], "--simulate N and --trace FILE go together"),
        (["--memory", "1GB", "--network", "none.toml"], "cannot be read"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, *words) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"bach-size": 3}', "batch-size"),
        ("[]", "no JSON object"),
        ('{"cut": "h"}', "it takes a list"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_config_is_named(tmp_path: Path, text: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text(text)
    assert main(["train", "--config", str(tmp_path / "c.json")]) == 2
    assert wanted in capsys.readouterr().err

"""The scaling model against published throughputs, and bubbles and ZeRO bytes against their formulas."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphc
from graphc import Mesh
from graphc.errors import UsageError
from graphc.pipe.clock import play
from graphc.pipe.tables import Action, PipeSchedule
from graphc.planner.network import Curve, Link, Network
from graphc.planner.scaling import overlapped, zero_bytes
from graphc.report.memory import feed_shapes, memory_of
from tests.planner.published import CURVE, FOLDER, Row, rows

DOCS = Path(__file__).parents[2] / "docs"


def near(row: Row) -> bool:
    return abs(row.error) <= 0.15


def test_published_throughputs_of_data_parallel_training_are_predicted() -> None:
    found = list(rows())
    slow = [row for row in found if row.linear / row.measured - 1 > 0.15]  # communication matters
    assert len(found) == 82
    assert sum(near(row) for row in found) >= 70
    assert sum(near(row) for row in slow) >= 7  # none of which linear scaling predicts
    assert sum(abs(row.error) for row in found) < 0.8 * sum(abs(row.linear / row.measured - 1) for row in found)


def test_the_page_shows_what_the_model_says() -> None:
    page = (DOCS / "planning.md").read_text(encoding="utf-8")
    found = list(rows())
    assert f"{sum(near(row) for row in found)} of {len(found)} rows" in page
    for row in found:
        if not near(row):
            sizes = " | ".join(f"{value:,.0f}" for value in (row.workers, row.measured, row.predicted, row.linear))
            line = f"| {row.setting} | {sizes} | {100 * row.error:+.0f} % |"
            assert line in page


def test_a_curve_passes_through_its_measurements_and_no_line_does() -> None:
    for size, seconds in zip(CURVE.nbytes, CURVE.seconds, strict=True):
        assert CURVE.time(size) == pytest.approx(seconds)
    assert CURVE.ranks == 8
    assert CURVE.time(3 << 20) == pytest.approx(38.1e-6 * (50.6 / 38.1) ** np.log2(1.5))
    sizes, seconds = np.array(CURVE.nbytes), np.array(CURVE.seconds)
    line = np.polynomial.Polynomial.fit(sizes, seconds, 1, w=1 / seconds)
    assert np.max(np.abs(line(sizes) / seconds - 1)) > 0.25
    assert Link(CURVE, 0.5).allreduce(1e9, 8) == pytest.approx(CURVE.time(2e9))


def test_an_allreduce_over_nodes_reduces_inside_and_sends_a_shard_between() -> None:
    inside, between = Link(CURVE), Link(Curve.line(50e9, 0.0))
    network = Network(8, inside, between)
    wanted = CURVE.time(1e9) + 2 * 3 / 4 * (1e9 / 8) / 50e9
    assert network.allreduce(1e9, 32) == pytest.approx(wanted, rel=1e-3)
    assert network.allreduce(1e9, 8) == CURVE.time(1e9)
    assert network.allreduce(1e9, 4, stride=8) == pytest.approx(2 * 3 / 4 * 1e9 / 50e9, rel=1e-3)


def test_buckets_overlap_the_backward_pass() -> None:
    fast = overlapped(1.0, 100e6, lambda size: size / 1e9)  # 4 buckets of 25 ms: only the last is behind the backward pass
    assert (fast.busy, fast.exposed) == (pytest.approx(0.1), pytest.approx(0.025))
    slow = overlapped(1.0, 100e6, lambda size: size / 50e6)  # 4 of 500 ms, the first from 250 ms on
    assert slow.exposed == pytest.approx(0.25 + 2.0 - 1.0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_bubbles_are_exactly_those_of_the_formulas(ranks: int, rounds: int, chunks: int) -> None:
    count = ranks * rounds
    wanted = {f"interleaved:stages={chunks * ranks}": Fraction(ranks - 1, chunks * count + ranks - 1)}
    if chunks == 1:
        wanted = {name: Fraction(ranks - 1, count + ranks - 1) for name in ("gpipe", "1f1b")}
        wanted["zero-bubble"] = Fraction(ranks - 1, 3 * count + ranks - 1)
    for name, idle in wanted.items():
        schedule = PipeSchedule.parse(name)

        def ticks(action: Action, split: bool = schedule.splits_weights) -> float:
            return {"F": 1, "B": 1 if split else 2, "W": 1, "U": 0}[action.kind]

        played = play(schedule.table(ranks, count), ticks)
        busy = sum(int(ticks(a)) for row in played.table for a in row)
        assert 1 - Fraction(busy, int(played.span) * ranks) == idle, name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "low", "optimizer"), [("fp32", 4, 8), ("bf16", 2, 12)])
def test_bytes_of_zero_are_those_of_the_formulas_and_of_the_plan(stage: int, precision: str, low: int, optimizer: int) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[batch, 64] x) => (float[batch, 64] y) { h = MatMul (x, w)  y = MatMul (h, v) }
    """)
    for name in "wv":
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), name))
    options = {"strategy": f"zero:stage={stage}"} if stage else {}
    program = graphc.compile(
        model, loss=graphc.losses.MSE(), optimizer=graphc.optim.Adam(), mesh=Mesh(data=4), precision=precision, **options
    )
    found = memory_of(program.model, feed_shapes(program.model, 8), world_size=4, backend="numpy")
    state = found.parameters + found.masters + found.gradients + found.optimizer
    assert state == zero_bytes(2 * 64 * 64, 4, stage, low=low, optimizer=optimizer)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("n.csv", "a,b\n1,2\n", "columns payload_KiB, busbw_GBps, time_us"),
        ("n.csv", "payload_KiB,busbw_GBps,time_us\n32,3.15,18.2\n", "two or more different payloads"),
        ("n.toml", "node = 8\n", r"\[inside\] is missing"),
        ("n.toml", "[inside]\nspeed = 1\n", r"\[inside\] has a curve"),
        ("n.toml", "[inside]\ngigabytes_per_second = -1\n", "number above 0"),
        ("n.toml", "node = 0\n[inside]\ngigabytes_per_second = 1\n", "node = 0"),
        ("n.toml", "node = ", "cannot be read"),
    ],
)
def test_a_wrong_network_says_what_is_wrong(tmp_path: Path, name: str, text: str, wanted: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=wanted):
        Network.read(tmp_path / name)


def test_a_network_is_read_from_both_kinds_of_files(tmp_path: Path) -> None:
    curve = FOLDER / "allreduce_8xH200.csv"
    assert Network.read(curve).node == 8
    (tmp_path / "curve.csv").write_bytes(curve.read_bytes())
    (tmp_path / "n.toml").write_text('[inside]\ncurve = "curve.csv"\nspeed = 0.5\n[between]\ngigabytes_per_second = 50\n')
    found = Network.read(tmp_path / "n.toml")
    assert (found.node, found.inside.speed) == (8, 0.5)
    with pytest.raises(UsageError, match="one node of 8 devices, and 16"):
        Network.read(curve).check(16)

"""Times of plan steps: each distinct step is measured once, a file holds them, and what is missing is modelled."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphc
from graphc.backend import make_backend
from graphc.cli import main
from graphc.errors import UsageError
from graphc.plan.partition import Plan, make_plan
from graphc.plan.state_rewrites import adapted
from graphc.planner.timing import profiled
from graphc.report.memory import feed_shapes
from graphc.report.step_measure import profile_steps
from graphc.report.step_profile import COMPUTES, StepProfile, work_of
from tests.training import pipe_cases


def compiled(blocks: int, **options: Any) -> graphc.Program:
    loss, optimizer = pipe_cases.LOSS, graphc.optim.Adam(lr=0.01)
    return graphc.compile(pipe_cases.gpt(blocks), loss=loss, optimizer=optimizer, **options)


def plan_of(program: graphc.Program, batch: int = 2) -> Plan:
    engine = make_backend("auto", threads=1, spin=False)
    return make_plan(adapted(program.model, engine), feed_shapes(program.model, batch), engine)


def keys(plan: Plan) -> list[str]:
    return [work_of(step).key for step in plan.steps if step.kind in COMPUTES]


@pytest.mark.full
def test_equal_blocks_are_measured_once() -> None:
    """A transformer of 12 blocks has the steps of one of 4, more often."""
    few, many = (plan_of(compiled(blocks)) for blocks in (4, 12))
    assert len(keys(many)) > 2.5 * len(keys(few))
    assert set(keys(many)) == set(keys(few))
    engine = make_backend("auto", threads=1, spin=False)
    found = profile_steps(many.steps, engine, threads=1)
    assert set(found.steps) == set(keys(few))


def test_other_shapes_and_attributes_are_other_steps() -> None:
    two, three = ({work_of(s).key: work_of(s) for s in plan_of(compiled(2), n).steps if s.kind in COMPUTES} for n in (2, 3))
    assert {two[key].kind for key in set(two) & set(three)} <= {"Transpose", "Greater+Where"}, "of a weight, and of the loss"


def test_measured_steps_add_up_to_a_training_step() -> None:
    """Both are processor time of one thread; zeros in the place of data, and what is in the cache, make a difference.

    They are measured in turn: a core that shares its units takes three times as long for the same step.
    """
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> net (float[batch, 512] x) => (float[batch, 512] y)'
        " { a = MatMul (x, w0)  b = Tanh (a)  c = MatMul (b, w1)  d = Tanh (c)  y = MatMul (d, w2) }"
    )
    model = pipe_cases.parameters(model, {f"w{k}": (512, 512) for k in range(3)})
    program = graphc.compile(model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    plan = plan_of(program, 256)
    engine = make_backend("auto", threads=1, spin=False)
    shapes = feed_shapes(program.model, 256)
    feeds = {"x": np.full(shapes["x"], 0.5, np.float32), "label": np.zeros(256, np.int64)}
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.step(feeds)
        predicted, taken = [], []
        for _ in range(5):
            profile = profile_steps(plan.steps, engine, threads=1)
            predicted.append(sum(profile.seconds(step) for step in plan.steps))
            for _ in range(3):
                start = time.process_time()
                trainer.step(feeds)
                taken.append(time.process_time() - start)
    assert 0.5 < min(predicted) / min(taken) < 2


def test_a_file_is_used_and_not_measured_again(tmp_path: Path) -> None:
    plan, path, said = plan_of(compiled(2)), tmp_path / "profile.json", list[str]()
    engine = make_backend("auto", threads=1, spin=False)
    first = profiled(path, 60.0, said.append)(plan.steps, engine)
    about = json.loads(path.read_text())["about"]
    assert about["graphc"] == graphc.__version__
    assert about["name"]
    text = path.read_text()
    path.write_text(text.replace(about["name"], "another machine"))
    second = profiled(path, 60.0, said.append)(plan.steps, engine)
    assert second.machine == "another machine"
    assert [second.seconds(step) for step in plan.steps] == [first.seconds(step) for step in plan.steps]
    count = len(set(keys(plan)))
    assert said == [
        f"measured {count} of {count} distinct steps of plans ({len(keys(plan))} in all) on this machine",
        f"{count} of {count} distinct steps have times in {path}, measured on another machine",
    ]
    with pytest.raises(UsageError, match="are those of the backend 'onnxruntime'"):
        profiled(path, 60.0, said.append)(plan.steps, make_backend("numpy", threads=1))


def test_no_time_to_measure_leaves_all_to_the_rates() -> None:
    plan = plan_of(compiled(2))
    engine = make_backend("auto", threads=1, spin=False)
    profile = profile_steps(plan.steps, engine, threads=1, seconds=0.0)
    assert not profile.steps
    for step in (s for s in plan.steps if s.kind in COMPUTES):
        work = work_of(step)
        assert profile.seconds(step) == pytest.approx(
            work.operations / profile.operations_per_second + work.nbytes / profile.bytes_per_second
        )


def test_what_was_not_measured_is_scaled_as_the_step_of_its_kind_that_is_nearest_in_size() -> None:
    engine = make_backend("auto", threads=1, spin=False)
    small, large = (plan_of(compiled(2), batch) for batch in (2, 4))
    profile = profile_steps(small.steps, engine, threads=1)
    by_kind = {work_of(s).kind: work_of(s) for s in large.steps if s.kind in COMPUTES}
    for kind, work in by_kind.items():
        alike = [m for m in profile.steps.values() if m.work.kind == kind]
        ratios = [m.seconds / profile.base(m.work) for m in alike]
        assert min(ratios) * 0.999 <= profile.time_of(work) / profile.base(work) <= max(ratios) * 1.001


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"form": "something else"}, "its form is 'something else'"),
        ({"bytes_per_second": 0}, "0 is no time or rate"),
        ({"steps": [{"key": "k"}]}, "is missing"),
        ({"steps": [{"key": "k", "kind": "", "text": "", "nbytes": 8, "operations": -3, "seconds": 1}]}, "-3 is no number of"),
        ({"steps": [{"key": "k", "kind": "", "text": "", "nbytes": "many", "operations": 0, "seconds": 1}]}, "many"),
        ({"threads": float("inf")}, "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, change: dict[str, Any] | None, wanted: str) -> None:
    path = tmp_path / "profile.json"
    StepProfile({"name": "a machine"}, "onnxruntime", 1, 1e10, 1e10).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change) if change is not None else "{")
    with pytest.raises(UsageError, match=wanted):
        StepProfile.read(path)


def test_a_profile_serves_bench_as_it_serves_the_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same file, the same seconds of the same steps."""
    program, path = compiled(2), tmp_path / "profile.json"
    plan = plan_of(program)
    engine = make_backend("auto", threads=1, spin=False)
    profile = profiled(path, 60.0, lambda text: None)(plan.steps, engine)
    onnx.save(ir.to_proto(program.model), tmp_path / "training.onnx")
    words = ["bench", "--predict", str(tmp_path / "training.onnx"), "--profile", str(path), "--batch-size", "2", "--json"]
    assert main(words) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found["machine"] == profile.machine
    computed = sum(profile.seconds(step) for step in plan.steps)
    assert found["ms"] == pytest.approx(computed * 1e3, rel=0.2)  # and the check for NaN

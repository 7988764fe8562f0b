"""An optimizer that a plugin declares gets buckets, ZeRO and the check for NaN like those of graphc."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest
import torch

import graphc
from graphc import optim
from graphc.distributed.threads import run_threads
from graphc.errors import NonFiniteError, UsageError
from graphc.ir.declare import CUSTOM
from graphc.ir.names import BUCKET
from graphc.ir.updates import gradient_of, state_of, trains
from tests.training import small

LR, BETA = 0.05, 0.8


def declare(op_name: str, *, elementwise: bool = True, skip: bool = False) -> None:
    """Sign of an average of gradients. The gradient is input 2, the parameter input 3, and the average comes out first."""

    @graphc.custom_op(
        f"test.plugin::{op_name}",
        inputs="lr average grad param divisor?" + " skip?" * skip,
        outputs="next_average next_param",
        attributes={"beta": 0.9},
        next_value={0: 1, 1: 3},
        gradient=2,
        roles={3: graphc.Role.PARAMETER},
        elementwise=elementwise,
    )
    def signum(
        op: Any, lr: Any, average: Any, grad: Any, param: Any, divisor: Any = None, skip: Any = None, *, beta: float
    ) -> Any:
        """average' = β·average + (1 − β)·g;  param' = param − lr·sign(average')"""
        g = grad if divisor is None else op.Div(grad, op.cast_like(divisor, grad))
        following = op.Add(op.Mul(average, beta), op.Mul(g, 1.0 - beta))
        moved = op.Sub(param, op.Mul(op.cast_like(lr, param), op.Sign(following)))
        if skip is None:
            return following, moved
        return op.Where(skip, average, following), op.Where(skip, param, moved)


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    with CUSTOM.restored(), optim.OPTIMIZERS.restored():
        declare("Signum")
        declare("SignumSkip", skip=True)
        declare("SignumWhole", elementwise=False)

        @optim.register
        @dataclass(frozen=True)
        class Signum(optim.Optimizer):
            name: ClassVar[str] = "signum"
            op: ClassVar[str] = "test.plugin::Signum"
            lr: float = LR
            beta: float = 0.9
            whole: bool = False
            skip: bool = False

            @property
            def update_op(self) -> str:
                return self.op + "Whole" * self.whole + "Skip" * self.skip

        yield


class TorchSignum(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["average"] = BETA * state.get("average", torch.zeros_like(p)) + (1 - BETA) * p.grad
                p -= np.float32(LR) * torch.sign(state["average"])


TEXT = f"signum:beta={BETA}"


def trained(options: dict[str, Any], steps: int = 6, size: int = 2) -> list[dict[str, Any]]:
    program = small.compiled(TEXT, **options)
    return run_threads(size, lambda comm: small.train(comm, program, steps))


def in_torch(steps: int = 6) -> dict[str, Any]:
    reference = small.Torch(TorchSignum)
    for step in range(steps):
        reference.backward(*small.batch(16, step))
        reference.optimizer.step()
    return reference.state()


STRATEGIES: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "zero 1": {"strategy": "zero:stage=1"},
    "zero 2": {"strategy": "zero:stage=2"},
    "zero 3": {"strategy": "zero:stage=3"},
    "zero 2, offload": {"strategy": "zero:stage=2,offload=true"},
    "central storage": {"strategy": "central_storage"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_trains_as_its_formula_does_under_every_strategy(strategy: str) -> None:
    results = trained(STRATEGIES[strategy])
    assert len({r["hash"] for r in results}) == 1
    assert small.largest_difference(results[0]["state"], in_torch()) < 1e-5
    assert {f"{name}::average" for name in small.SHAPES} <= results[0]["state"].keys()


def test_its_updates_share_buckets() -> None:
    updates = [node for node in small.compiled(TEXT).model.graph if trains(node)]
    buckets = [node.attributes[BUCKET].as_string() for node in updates]
    assert len(updates) == 4
    assert 1 < len(set(buckets)) < 4
    for node in updates:
        assert gradient_of(node) is node.inputs[2]
        assert state_of(node) is node.inputs[3]


@pytest.mark.parametrize("strategy", ["mirrored", "zero 2"])
def test_a_nan_in_a_feed_of_one_rank_stops_all_before_any_state_changes(strategy: str) -> None:
    program = small.compiled(TEXT, **STRATEGIES[strategy])

    def work(comm: Any) -> tuple[str, str]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            x, y = small.batch(16, 0)
            mine = slice(8 * comm.rank, 8 * comm.rank + 8)
            trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)
            before = trainer.state_sha256()
            broken = x.copy()
            broken[3] = np.nan
            with pytest.raises(NonFiniteError):
                trainer.step({"input": broken[mine], "label": y[mine]}, offset=mine.start)
            return before, trainer.state_sha256()

    results = run_threads(2, work)
    assert len({h for both in results for h in both}) == 1


def test_what_its_op_lacks_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="elementwise=True"):
        small.compiled(f"{TEXT},whole", strategy="zero:stage=1")
    with pytest.raises(UsageError, match="skip_nonfinite needs 'skip', which the op 'Signum'"):
        small.compiled(TEXT, nonfinite="skip")
    with pytest.raises(UsageError, match="clip needs 'clip_value'"):
        small.compiled(TEXT, clip_value=1.0)


def test_a_skipped_step_leaves_its_state_alone() -> None:
    results = trained({}, 3)
    program = small.compiled(f"{TEXT},skip", nonfinite="skip")

    def work(comm: Any) -> dict[str, Any]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            for step in (0, 1, None, 2):
                x, y = small.batch(16, step or 0)
                if step is None:
                    x[3] = np.inf
                mine = slice(8 * comm.rank, 8 * comm.rank + 8)
                trainer.step({"input": x[mine], "label": y[mine]}, offset=mine.start)
            return trainer.state.snapshot()

    (state, _) = run_threads(2, work)
    assert state["graphc.skipped"] == 1
    for name in small.SHAPES:
        np.testing.assert_array_equal(state[name], results[0]["state"][name])


def test_it_is_found_by_name_and_its_options_are_checked() -> None:
    assert optim.parse("signum:lr=0.5").options() == {"lr": 0.5, "beta": 0.9, "whole": False, "skip": False}
    with pytest.raises(UsageError, match="optimizer 'signum' has no option 'betta'; did you mean 'beta'"):
        optim.parse("signum:betta=1")
    with pytest.raises(UsageError, match=r"beta=-1\.0 is out of range"):
        small.compiled("signum:beta=-1")


def test_clipping_by_norm_and_saving_go_with_it(tmp_path: Any) -> None:
    program = small.compiled(TEXT, clip_norm=0.5)
    ir.save(program.model, tmp_path / "training.onnx")
    again = ir.load(tmp_path / "training.onnx")
    assert sum(trains(node) for node in again.graph) == 4
    assert "grad_norm" in [v.name for v in again.graph.outputs]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"next_value": {0: 0}, "gradient": 0}, "needs states other than its gradient"),
        ({"gradient": 1}, "needs states other than its gradient"),
        ({"next_value": {0: 0}}, "must give each of its states a role"),
    ],
)
def test_a_declaration_that_says_too_little_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        graphc.custom_op("test.plugin::Bad", inputs="param grad", outputs="next_param", **options)(lambda op, p, g: p)

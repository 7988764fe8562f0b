"""A loss with ``keep_outputs``: a training step returns the model's own outputs beside the loss."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphc
from graphc import losses
from graphc.compiler import Program
from graphc.data import share
from graphc.distributed.communicator import Communicator
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError

rng = np.random.default_rng(5)
W = rng.standard_normal((4, 3)).astype(np.float32)
X = rng.standard_normal((6, 4)).astype(np.float32)
LABEL = rng.standard_normal((6, 3)).astype(np.float32)

BODY = "(float[n,4] x) => (float[n,3] y, float[3] total) { y = MatMul (x, w)  zero = Constant <value_ints=[0]> ()"
BODY += " total = ReduceSum <keepdims=0> (y, zero) }"


def program_of(body: str = BODY.replace(", float[3] total", ""), **options: object) -> Program:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net {body}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(W, "w"))
    loss = losses.MSE(prediction="y", keep_outputs=True)
    return graphc.compile(model, loss=loss, optimizer=graphc.optim.SGD(lr=0.1), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["auto", "numpy"])
def test_a_step_returns_the_outputs_that_the_loss_was_computed_from(backend: str) -> None:
    with graphc.Trainer(program_of(BODY, backend=backend), threads=1) as trainer:
        found = trainer.step({"x": X, "label": LABEL})
        again = trainer.step({"x": X, "label": LABEL})
    y = X @ W
    assert isinstance(found["loss"], float)
    assert found["loss"] == pytest.approx(float(((y - LABEL) ** 2).mean()), rel=1e-5)
    np.testing.assert_allclose(found["y"], y, rtol=1e-4, atol=1e-5)  # and not what the second step computed
    np.testing.assert_allclose(found["total"], y.sum(axis=0), rtol=1e-4, atol=1e-5)
    moved = W - 0.1 * X.T @ (2 * (y - LABEL) / LABEL.size)
    np.testing.assert_allclose(again["y"], X @ moved, rtol=1e-4, atol=1e-5)


def test_fit_and_evaluate_report_the_loss_alone() -> None:
    with graphc.Trainer(program_of(), threads=1) as trainer:
        batches, events = [{"x": X, "label": LABEL}], []
        means = trainer.fit(batches, callbacks=[events.append], log_every=1)
        assert set(means) == {"loss"}
        assert set(events[0]) == {"event", "step", "loss"}
        assert set(trainer.evaluate(batches)) == {"loss"}


def test_micro_batches_and_workers_return_their_samples_in_order() -> None:
    with graphc.Trainer(program_of(accumulate=3), threads=1) as trainer:
        np.testing.assert_allclose(trainer.step({"x": X, "label": LABEL})["y"], X @ W, rtol=1e-4, atol=1e-5)
    program = program_of()

    def work(comm: Communicator) -> np.ndarray:
        rows = share(1, comm.rank, 2) if comm.size == 2 else slice(None)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            return trainer.step({"x": X[:1][rows], "label": LABEL[:1][rows]})["y"]  # type: ignore[no-any-return]

    one, none = sorted(run_threads(2, work), key=len, reverse=True)
    np.testing.assert_allclose(one, X[:1] @ W, rtol=1e-4, atol=1e-5)
    assert none.shape == (0, 3)


def test_an_infinity_in_an_output_does_not_stop_training() -> None:
    """A model may mask scores with minus infinity."""
    body = "(float[n,4] x) => (float[n,3] y, float[n,3] masked) { y = MatMul (x, w)  i = Constant <value_float=-inf> ()"
    with graphc.Trainer(program_of(body + " masked = Add (y, i) }"), threads=1) as trainer:
        assert np.isneginf(trainer.step({"x": X, "label": LABEL})["masked"]).all()


def test_what_cannot_be_returned_is_refused_by_name_before_any_step() -> None:
    with pytest.raises(UsageError, match=r"the output 'total' \[3\] has not one row for each sample.*accumulate"):
        graphc.Trainer(program_of(BODY, accumulate=3), threads=1)


def test_parameter_servers_refuse_kept_outputs() -> None:
    program = program_of(strategy="parameter_server")

    def work(comm: Communicator) -> None:
        graphc.Trainer(program, comm=comm, threads=1)

    with pytest.raises(UsageError, match=r"keep_outputs would return y; leave it out"):
        run_threads(2, work)


def test_a_saved_program_still_knows_its_outputs() -> None:
    model = ir.from_proto(ir.to_proto(program_of().model))
    assert model.metadata_props["graphc.kept_outputs"] == '["y"]'

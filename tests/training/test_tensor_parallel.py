"""Tensor parallelism: shards of weights, equal to one worker, with checkpoints and exports of whole tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import graphc
from graphc import frontends
from graphc.cli import main
from graphc.distributed.threads import run_threads
from graphc.errors import FeedError, NonFiniteError, UsageError
from graphc.ir.shards import cuts_of
from graphc.mesh import Mesh
from graphc.report.memory import memory_of
from tests.runtime.mpi_run import map_ranks
from tests.training import small
from tests.training.tensor_cases import batch, compiled, gpt, share, train

NEAR = 1e-5


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train(None, Mesh())


def assert_equal_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"][-len(found["losses"]) :], atol=NEAR)
    np.testing.assert_allclose(found["evaluated"], expected["evaluated"], atol=NEAR)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, array in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], array, atol=NEAR, err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", [pytest.param(Mesh(tensor=2), marks=pytest.mark.large), Mesh(tensor=4), Mesh(data=2, tensor=2)], ids=str
)
def test_a_transformer_equals_one_worker(mesh: Mesh, alone: dict[str, Any]) -> None:
    """Dropout too: a mask depends on the place in the whole tensor."""
    found = run_threads(mesh.size, lambda comm: train(comm, mesh))
    for one in found:
        assert_equal_training(one, alone)
        assert one["hash"] == found[0]["hash"]


@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(data=2, tensor=2), Mesh(tensor=4)], ids=str)
def test_an_mlp_equals_one_worker(mesh: Mesh) -> None:
    def work(comm: Any, own: Mesh) -> tuple[list[float], dict[str, Any]]:
        with graphc.Trainer(small.compiled("adam:lr=0.01", mesh=own), comm=comm, threads=1) as trainer:
            losses = []
            for step in range(5):
                x, label = small.batch(16, step)
                each = 16 // trainer.data_size
                mine = slice(trainer.data_rank * each, (trainer.data_rank + 1) * each)
                losses.append(trainer.step({"input": x[mine], "label": label[mine]})["loss"])
            return losses, trainer.trained_values()

    losses, weights = work(None, Mesh())
    for found, values in run_threads(mesh.size, lambda comm: work(comm, mesh)):
        np.testing.assert_allclose(found, losses, atol=NEAR)
        for name, array in weights.items():
            np.testing.assert_allclose(values[name], array, atol=NEAR)


SLOPED = """<ir_version: 10, opset_import: ["": 21]>
    mlp (float[batch, 4] x) => (float[batch, 3] y)
    {
        a = MatMul (x, up)
        b = PRelu (a, slope)
        c = MatMul (b, down)
        y = Add (c, bias)
    }"""


@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(data=2, tensor=2)], ids=str)
def test_a_whole_weight_of_divided_features_equals_one_worker(mesh: Mesh) -> None:
    """One slope for all features: its gradient is a sum over the ranks, and that of ``bias``, in the same bucket, is not."""
    rng = np.random.default_rng(0)
    weights = {"up": (4, 8), "slope": (1,), "down": (8, 3), "bias": (3,)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in weights.items()}
    x, label = rng.normal(size=(16, 4)).astype(np.float32), rng.integers(0, 3, 16)

    def work(comm: Any, own: Mesh) -> dict[str, Any]:
        model = onnx.parser.parse_model(SLOPED)
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
        program = graphc.compile(model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), mesh=own)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            each = 16 // trainer.data_size
            mine = slice(trainer.data_rank * each, (trainer.data_rank + 1) * each)
            for _ in range(3):
                trainer.step({"x": x[mine], "label": label[mine]})
            return {name: array.copy() for name, array in trainer.trained_values().items()}

    alone = work(None, Mesh())
    for found in run_threads(mesh.size, lambda comm: work(comm, mesh)):
        for name, array in alone.items():
            np.testing.assert_allclose(found[name], array, atol=NEAR, err_msg=name)


@pytest.mark.full
def test_labels_that_are_ignored_or_wrong_and_the_accuracy() -> None:
    """The vocabulary-parallel loss knows them as the whole one does."""
    loss = graphc.losses.SoftmaxCrossEntropy(ignore_index=-100, metrics=True)
    feeds = batch(3)
    feeds["label"][0, :4] = -100

    def work(comm: Any, mesh: Mesh) -> tuple[dict[str, float], str]:
        with graphc.Trainer(compiled(mesh, loss=loss), comm=comm, threads=1) as trainer:
            for _ in range(3):
                metrics = trainer.step(feeds)
            with pytest.raises(FeedError) as raised:
                trainer.step({**feeds, "label": feeds["label"] + 24})
            return metrics, str(raised.value)

    expected, message = work(None, Mesh())
    assert expected["accuracy"] > 0
    for metrics, text in run_threads(2, lambda comm: work(comm, Mesh(tensor=2))):
        assert metrics == pytest.approx(expected, abs=NEAR)
        assert text == message


@pytest.mark.mpi
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), pytest.param(Mesh(data=2, tensor=2), marks=pytest.mark.large)], ids=str)
def test_on_processes(mesh: Mesh, alone: dict[str, Any]) -> None:
    for one in map_ranks(mesh.size, train, mesh):
        assert_equal_training(one, alone)


@pytest.mark.full
def test_checkpoints_hold_whole_tensors(tmp_path: Path) -> None:
    """Written by two ranks, restored by one, by four, and back; the export is the model of one worker."""
    mesh, folder = Mesh(tensor=2), str(tmp_path / "two")
    run_threads(2, lambda comm: train(comm, mesh, 2, save=folder))
    whole = train(None, Mesh(), 4)
    assert_equal_training(train(None, Mesh(), 2, first=2, restore=folder, save=str(tmp_path / "one")), whole)
    for found in run_threads(4, lambda comm: train(comm, Mesh(tensor=4), 2, first=2, restore=folder)):
        assert_equal_training(found, whole)
    later = train(None, Mesh(), 2, first=4, restore=str(tmp_path / "one"))
    for found in run_threads(2, lambda comm: train(comm, mesh, 2, first=4, restore=str(tmp_path / "one"))):
        assert_equal_training(found, later)
    session = onnxruntime.InferenceSession(str(tmp_path / "two" / "trained.onnx"))
    alone = onnxruntime.InferenceSession(_exported_alone(tmp_path))
    tokens = {"tokens": batch(7)["tokens"]}
    np.testing.assert_allclose(session.run(None, tokens)[0], alone.run(None, tokens)[0], atol=1e-4)


@pytest.mark.full
def test_a_divided_weight_that_does_not_train_is_in_no_checkpoint(tmp_path: Path) -> None:
    mesh, frozen, folder = Mesh(tensor=2), {"freeze": ["table"]}, str(tmp_path / "two")
    whole = train(None, Mesh(), 4, **frozen)
    run_threads(2, lambda comm: train(comm, mesh, 2, save=folder, **frozen))
    for found in run_threads(2, lambda comm: train(comm, mesh, 2, first=2, restore=folder, **frozen)):
        assert_equal_training(found, whole)


@pytest.mark.full
def test_optimizer_state_is_sharded_over_the_replicas(tmp_path: Path) -> None:
    """ZeRO on the data axis, of shards over the tensor axis; its checkpoint is that of one worker."""
    mesh, options, folder = Mesh(data=2, tensor=2), {"strategy": "zero:stage=1"}, str(tmp_path / "zero")
    whole = train(None, Mesh(), 4)
    for found in run_threads(4, lambda comm: train(comm, mesh, 2, save=folder, **options)):
        assert found["losses"] == pytest.approx(whole["losses"][:2], abs=NEAR)
    assert_equal_training(train(None, Mesh(), 2, first=2, restore=folder), whole)
    for found in run_threads(4, lambda comm: train(comm, mesh, 2, first=2, restore=folder, **options)):
        assert_equal_training(found, whole)


def _exported_alone(folder: Path) -> str:
    train(None, Mesh(), 2, save=str(folder / "alone"))
    return str(folder / "alone" / "trained.onnx")


def test_the_automatic_plan_is_megatrons() -> None:
    cuts = {name: str(cut) for name, cut in cuts_of(compiled(Mesh(tensor=2), optimizer="sgd:lr=0.1").model.graph).items()}
    block = {
        "qkv": "tensor:axis=1,blocks=3,ranks=2",
        "qkv_bias": "tensor:axis=0,blocks=3,ranks=2",
        "out": "tensor:axis=0,blocks=1,ranks=2",
        "up": "tensor:axis=1,blocks=1,ranks=2",
        "up_bias": "tensor:axis=0,blocks=1,ranks=2",
        "down": "tensor:axis=0,blocks=1,ranks=2",
    }
    assert {f"b{k}_{name}": cut for k in range(2) for name, cut in block.items()}.items() <= cuts.items()
    assert cuts["table"] == "tensor:axis=0,blocks=1,ranks=2", "the embeddings, and the classes of the loss"
    assert not {"s", "o", "places", "b0_s1", "b0_out_bias"} & cuts.keys()


def test_named_shards() -> None:
    program = compiled(Mesh(tensor=2), shard=["b0_up=1"], optimizer="sgd:lr=0.1")
    assert set(cuts_of(program.model.graph)) == {"b0_up", "b0_up_bias", "b0_down"}
    sums = [n for n in program.model.graph if n.op_type == "AllReduceStart" and n.attributes["group"].as_string() == "tensor"]
    assert len(sums) == 2, "one forward, one backward"


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (Mesh(tensor=3), {"shard": ["b0_up=1"]}, r"axis 1 of 'b0_up' has 64 elements; 2, 4, 8, 16, 32, 64 would divide it"),
        (Mesh(tensor=2), {"shard": ["b0_s1=0"]}, "'b0_s1' cannot be divided by 2: .*LayerNormalization.* normalises over it"),
        (Mesh(tensor=2), {"shard": ["b0_up"]}, r"write auto, auto:sequence, or a pattern of parameters and an axis"),
        (Mesh(tensor=2), {"shard": ["nothing=0"]}, "matches no parameter"),
        (Mesh(tensor=2), {"shard": ["b0_up=2"]}, "'b0_up' has 2 axes"),
        (Mesh(tensor=2), {"strategy": "local_sgd"}, "tensor=2 does not work with strategy='local_sgd' yet"),
        (Mesh(tensor=2), {"compress": "topk"}, "tensor=2 does not work with compress='topk' yet"),
        (Mesh(), {"shard": ["b0_up=1"]}, "the mesh has none"),
        (Mesh(tensor=5), {}, "no weight can be divided among 5 ranks"),
    ],
)
def test_what_cannot_be_done_is_said(mesh: Mesh, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compiled(mesh, **options)


def test_a_bad_step_stops_all_ranks() -> None:
    """Only one of them may see it in its shards; none has changed its state."""

    def work(comm: Any) -> tuple[str, bool]:
        trainer = graphc.Trainer(small.compiled("sgd:lr=0.1", mesh=Mesh(tensor=2)), comm=comm, threads=1)
        before = trainer.state_sha256()
        x, label = small.batch(4, 0)
        x[0, 0] = np.nan
        with pytest.raises(NonFiniteError) as raised:
            trainer.step({"input": x, "label": label})
        return str(raised.value), trainer.state_sha256() == before

    for text, unchanged in run_threads(2, work):
        assert "a NaN or infinity appeared in step 0; the state is that of the last good step" in text
        assert unchanged


def test_the_graph_of_one_worker_is_not_changed() -> None:
    assert "tensor_parallel" not in compiled(Mesh(data=2)).pipeline
    assert graphc.compile(gpt(), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1)).mesh is None


@pytest.mark.full
@pytest.mark.parametrize("mesh", [pytest.param(Mesh(tensor=2), marks=pytest.mark.large), Mesh(data=2, tensor=2)], ids=str)
def test_the_memory_that_is_reported_is_allocated(mesh: Mesh) -> None:
    """On every rank: parameters, gradients and states of this rank's shards, and what passes between segments."""
    program = compiled(mesh, optimizer="adam:lr=0.01")

    def work(comm: Any) -> tuple[int, int]:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            trainer.step(share(trainer, batch(0)))
            return small.allocated(trainer), sum(trainer.state.arrays[name].nbytes for name in trainer.trained_values())

    whole = memory_of(compiled(Mesh(), optimizer="adam:lr=0.01").model, shapes(4))
    for rank, (total, parameters) in enumerate(run_threads(mesh.size, work)):
        shown = memory_of(program.model, shapes(4 // mesh.data), mesh=mesh, rank=rank)
        assert shown.total == total
        assert parameters <= shown.parameters == shown.gradients <= parameters + 64 < 0.65 * whole.parameters  # whole vectors
        assert shown.optimizer == 2 * shown.parameters
        assert shown.evaluation > 1.8 * 0.9 * parameters


def shapes(count: int) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in batch(0, count).items()}


@pytest.mark.full
def test_inspect_shows_the_memory_of_a_rank_of_the_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, path = compiled(Mesh(data=2, tensor=2), optimizer="adam:lr=0.01"), str(tmp_path / "t.onnx")
    frontends.save(program.model, path)
    assert main(["inspect", path, "--memory", "--batch-size", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"] == 4
    assert found["total"] == memory_of(program.model, shapes(2), mesh=Mesh(data=2, tensor=2)).total

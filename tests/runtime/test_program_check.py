"""Workers that do not run the same thing are told so before the first step, by what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphc
from graphc.compiler import training_pipeline
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.distributed.world import find_world
from graphc.options import CompileOptions
from graphc.pipeline import PASSES, Context, PassCall, graph_pass
from tests.cli.models import MLP, blobs, parse, write_mlp
from tests.runtime.mpi_run import run_mpi

LOSS = graphc.losses.SoftmaxCrossEntropy()
OPTIMIZER = graphc.optim.SGD(lr=0.1)


def train(comm: ThreadCommunicator, model: Any, **options: Any) -> dict[str, np.ndarray]:
    """The trained weights after one step."""
    program = graphc.compile(model, **{"loss": LOSS, "optimizer": OPTIMIZER, "backend": "numpy", **options})
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        data = blobs(8)
        trainer.step({name: data[name] for name in ("x", "label")})
        return {name: np.array(value) for name, value in trainer.trained_values().items()}


def test_different_model_files(tmp_path: Path) -> None:
    """Files that differ in nothing but a weight, which rank 0 would give to all."""
    for rank in range(3):
        onnx.save(parse(MLP, seed=rank // 2), tmp_path / f"{rank}.onnx")
    message = r"different model files: \S+/0.onnx \(sha256 \w{12}…\) on rank 0 and \S+/2.onnx \(sha256 \w{12}…\) on rank 2"
    with pytest.raises(graphc.GraphcError, match=message):
        run_threads(3, lambda comm: train(comm, tmp_path / f"{comm.rank}.onnx"))


def test_external_data_belongs_to_the_file(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        options = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
        onnx.save(parse(MLP, seed=rank), tmp_path / str(rank) / "m.onnx", **options)
    with pytest.raises(graphc.GraphcError, match="different model files"):
        run_threads(2, lambda comm: train(comm, tmp_path / str(comm.rank) / "m.onnx"))
    run_threads(2, lambda comm: train(comm, tmp_path / "0" / "m.onnx"))


def test_models_in_memory_get_the_weights_of_rank_0() -> None:
    """As if every rank had been given the model of rank 0."""
    (rank0, rank1) = run_threads(2, lambda comm: train(comm, parse(MLP, seed=comm.rank)))
    expected, _ = run_threads(2, lambda comm: train(comm, parse(MLP, seed=0)))
    other, _ = run_threads(2, lambda comm: train(comm, parse(MLP, seed=1)))
    for name, value in expected.items():
        np.testing.assert_array_equal(rank0[name], value)
        np.testing.assert_array_equal(rank1[name], value)
        assert (other[name] != value).any()


@pytest.mark.parametrize(
    ("change", "options", "shown"),
    [
        (
            ("", ""),
            {"optimizer": graphc.optim.Adam(lr=0.1)},
            r"entry 0 is 'pipeline .*sgd.*' on rank 0 and 'pipeline .*adam.*' on",
        ),
        (("8]", "9]"), {}, r"entry \d+ is 'state b1 FLOAT \(8,\)' on rank 0 and 'state b1 FLOAT \(9,\)' on rank 1"),
        (("w2", "v2"), {}, r"entry \d+ is 'state w1 .*' on rank 0 and 'state v2 FLOAT \(8, 3\)' on rank 1"),
    ],
    ids=["optimizer", "shape of a parameter", "name of a parameter"],
)
def test_different_programs_of_models_in_memory(change: tuple[str, str], options: dict[str, Any], shown: str) -> None:
    texts = MLP, MLP.replace(*change).replace("float[9] b1, float[8,3]", "float[9] b1, float[9,3]")
    with pytest.raises(graphc.GraphcError, match=f"the ranks disagree on program: {shown}"):
        run_threads(2, lambda comm: train(comm, parse(texts[comm.rank]), **(options if comm.rank else {})))


@pytest.mark.parametrize(
    ("attribute", "value", "shown"),
    [
        ("tag", "other", r"AllReduce\(sum\) other over data: FLOAT\[\]"),
        ("reduce", "max", r"AllReduce\(max\) \S+ over data: FLOAT\[\]"),
        ("group", "pipe", ""),  # each group has a sequence of its own, in which it is missing
    ],
)
def test_different_collectives(attribute: str, value: str, shown: str, tmp_path: Path) -> None:
    """A pass that does something else on rank 1 only: the collective is named as either rank has it."""

    @graph_pass("unequal")
    def unequal(model: ir.Model, ctx: Context) -> bool:
        tag = next(node.attributes["tag"].as_string() for node in reversed(model.graph) if node.op_type == "AllReduceWait")
        for node in model.graph:
            if find_world().rank == 1 and "tag" in node.attributes and node.attributes["tag"].as_string() == tag:
                node.attributes[attribute] = ir.AttrString(attribute, value)
        return True

    try:
        steps = [*training_pipeline(LOSS, OPTIMIZER, CompileOptions(bucket_mb=1e-5)), PassCall("unequal")]
        path = write_mlp(tmp_path)
        message = rf"disagree on collective: entry \d+ is 'AllReduce\(sum\) \S+ over data: FLOAT\[.*\]' on rank 0 and '{shown}"
        message = message.replace(r"\[\]", r"\[[^']*\]") if shown else message.removesuffix("'") + "nothing on rank 1"
        with pytest.raises(graphc.GraphcError, match=message):
            run_threads(2, lambda comm: train(comm, path, passes=steps))
    finally:
        PASSES.remove("unequal")


@pytest.mark.mpi
def test_different_versions_of_graphc(tmp_path: Path) -> None:
    program = (
        "import os, graphc\nrank = os.environ['OMPI_COMM_WORLD_RANK']\nif rank == '1': graphc.__version__ = '9.0'\n"
        f"p = graphc.compile({str(write_mlp(tmp_path))!r}, loss=graphc.losses.SoftmaxCrossEntropy(),"
        " optimizer=graphc.optim.SGD(lr=0.1))\ngraphc.Trainer(p)\n"
    )
    done = run_mpi(2, program)
    assert done.code == 1, done.text
    told = f"the ranks have different versions of graphc: {graphc.__version__} on rank 0 and 9.0 on rank 1"
    assert done.err == f"graphc: ranks 0, 1 failed: {told}\n"

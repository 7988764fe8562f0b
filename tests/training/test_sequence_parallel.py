"""Sequence parallelism: what lies between divided products is divided along the sequence, with the numbers of one worker."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphc
from graphc.distributed.threads import run_threads
from graphc.mesh import Mesh
from graphc.plan.partition import make_plan
from graphc.report.memory import memory_of
from tests.runtime.mpi_run import map_ranks
from tests.tiers import params
from tests.training import small, tensor_cases
from tests.training.sequence_cases import BLOCKS, CASES, compiled, model, tokens, train

NEAR = 1e-5


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """Training on one worker."""
    return train(None, name, Mesh())


def assert_equal_training(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for one in found:
        np.testing.assert_allclose(one["losses"], expected["losses"], atol=NEAR)
        np.testing.assert_allclose(one["evaluated"], expected["evaluated"], atol=NEAR)
        assert one["weights"].keys() == expected["weights"].keys()
        for name, array in expected["weights"].items():
            np.testing.assert_allclose(one["weights"][name], array, atol=NEAR, err_msg=name)
        assert one["hash"] == found[0]["hash"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mesh"),
    params(
        product(CASES, ("tensor=2", "tensor=4", "data=2,tensor=2")),
        large=[*product(CASES, ("tensor=2",)), ("bert", "tensor=4"), ("flat", "tensor=4"), ("flat", "data=2,tensor=2")],
    ),
)
def test_parts_of_sequences_equal_one_worker(name: str, mesh: str) -> None:
    """Norms before and behind the sums, dropout, tied embeddings, flattened tokens; replicas with unequal shares too."""
    sizes = Mesh.parse(mesh)
    assert_equal_training(run_threads(sizes.size, lambda comm: train(comm, name, sizes)), alone(name))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        pytest.param("flat", "data=2,tensor=2", {"accumulate": 2, "strategy": "zero:stage=2"}, marks=pytest.mark.large),
        ("gpt", "pipe=2,tensor=2", {"accumulate": 2}),
    ],
)
def test_micro_batches_stages_and_divided_states_equal_one_worker(name: str, mesh: str, options: dict[str, Any]) -> None:
    sizes = Mesh.parse(mesh)
    assert_equal_training(run_threads(sizes.size, lambda comm: train(comm, name, sizes, **options)), alone(name))


@pytest.mark.full
def test_one_norm_clips_all_shards() -> None:
    wanted, mesh = train(None, "bert", Mesh(), clip_norm=0.1), Mesh(tensor=2)
    assert_equal_training(run_threads(2, lambda comm: train(comm, "bert", mesh, clip_norm=0.1)), wanted)


@pytest.mark.mpi
@pytest.mark.large  # test_tensor_parallel.py trains on processes, and test_mpi.py runs these collectives there
def test_on_processes() -> None:
    assert_equal_training(map_ranks(2, train, "gpt", Mesh(tensor=2)), alone("gpt"))


@pytest.mark.full
def test_a_checkpoint_goes_on_without_parts(tmp_path: Path) -> None:
    """Written by two ranks that divide sequences, and read by one worker."""

    def first(comm: Any) -> float:
        with graphc.Trainer(compiled("gpt", Mesh(tensor=2)), comm=comm, threads=1) as trainer:
            trainer.step(tokens(0, 4))
            trainer.save(tmp_path)
            return float(trainer.step(tokens(1, 4))["loss"])

    found = run_threads(2, first)
    with graphc.Trainer(compiled("gpt", Mesh()), threads=1) as trainer:
        trainer.restore(tmp_path)
        assert found == pytest.approx([trainer.step(tokens(1, 4))["loss"]] * 2, abs=NEAR)


def collectives(program: graphc.Program, mesh: Mesh) -> dict[str, int]:
    """Started collectives of a layer's size or of gradients, by op; without those of the loss over classes."""
    plan = make_plan(program.model, shapes(4), mesh=mesh)
    starts = [step.collective for step in plan.steps if step.kind == "start"]
    names = [one.op for one in starts if one.group == "tensor" and "loss/" not in one.tag]
    return {name: names.count(name) for name in sorted(set(names))}


def shapes(count: int) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in tokens(0, count).items()}


@pytest.mark.full
def test_every_sum_becomes_two_halves() -> None:
    """Of a GPT with L blocks: 2 L + 1 sums forward (a block has two, the embeddings one) and as many backward (before the
    classes). Once a step the gradients of norms and biases are added up; those of the table of positions are put together.
    """
    mesh, sums = Mesh(tensor=2), 2 * BLOCKS + 1
    assert collectives(compiled("gpt", mesh, "auto"), mesh) == {"AllReduce": 2 * sums}
    assert collectives(compiled("gpt", mesh), mesh) == {
        "AllGatherStack": 2 * sums + 1,
        "AllReduce": 1,
        "ReduceScatterStack": 2 * sums,
    }


def wide(mesh: Mesh, shard: str) -> graphc.Program:
    """A stack whose activations outweigh its weights."""
    return compiled("gpt", mesh, shard, optimizer="adam:lr=0.01")


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(tensor=4)], ids=str)
def test_activations_take_less_memory(mesh: Mesh) -> None:
    """What a trainer allocates is what is reported: of activations, less than with whole sequences between the products.

    At widths as small as these, which products are steps of their own decides about some percent, either way.
    """
    count = 8
    whole = memory_of(wide(mesh, "auto").model, shapes(count), mesh=mesh)
    program = wide(mesh, "auto:sequence")

    def work(comm: Any) -> int:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            trainer.step(tokens(0, count))
            return small.allocated(trainer)

    for rank, total in enumerate(run_threads(mesh.size, work)):
        shown = memory_of(program.model, shapes(count), mesh=mesh, rank=rank)
        assert shown.total == total
        assert shown.parameters == whole.parameters
        assert shown.activations < (0.95 if mesh.tensor == 2 else 0.9) * whole.activations


def report(program: graphc.Program) -> str:
    return "\n".join(line for line in program.log if line.startswith("tensor_parallel"))


def test_a_length_that_is_not_divided_stays_whole() -> None:
    """Four ranks, six tokens: the plan is that of ``auto``, and the log says why."""
    mesh = Mesh(tensor=4)
    program = tensor_cases.compiled(mesh, shard=["auto:sequence"])
    assert "whole on every rank: e/AllReduce and 4 more, for axis 1 has 6 positions, which 4 does not divide" in report(program)
    assert collectives_of(program) == collectives_of(tensor_cases.compiled(mesh))


def collectives_of(program: graphc.Program) -> list[str]:
    return [n.op_type for n in program.model.graph if n.op_type.endswith("Start")]


def test_a_length_of_any_size_stays_whole() -> None:
    text = """
        h = MatMul (x, up) r = Relu (h) y = MatMul (r, down) s = Add (y, x)
        a = MatMul (s, up2) b = Relu (a) c = MatMul (b, down2)
    """
    weights = {"up": (4, 8), "down": (8, 4), "up2": (4, 8), "down2": (8, 3)}
    program = graphc.compile(
        model("(float[N, S, 4] x) => (float[N, S, 3] c)", text, weights),
        loss=graphc.losses.MSE(),
        optimizer=graphc.optim.SGD(lr=0.1),
        mesh=Mesh(tensor=2),
        shard=["auto:sequence"],
    )
    assert "2 does not divide axis 1, of size S, whatever that is" in report(program)
    assert "ReduceScatterStackStart" not in collectives_of(program)


def test_the_length_of_a_batch_is_no_sequence() -> None:
    """[batch, features]: the axis of samples is not divided."""
    program = small.compiled("sgd:lr=0.1", mesh=Mesh(tensor=2), shard=["auto:sequence"])
    assert "ReduceScatterStackStart" not in collectives_of(program)

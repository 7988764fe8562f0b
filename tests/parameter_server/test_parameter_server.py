"""Parameter servers over threads: synchronous ones are the mirrored strategy, asynchronous ones lose and repeat nothing."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphc
from graphc import demo
from graphc.bench.specs import SPECS
from graphc.data import shard, share
from graphc.device import Run
from graphc.distributed.threads import run_threads
from graphc.frontends.training_export import standard_model
from graphc.ir.ops.parameter_server import server_options
from tests.parameter_server.parameter_server_cases import COUNTING, OPTIMIZERS, compiled, train

pytestmark = pytest.mark.full


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_synchronous_is_mirrored_to_the_bit(servers: int, optimizer: str, exported: Callable[[str], str]) -> None:
    path = exported("mlp")
    mirrored = run_threads(2, lambda comm: train(comm, path, "mlp", "mirrored", optimizer))
    strategy = f"parameter_server:servers={servers},staleness=0"
    served = run_threads(2 + servers, lambda comm: train(comm, path, "mlp", strategy, optimizer))
    assert {digest for _, digest in served} == {mirrored[0][1]}
    assert [losses for losses, _ in served[servers:]] == [mirrored[0][0]] * 2


@pytest.mark.parametrize("strategy", ["parameter_server", "parameter_server:servers=2,staleness=1"])
def test_one_asynchronous_worker_is_one_worker(strategy: str, exported: Callable[[str], str]) -> None:
    """A worker sees its own last push, so without others nothing is stale."""
    path = exported("mlp")
    (alone,) = run_threads(1, lambda comm: train(comm, path, "mlp", "mirrored", "adam"))
    *_, worker = run_threads(3 if "=2" in strategy else 2, lambda comm: train(comm, path, "mlp", strategy, "adam"))
    assert worker == alone


ONE = {"x": np.ones((1, 1), np.float32)}


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("counting") / "counting.onnx"
    onnx.save(onnx.parser.parse_model(COUNTING), path)
    return str(path)


def count_program(path: str, strategy: str) -> graphc.Program:
    return graphc.compile(path, loss=graphc.losses.Output("loss"), optimizer=graphc.optim.SGD(lr=1.0), strategy=strategy)


def counted(trainer: graphc.Trainer) -> set[float]:
    """The number of pushes as each element of each parameter that this rank knows has seen it."""
    known = [array for name, array in trainer.state.arrays.items() if name in ("v", "w")]
    return {float(-n) for array in known for n in np.unique(array)}


def push_often(comm: Any, path: str, strategy: str, steps: int) -> tuple[set[float], int]:
    with graphc.Trainer(count_program(path, strategy), comm=comm, threads=1) as trainer:
        trainer.fit([ONE] * steps)
        return counted(trainer), trainer.steps_done


@pytest.mark.parametrize(
    "strategy", ["parameter_server", "parameter_server:servers=2", "parameter_server:servers=2,staleness=3"]
)
def test_every_push_counts_once(strategy: str, counting: str) -> None:
    results = run_threads(6 if "=2" in strategy else 5, lambda comm: push_often(comm, counting, strategy, 50))
    assert results[0][1] == 200
    assert [values for values, _ in results] == [{200.0}] * len(results)  # on servers, and what workers end with


def race(comm: Any, path: str, strategy: str, log: list[tuple[int, str, int]]) -> None:
    """Worker 0 is slow; ``log`` holds (worker, what, its step) in order."""
    own = [0]

    def wrap(kind: str, name: str, run: Run) -> Run:
        first = [True]

        def noted() -> None:
            if name.startswith("push/"):
                if pushes.setdefault(own[0], name) == name:
                    log.append((worker, "push", own[0]))
            elif begun.setdefault(own[0], name) == name and first:
                log.append((worker, "start", own[0]))
            run()

        return noted

    begun: dict[int, str] = {}
    pushes: dict[int, str] = {}
    worker = comm.rank - 1
    with graphc.Trainer(count_program(path, strategy), comm=comm, threads=1, wrap=wrap) as trainer:
        if trainer.is_server:
            trainer.serve()
            return
        for step in range(12):
            own[0] = step
            if worker == 0:
                time.sleep(0.01)
            trainer.step(ONE)
        trainer.finish()


def largest_lead(log: list[tuple[int, str, int]], workers: int) -> int:
    """By how many steps a worker that starts a step was ahead of what the slowest had begun to push."""
    pushed = [0] * workers
    lead = 0
    for worker, what, step in log:
        if what == "push":
            pushed[worker] = step + 1
        else:
            lead = max(lead, step - min(pushed))
    return lead


@pytest.mark.parametrize("staleness", [1, 3])
def test_nobody_is_further_ahead_than_the_staleness_allows(staleness: int, counting: str) -> None:
    log: list[tuple[int, str, int]] = []
    run_threads(4, lambda comm: race(comm, counting, f"parameter_server:staleness={staleness}", log))
    assert largest_lead(log, 3) == staleness  # reached, for worker 0 is slow, and not exceeded


def test_without_a_bound_nobody_waits(counting: str) -> None:
    log: list[tuple[int, str, int]] = []
    run_threads(4, lambda comm: race(comm, counting, "parameter_server", log))
    assert largest_lead(log, 3) > 3


def deserting(comm: Any, path: str, strategy: str) -> tuple[int, dict[int, int], set[float]]:
    """Worker 1 leaves after two steps, in the middle of an epoch of 10 batches."""
    data = shard({"x": np.ones((20, 1), np.float32)}, global_batch=2, rank=0, size=2)
    with graphc.Trainer(count_program(path, strategy), comm=comm, threads=1) as trainer:
        if comm.rank == trainer.servers + 1:
            trainer.step(ONE)
            trainer.step(ONE)
            return 0, {}, set()
        trainer.fit(data, epochs=3)
        return trainer.steps_done, trainer.lost, counted(trainer)


@pytest.mark.parametrize("servers", [1, 2])
def test_the_others_take_the_data_of_a_worker_that_is_gone(servers: int, counting: str) -> None:
    results = run_threads(servers + 2, lambda comm: deserting(comm, counting, f"parameter_server:servers={servers}"))
    steps, lost, values = results[0]
    assert list(lost) == [1]
    assert steps == 62  # all 3 · 10 · 2 shares by worker 0, and what worker 1 pushed before
    assert values == {62.0}


def test_synchronous_workers_go_on_without_one_that_is_gone(counting: str) -> None:
    results = run_threads(3, lambda comm: deserting(comm, counting, "parameter_server:staleness=0"))
    steps, lost, values = results[0]
    assert list(lost) == [1]
    assert 0 <= lost[1] <= 3
    assert steps == 30  # a step a batch, whoever takes part
    assert values == {30.0}


def all_gone(comm: Any, path: str) -> None:
    with graphc.Trainer(count_program(path, "parameter_server"), comm=comm, threads=1) as trainer:
        if comm.rank == 0:
            trainer.fit([])
        else:
            trainer.step(ONE)


def test_servers_do_not_wait_for_nobody(counting: str) -> None:
    with pytest.raises(graphc.errors.WorldError, match="all workers are gone"):
        run_threads(3, lambda comm: all_gone(comm, counting))


def scheduled(comm: Any, path: str) -> set[float]:
    program = count_program(path, "parameter_server:servers=2")
    with graphc.Trainer(program, comm=comm, threads=1, schedule=lambda step: float(2**step)) as trainer:
        trainer.fit([ONE] * 5)
        return counted(trainer)


def test_the_learning_rate_belongs_to_the_step_on_every_server(counting: str) -> None:
    results = run_threads(3, lambda comm: scheduled(comm, counting))
    assert results[0] == {2.0**5 - 1}


BATCHNORM = """<ir_version: 10, opset_import: ["": 21]>
normalised (float[batch, 6] input) => (float[batch, 3] logits)
<float[6] scale = {1, 1, 1, 1, 1, 1}, float[6] bias = {0, 0, 0, 0, 0, 0}, float[6] mean = {0, 0, 0, 0, 0, 0},
 float[6] var = {1, 1, 1, 1, 1, 1}, float[6, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9}>
{
  normal = BatchNormalization(input, scale, bias, mean, var)
  logits = MatMul(normal, w)
}"""


def normalised(comm: Any, path: str, strategy: str) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((10, 8, 6), dtype=np.float32) + 2, rng.integers(0, 3, (10, 8))
    with graphc.Trainer(compiled(path, strategy, "sgd:lr=0.1"), comm=comm, threads=1) as trainer:
        servers = trainer.servers
        mine = share(8, comm.rank - servers, comm.size - servers)
        if trainer.servers:
            trainer.fit([{"input": a[mine], "label": b[mine]} for a, b in zip(x, y, strict=True)])
        else:
            for a, b in zip(x, y, strict=True):
                trainer.step({"input": a[mine], "label": b[mine]})
        return {name: trainer.state.arrays[name].copy() for name in ("mean", "var", "w")}


def test_running_statistics_are_averaged_by_the_servers(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(BATCHNORM), tmp_path / "bn.onnx")
    path = str(tmp_path / "bn.onnx")
    mirrored = run_threads(2, lambda comm: normalised(comm, path, "mirrored"))[0]
    synchronous = run_threads(3, lambda comm: normalised(comm, path, "parameter_server:staleness=0"))
    for found in synchronous:
        for name, value in mirrored.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    free = run_threads(3, lambda comm: normalised(comm, path, "parameter_server"))[0]
    # 20 pushes move the mean by 1 - 0.9²⁰ of the way from 0 to 2.
    np.testing.assert_allclose(free["mean"], 2 * (1 - 0.9**20), atol=0.25)


def interrupted(comm: Any, path: str, strategy: str, folder: Path, resume: bool, epochs: int) -> tuple[int, str]:
    x, y = SPECS["mlp"].batch(40, 0)
    with graphc.Trainer(compiled(path, strategy), comm=comm, threads=1) as trainer:
        data = shard({"input": x, "label": y}, global_batch=8, rank=0, size=trainer.workers)
        if resume:
            trainer.restore(folder)
        events: list[dict[str, Any]] = []

        def keep(event: dict[str, Any]) -> None:
            events.append(event)
            if event == {**event, "event": "epoch", "epoch": 2} and not resume:
                trainer.save(folder)

        trainer.fit(data, epochs=epochs, callbacks=[keep])
        if comm.rank == 0:
            assert [e["epoch"] for e in events] == ([3, 4] if resume else list(range(1, epochs + 1)))
        return trainer.steps_done, trainer.state_sha256()


@pytest.mark.parametrize(("strategy", "ranks"), [("parameter_server:servers=2", 3), ("parameter_server:staleness=0", 3)])
def test_a_checkpoint_continues(strategy: str, ranks: int, exported: Callable[[str], str], tmp_path: Path) -> None:
    """One asynchronous worker, or two synchronous ones: what they compute does not depend on timing."""
    path = exported("mlp")
    whole = run_threads(ranks, lambda comm: interrupted(comm, path, strategy, tmp_path, False, 4))
    rest = run_threads(ranks, lambda comm: interrupted(comm, path, strategy, tmp_path, True, 2))
    assert whole[0] == rest[0]
    assert whole[0][0] == 20


def continued(comm: Any, path: str, folder: Path) -> tuple[int, str]:
    x, y = SPECS["mlp"].batch(40, 0)
    with graphc.Trainer(compiled(path, "mirrored"), comm=comm, threads=1) as trainer:
        trainer.restore(folder)
        trainer.fit(shard({"input": x, "label": y}, global_batch=8, rank=comm.rank, size=comm.size), epochs=2)
        return trainer.steps_done, trainer.state_sha256()


def test_another_strategy_goes_on_from_a_checkpoint(exported: Callable[[str], str], tmp_path: Path) -> None:
    path, strategy = exported("mlp"), "parameter_server:servers=2,staleness=0"
    whole = run_threads(4, lambda comm: interrupted(comm, path, strategy, tmp_path, False, 4))
    assert run_threads(2, lambda comm: continued(comm, path, tmp_path)) == [whole[0]] * 2


def poisoned(comm: Any, path: str, strategy: str) -> tuple[str, set[float]]:
    with graphc.Trainer(count_program(path, strategy), comm=comm, threads=1) as trainer:
        bad = {"x": np.full((1, 1), np.nan, np.float32)}
        feeds = [ONE] * 5 + [bad if comm.rank == comm.size - 1 else ONE] + [ONE] * 1000
        with pytest.raises(graphc.errors.NonFiniteError) as caught:
            trainer.fit(feeds)
        trainer.export(path + ".last")
        return str(caught.value), counted(trainer)


@pytest.mark.parametrize("strategy", ["parameter_server", "parameter_server:servers=2", "parameter_server:staleness=0"])
def test_a_nan_ends_the_run_on_all_ranks(strategy: str, counting: str) -> None:
    results = run_threads(4, lambda comm: poisoned(comm, counting, strategy))
    assert len({text for text, _ in results}) == 1
    text, values = results[0]
    assert "first in tensor 'x' on worker" in text
    assert "(rank 3)" in text
    (pushes,) = values  # whole, and finite
    assert pushes >= 5


def accuracy(comm: Any, workers: int) -> float | None:
    digits = demo.load_digits()
    program = graphc.compile(
        str(demo.MODEL),
        loss=graphc.losses.SoftmaxCrossEntropy(metrics=True),
        optimizer=graphc.optim.Adam(lr=2e-3),
        strategy="parameter_server:servers=1",
    )
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        trainer.fit(shard(digits.train, global_batch=32 * workers, rank=0, size=workers), epochs=4)
        if comm.rank == 0:
            return trainer.evaluate(shard(digits.test, global_batch=64, rank=0, size=1))["accuracy"]
        return None


def test_three_asynchronous_workers_learn_the_digits() -> None:
    found = run_threads(4, lambda comm: accuracy(comm, 3))[0]
    assert found is not None
    assert found >= 0.95


def fitted(comm: Any, path: str, strategy: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """What fit returns on one rank, and the events that it was told."""
    events: list[dict[str, Any]] = []
    x, y = SPECS["mlp"].batch(32, 0)
    with graphc.Trainer(compiled(path, strategy), comm=comm, threads=1) as trainer:
        rank = 0 if trainer.servers else trainer.rank
        data = shard({"input": x, "label": y}, global_batch=8, rank=rank, size=trainer.workers)
        return trainer.fit(data, epochs=2, callbacks=[events.append], log_every=3), events


def test_fit_returns_and_tells_what_it_does_without_servers(exported: Callable[[str], str]) -> None:
    path = exported("mlp")
    mirrored = run_threads(2, lambda comm: fitted(comm, path, "mirrored"))
    served = run_threads(4, lambda comm: fitted(comm, path, "parameter_server:servers=2,staleness=0"))
    assert mirrored[0][0].keys() == {"loss"}
    assert [means for means, _ in served] == [mirrored[0][0]] * 4
    assert served[0][1] == mirrored[0][1]
    assert [events for _, events in served[1:]] == [[]] * 3  # rank 0 alone calls


def skipping(comm: Any, path: str, strategy: str) -> tuple[list[Any], int, dict[str, float]]:
    """The events of a run whose second step of three is broken on one worker."""
    events: list[dict[str, Any]] = []
    bad = {"x": np.full((1, 1), np.inf, np.float32)}
    loss, optimizer = graphc.losses.Output("loss"), graphc.optim.SGD(lr=1.0)
    program = graphc.compile(path, loss=loss, optimizer=optimizer, strategy=strategy, nonfinite="skip")
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        means = trainer.fit([ONE, bad if comm.rank == comm.size - 1 else ONE, ONE], callbacks=[events.append])
        return [(e["event"], e.get("step")) for e in events], trainer.skipped_steps, means


def test_skipped_steps_are_told_and_counted_in_no_mean(counting: str) -> None:
    mirrored = run_threads(2, lambda comm: skipping(comm, counting, "mirrored"))
    served = run_threads(3, lambda comm: skipping(comm, counting, "parameter_server:staleness=0"))
    assert served[0] == mirrored[0]
    assert served[0][:2] == ([("skipped", 2), ("epoch", None)], 1)
    assert served[1][2] == served[0][2]


# The graph ----------------------------------------------------------------------------------------------------------------


def test_the_graph_says_it_all(exported: Callable[[str], str], tmp_path: Path) -> None:
    """A saved and reloaded graph has the same servers; for other runtimes it is the graph of one worker."""
    program = compiled(exported("mlp"), "parameter_server:servers=2,staleness=4")
    ir.save(program.model, tmp_path / "served.onnx")
    found = server_options(ir.load(tmp_path / "served.onnx").graph)
    assert found is not None
    assert (found.servers, found.staleness) == (2, 4)
    kinds = {node.domain for node in standard_model(program.model).graph}
    assert kinds == {""}
    assert server_options(compiled(exported("mlp"), "mirrored").model.graph) is None


def test_each_role_has_a_plan(exported: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients of layers end in pushes on a worker; servers begin with them and update their flat buckets."""
    from graphc.cli import main

    ir.save(compiled(exported("mlp"), "parameter_server:servers=2").model, tmp_path / "served.onnx")
    assert main(["show", "plan", str(tmp_path / "served.onnx"), "--batch", "8"]) == 0
    worker, *servers = re.split(r"^plan of .*\n", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert len(servers) == 2
    assert "push/data/b0" in worker
    assert "update" not in worker
    for text in servers:
        steps = re.findall(r"^ +\d+ +(\w+)", text, re.MULTILINE)
        assert steps[0] == "kernel"
        assert steps[-1] == "update"


def test_clipping_by_the_global_norm_sends_every_gradient_to_every_server(exported: Callable[[str], str]) -> None:
    path = exported("mlp")

    def clipped(comm: Any, strategy: str) -> str:
        program = compiled(path, strategy, clip_norm=0.01)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            servers = comm.size - 2
            mine = share(8, comm.rank - servers, 2)
            batches = [SPECS["mlp"].batch(8, k) for k in range(3)]
            feeds = [{"input": x[mine], "label": y[mine]} for x, y in batches]
            trainer.fit(feeds)
            return trainer.state_sha256()

    mirrored = run_threads(2, lambda comm: clipped(comm, "mirrored"))
    served = run_threads(4, lambda comm: clipped(comm, "parameter_server:servers=2,staleness=0"))
    assert set(served) == set(mirrored)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("parameter_server:servers=7", {}, "7 servers are more than the 6 parameters"),
        ("parameter_server:servers=0", {}, "servers must be at least 1"),
        ("parameter_server:staleness=-2", {}, "staleness at least 0"),
        ("parameter_server:server=1", {}, "no option 'server'; did you mean 'servers'"),
        ("parameter_server", {"precision": "fp16"}, "bf16, or staleness=0"),
        ("parameter_server", {"accumulate": 2}, "accumulate=2 exclude each other: a worker pushes the gradients of each batch"),
        ("parameter_server", {"compress": "powersgd:rank=2"}, "for which there are bf16 and fp16"),
    ],
)
def test_bad_options(strategy: str, options: dict[str, Any], message: str, exported: Callable[[str], str]) -> None:
    with pytest.raises(graphc.errors.UsageError, match=message):
        compiled(exported("mlp"), strategy, **options)


def test_bad_worlds(counting: str) -> None:
    program = count_program(counting, "parameter_server:servers=2")
    with pytest.raises(graphc.errors.UsageError, match="leaves no worker"):
        run_threads(2, lambda comm: graphc.Trainer(program, comm=comm))
    loss, optimizer = graphc.losses.Output("loss"), graphc.optim.SGD(lr=1.0)
    for_two = graphc.compile(counting, loss=loss, optimizer=optimizer, strategy="parameter_server", mesh=graphc.Mesh(data=2))
    with pytest.raises(graphc.errors.WorldError, match=r"want 3 processes, the world has 2"):
        run_threads(2, lambda comm: graphc.Trainer(for_two, comm=comm))


def late(comm: Any, path: str, strategy: str, ended: threading.Event) -> None:
    """Rank 2 stops after its first step until the others have given up."""
    with graphc.Trainer(count_program(path, strategy), comm=comm, threads=1, deadline=2.0) as trainer:
        if comm.rank == 2:
            trainer.step(ONE)
            ended.wait(60)
        try:
            trainer.fit([ONE] * 100)
        finally:
            ended.set()


@pytest.mark.parametrize(
    "strategy", ["parameter_server:staleness=0", pytest.param("parameter_server:staleness=2", marks=pytest.mark.large)]
)
def test_a_worker_that_does_not_come_is_named(strategy: str, counting: str) -> None:
    ended = threading.Event()
    with pytest.raises(graphc.errors.WorldError, match=r"nothing has come from worker 1 \(rank 2\) within 2 s"):
        run_threads(3, lambda comm: late(comm, counting, strategy, ended))


def foreign(comm: Any, path: str) -> None:
    x = {"x": np.ones((8, 1), np.float32)}
    with graphc.Trainer(count_program(path, "parameter_server"), comm=comm, threads=1) as trainer:
        for data, message in (
            (shard(x, global_batch=4, rank=comm.rank, size=comm.size), "cut for 3 workers, there are 2"),
            (shard(x, global_batch=4, rank=0, size=2, tail="weight-zero"), "a push needs a sample"),
        ):
            with pytest.raises(graphc.errors.UsageError, match=message):
                trainer.fit(data)


def test_data_for_other_workers_is_refused(counting: str) -> None:
    run_threads(3, lambda comm: foreign(comm, counting))


def misused(comm: Any, path: str) -> list[str]:
    texts = []
    with graphc.Trainer(count_program(path, "parameter_server"), comm=comm, threads=1) as trainer:
        wrong: Callable[[], object] = (lambda: trainer.step(ONE)) if trainer.is_server else trainer.serve
        with pytest.raises(graphc.errors.UsageError) as caught:
            wrong()
        texts.append(str(caught.value))
        trainer.fit([ONE])
        with pytest.raises(graphc.errors.UsageError) as caught:
            trainer.fit([ONE])
        texts.append(str(caught.value))
    return texts


def test_roles_are_told_apart(counting: str) -> None:
    server, worker = run_threads(2, lambda comm: misused(comm, counting))
    assert "rank 0 is a parameter server" in server[0]
    assert "rank 1 is a worker" in worker[0]
    assert "make a new Trainer" in server[1]
    assert "make a new Trainer" in worker[1]

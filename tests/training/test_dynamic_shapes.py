"""Models in which shapes depend on the data train as in PyTorch: masks that select, and edges of graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import graphc  # noqa: E402
from graphc.distributed.threads import run_threads  # noqa: E402
from graphc.errors import DataDependentShapeError, FeedError, GraphcError  # noqa: E402
from tests.tiers import params  # noqa: E402

F = torch.nn.functional


class Masked(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A language model that scores the masked tokens only, as BERT's pretraining does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.rnn = torch.nn.GRU(16, 16, batch_first=True)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 50)

    def forward(self, ids: Any, mask: Any) -> Any:
        hidden = self.norm(self.rnn(self.embed(ids))[0])
        return F.cross_entropy(self.head(hidden[mask]), ids[mask])


class Graph(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Two convolutions over a graph whose loops are taken out of the edges, and put back for every node."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

    def forward(self, x: Any, edges: Any) -> Any:
        edges = edges[:, edges[0] != edges[1]]
        nodes = torch.arange(x.shape[0])
        source, target = torch.cat([edges[0], nodes]), torch.cat([edges[1], nodes])
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones_like(target, dtype=torch.float32))
        share = (degree[source] * degree[target]).rsqrt()[:, None]
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(torch.zeros_like(y).index_add(0, target, y[source] * share))
        return (x**2).mean()


def masks(samples: int) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(samples, 12, generator=generator) < share for share in (0.4, 0.9, 0.1, 0.5)]


def losses_of_pytorch(module: Any, batches: list[tuple[Any, ...]]) -> list[float]:
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.5), []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def compiled(module: Any, batch: tuple[Any, ...], **options: Any) -> Any:
    return graphc.compile(
        module, example_inputs=batch, loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=0.5), **options
    )


@pytest.mark.parametrize(
    "backend", params(["onnxruntime", "onnxruntime:fuse=false", "numpy"], large=["onnxruntime:fuse=false"])
)
def test_tokens_that_a_mask_selects(backend: str) -> None:
    torch.manual_seed(0)
    module, ids = Masked(), torch.randint(0, 50, (6, 12))
    program = compiled(module, (ids, masks(6)[0]), backend=backend)
    with graphc.Trainer(program) as trainer:
        found = [trainer.step({"ids": ids.numpy(), "mask": mask.numpy()})["loss"] for mask in masks(6)]
        trained = trainer.trained_values()
    wanted = losses_of_pytorch(module, [(ids, mask) for mask in masks(6)])
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    for name, parameter in module.named_parameters():
        if name in trained:
            np.testing.assert_allclose(trained[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_two_workers_count_the_tokens_that_each_selects() -> None:
    torch.manual_seed(0)
    module, ids = Masked(), torch.randint(0, 50, (6, 12))
    program = compiled(module, (ids, masks(6)[0]), bucket_mb=0.001)

    def work(comm: Any) -> tuple[list[float], str]:
        mine = slice(0, 2) if comm.rank == 0 else slice(2, 6)
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            feeds = [{"ids": ids.numpy()[mine], "mask": mask.numpy()[mine]} for mask in masks(6)]
            return [trainer.step(feed)["loss"] for feed in feeds], trainer.state_sha256()

    (found, state), (_, other) = run_threads(2, work)
    assert state == other
    np.testing.assert_allclose(found, losses_of_pytorch(module, [(ids, mask) for mask in masks(6)]), rtol=1e-5)


def test_edges_of_a_graph() -> None:
    torch.manual_seed(0)
    module, x = Graph(), torch.randn(10, 8)
    batches = [(x, torch.randint(0, 10, (2, 30))) for _ in range(3)]
    with graphc.Trainer(compiled(module, batches[0])) as trainer:
        found = [trainer.step({"x": x.numpy(), "edges": edges.numpy()})["loss"] for _, edges in batches]
    np.testing.assert_allclose(found, losses_of_pytorch(module, batches), rtol=2e-6)


def test_the_batch_norm_of_chosen_rows() -> None:
    class Chosen(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)

        def forward(self, x: Any, mask: Any) -> Any:
            return (self.last(self.norm(self.first(x)[mask])) ** 2).mean()

    torch.manual_seed(0)
    module = Chosen()
    batches = [(torch.randn(samples, 8), torch.rand(samples) < share) for samples, share in ((6, 2.0), (20, 0.5), (9, 0.7))]
    with graphc.Trainer(compiled(module, batches[0])) as trainer:
        found = [trainer.step({"x": x.numpy(), "mask": mask.numpy()})["loss"] for x, mask in batches]
        trained = trainer.trained_values()
    np.testing.assert_allclose(found, losses_of_pytorch(module, batches), rtol=2e-5)
    for name, value in (*module.named_parameters(), ("norm.running_mean", module.norm.running_mean)):
        np.testing.assert_allclose(trained[name], value.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_sizes_that_come_back_are_planned_and_others_run_without() -> None:
    torch.manual_seed(0)
    module, x = Graph(), torch.randn(10, 8)
    nodes = torch.arange(32) % 4
    kinds = [torch.stack([nodes, (nodes + (torch.arange(32) <= n)) % 4]) for n in range(12)]  # of n + 1 edges and 31 - n loops
    batches = [(x, kinds[k]) for k in (0, 0, 1, 1, 1, *range(2, 12), 0, 1)]
    with graphc.Trainer(compiled(module, batches[0])) as trainer:
        found = [trainer.step({"x": x.numpy(), "edges": edges.numpy()})["loss"] for _, edges in batches]
        assert len(trainer.plans.training) == 3  # of the first sizes, of those that come again, and one for all others
    np.testing.assert_allclose(found, losses_of_pytorch(module, batches), rtol=1e-5)


class Pooled(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The mean of the nodes of each graph of a batch, whose number only the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x: Any, graph: Any) -> Any:
        count = int(graph.max()) + 1
        y = torch.tanh(self.layer(x))
        sums = y.new_zeros(count, 4).scatter_add(0, graph[:, None].expand(-1, 4), y)
        return (sums / y.new_zeros(count).index_add(0, graph, y.new_ones(10))[:, None].clamp(min=1)).square().mean()


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_a_number_in_a_feed_that_decides_a_shape(backend: str) -> None:
    torch.manual_seed(0)
    module = Pooled()
    batches = [(torch.randn(10, 8), torch.arange(10) % graphs) for graphs in (3, 3, 4, 3, 4, 7)]
    with graphc.Trainer(compiled(module, batches[0], backend=backend)) as trainer:
        found = [trainer.step({"x": x.numpy(), "graph": graph.numpy()})["loss"] for x, graph in batches]
        assert len(trainer.plans.training) == 3  # of 3 graphs, of 4; of all others, or of 7 where each size has its plan
    np.testing.assert_allclose(found, losses_of_pytorch(module, batches), rtol=2e-6)


class Padded(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Samples that are cut to the longest one of the batch, and a mask of what each of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x: Any, lengths: Any) -> Any:
        longest = int(lengths.max())
        torch._check(longest <= 12)
        mask = torch.arange(longest)[None] < lengths[:, None]
        return (self.layer(x[:, :longest]).tanh() * mask[..., None]).sum() / lengths.sum()


def test_samples_cut_to_the_longest_one() -> None:
    torch.manual_seed(0)
    module = Padded()
    batches = [(torch.randn(3, 12, 8), torch.tensor(lengths)) for lengths in ([3, 5, 2], [5, 1, 4], [7, 7, 2], [1, 5, 5])]
    with graphc.Trainer(compiled(module, batches[0], backend="numpy")) as trainer:  # which cannot run unplanned
        found = [trainer.step({"x": x.numpy(), "lengths": lengths.numpy()})["loss"] for x, lengths in batches]
        assert len(trainer.plans.training) == 2  # of 5, of 7
        with pytest.raises(FeedError, match="lengths"):
            trainer.step({"x": batches[0][0].numpy(), "lengths": np.array(["3", "5", "2"])})
    np.testing.assert_allclose(found, losses_of_pytorch(module, batches), rtol=2e-6)


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_an_edge_to_no_node_is_named(backend: str) -> None:
    module, x, edges = Graph(), torch.randn(10, 8), torch.randint(0, 10, (2, 30))
    with graphc.Trainer(compiled(module, (x, edges), backend=backend)) as trainer:
        trainer.step({"x": x.numpy(), "edges": edges.numpy()})
        before = trainer.state_sha256()
        edges[0, 7] = 10
        with pytest.raises(GraphcError, match="10") as error:
            trainer.step({"x": x.numpy(), "edges": edges.numpy()})
        assert "edges" in str(error.value)
        assert trainer.state_sha256() == before


class Norm(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A BatchNormalization before and after rows are chosen, by what is fed or by what the layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

    def forward(self, x: Any, mask: Any) -> Any:
        return (self.norm(self.first(x))[self.chosen(x, mask)] ** 2).mean() + self.norm(self.first(x)[mask]).sum()

    def chosen(self, x: Any, mask: Any) -> Any:
        return mask


class Choosing(Norm):
    def chosen(self, x: Any, mask: Any) -> Any:
        return self.first(x)[:, 0] > 0


def train_with_common_statistics(module: Any) -> None:
    program = compiled(module, (torch.randn(6, 8), torch.ones(6).bool()), sync_batchnorm=True)

    def work(comm: Any) -> None:
        with graphc.Trainer(program, comm=comm, threads=1) as trainer:
            for chosen in (6, 6, 4, 5):
                x = rng.standard_normal((6, 8)).astype(np.float32)
                assert np.isfinite(trainer.step({"x": x, "mask": np.arange(6) < chosen})["loss"])

    rng = np.random.default_rng(0)
    run_threads(2, work)


def test_a_collective_between_rows_that_a_feed_chooses() -> None:
    train_with_common_statistics(Norm())


def test_a_collective_between_rows_that_weights_choose_is_refused_with_what_to_do() -> None:
    with pytest.raises(DataDependentShapeError, match="weigh them by 0 or 1"):
        train_with_common_statistics(Choosing())

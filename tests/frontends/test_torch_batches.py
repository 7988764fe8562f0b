"""Modules that join, divide and count the samples of a batch, trained with batches of other sizes than their example."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import graphc  # noqa: E402
from graphc import frontends  # noqa: E402
from graphc.errors import FeedError, ModelError  # noqa: E402
from tests.tiers import params  # noqa: E402

pytestmark = pytest.mark.full

F = torch.nn.functional


class Pairs(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A loss of the encodings of two inputs."""

    def __init__(self, loss: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(8, 6)
        self.loss = loss

    def forward(self, a: Any, b: Any) -> Any:
        return self.loss(self.encoder, a, b)


def difference(u: Any, v: Any) -> Any:
    return (u * v.flip(1)).pow(2).mean()


def contrastive(encoder: Any, a: Any, b: Any) -> Any:
    """NT-Xent, as in SimCLR."""
    z = F.normalize(encoder(torch.cat([a, b])), dim=1)
    size = z.shape[0]
    alike = (z @ z.t() / 0.5).masked_fill(torch.eye(size, dtype=torch.bool), -1e9)
    return F.cross_entropy(alike, (torch.arange(size) + size // 2) % size)


def hardest(encoder: Any, a: Any, b: Any) -> Any:
    """The mean of the larger half of the losses, as in online hard example mining."""
    each = (encoder(a) - b[:, :6]).pow(2).mean(1)
    return each.topk(max(1, int(0.5 * a.shape[0])))[0].mean()


def masked(encoder: Any, a: Any, b: Any) -> Any:
    mask = torch.zeros(a.shape[0], 6, dtype=torch.bool)
    mask[:, -1] = True
    return (encoder(a) * mask + encoder(b) * ~mask).pow(2).mean()


def dynamic_filters(encoder: Any, a: Any, b: Any) -> Any:
    """A convolution of each sample with filters of its own: as many groups as samples."""
    filters, images = encoder(a).reshape(-1, 2, 1, 3), b.reshape(1, -1, 2, 4)
    rows = F.conv2d(images.reshape(1, -1, 2, 4), filters.reshape(-1, 1, 1, 3), padding=(0, 1), groups=images.shape[1])
    return rows.reshape(-1, 2, 2, 4).pow(2).mean()


ANY_SIZE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "chunk": lambda encoder, a, b: difference(*torch.chunk(encoder(torch.cat([a, b])), 2)),
    "chunk of one batch": lambda encoder, a, b: difference(*(part.mean(0, keepdim=True) for part in encoder(a + b).chunk(2))),
    "split": lambda encoder, a, b: difference(*encoder(torch.cat([a, b])).split(a.shape[0])),
    "split by length": lambda encoder, a, b: difference(*torch.split(encoder(torch.cat([a, b])), len(a))),
    "split into sizes": lambda encoder, a, b: difference(*encoder(torch.cat([a, b])).split([a.shape[0], b.shape[0]])),
    "split into three": lambda encoder, a, b: difference(*encoder(torch.cat([a, b, a])).split(split_size=b.shape[0])[1:]),
    "length": lambda encoder, a, b: (encoder(a) + encoder(b)).sum() / (len(a) - 0.5),
    "contrastive": contrastive,
    "hardest": hardest,
    "masked": masked,
    "linspace": lambda encoder, a, b: (
        (encoder(a) * torch.linspace(1, 3, a.shape[0], device=a.device)[:, None] + encoder(b)).pow(2).mean()
    ),
    "take_along_dim": lambda encoder, a, b: torch.take_along_dim(encoder(a), b[:, :3].argsort(1), 1).pow(2).mean(),
    "dynamic filters": dynamic_filters,
    "variances": lambda encoder, a, b: F.gaussian_nll_loss(encoder(a), b[:, :6], encoder(b).abs(), eps=0.3),
    "log of running sums": lambda encoder, a, b: torch.logcumsumexp(encoder(a) - encoder(b), 0).mean(),
    "covariance": lambda encoder, a, b: (torch.cov(encoder(a).T) * encoder(b).T.corrcoef()).pow(2).mean(),
    "losses of samples": lambda encoder, a, b: F.cross_entropy(encoder(a), b.argmax(1) % 6, reduction="none").sum() / len(b),
    "distribution": lambda encoder, a, b: -torch.distributions.StudentT(3.0, encoder(a)).log_prob(b[:, :6]).mean(),
    "cdist": lambda encoder, a, b: torch.cdist(encoder(a), encoder(b)).mean(),
}


def trained(module: Any, example: Any, size: int, **options: Any) -> tuple[list[float], list[float]]:
    """The losses of two steps with ``size`` samples, and PyTorch's.

    Args:
        example: number of samples with which the module is exported; or the model that was.
    """
    given = {"example_inputs": (torch.randn(example, 8), torch.randn(example, 8))} if isinstance(example, int) else {}
    model = module if given else example
    program = graphc.compile(model, loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=0.1), **given, **options)
    a, b = torch.randn(size, 8), torch.randn(size, 8)
    other = copy.deepcopy(module)
    update = torch.optim.SGD(other.parameters(), lr=0.1)
    wanted = []
    for _ in range(2):
        update.zero_grad()
        loss = other(a, b)
        loss.backward()
        update.step()
        wanted.append(loss.item())
    with graphc.Trainer(program) as trainer:
        return [float(trainer.step({"a": a.numpy(), "b": b.numpy()})["loss"]) for _ in range(2)], wanted


# Every second form, with examples of one sample and of four in turn.
KEPT = [(name, (1, 4)[k % 2]) for k, name in enumerate(list(ANY_SIZE)[::2])]


@pytest.mark.parametrize(
    ("name", "example"), params(product(ANY_SIZE, (1, 4)), large=set(product(ANY_SIZE, (1, 4))) - set(KEPT))
)
def test_batches_of_any_size(name: str, example: int) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="error", category=UserWarning):
        have, wanted = trained(Pairs(ANY_SIZE[name]), example, 7)
    np.testing.assert_allclose(have, wanted, rtol=1e-5)


class Summed(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Takes any number of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(8, 6)

    def forward(self, first: Any, *more: Any) -> Any:
        return self.encoder(sum(more, first))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_inputs_of_any_number(count: int) -> None:
    """The exporter of axes of any size, which knows more ops than the older one behind it, takes a call without the rest."""
    module, inputs = Summed(), [torch.randn(4, 8) for _ in range(count)]
    with warnings.catch_warnings(action="error", category=UserWarning):
        model = frontends.export(module, tuple(inputs), exporter="dynamo")
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    more = [torch.randn(5, 8) for _ in range(count)]
    names = [v.name for v in program.model.graph.inputs]
    feeds = dict(zip(names, [*(x.numpy() for x in more), np.zeros((5, 6), np.float32)], strict=True))
    with graphc.Trainer(program) as trainer:
        assert trainer.step(feeds)["loss"] == pytest.approx(module(*more).pow(2).mean().item(), rel=1e-5)


class Shuffled(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The samples in another order, weighted by their places and by a number between 2 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        turned = x[torch.randperm(x.shape[0])] * self.weight
        scale = torch.empty(x.shape[0], 1).uniform_(2, 3)
        return turned.sum() + 0 * scale.mean(), (turned * torch.arange(x.shape[0])[:, None]).sum(), scale


def test_permutations_and_uniform_numbers() -> None:
    program = graphc.compile(
        Shuffled(),
        example_inputs=torch.ones(4, 1),
        loss=graphc.losses.Output("output_0", keep_outputs=True),
        optimizer=graphc.optim.SGD(lr=0.0),
    )
    x = np.arange(100, dtype=np.float32)[:, None]
    with graphc.Trainer(program) as trainer:
        first, second = trainer.step({"x": x}), trainer.step({"x": x})
    assert float(first["loss"]) == float(second["loss"]) == x.sum()
    assert float(first["output_1"]) != float(second["output_1"])
    scales = np.concatenate([first["output_2"], second["output_2"]])
    assert 2 <= scales.min() < 2.1
    assert 2.9 < scales.max() < 3


def sample_by_sample(encoder: Any, a: Any, b: Any) -> Any:
    return torch.stack([encoder(a[k]) * b[k, :6] for k in range(a.shape[0])]).pow(2).mean()


def test_a_batch_that_is_a_number_stays_one() -> None:
    """The loop over the samples is unrolled: with another number of samples, it would leave some out."""
    torch.manual_seed(0)
    module = Pairs(sample_by_sample)
    with pytest.warns(UserWarning, match="Pairs trains with batches of 4 only, as in its example"):
        model = frontends.export(module, (torch.randn(4, 8), torch.randn(4, 8)))
    have, wanted = trained(module, model, 4)
    np.testing.assert_allclose(have, wanted, rtol=1e-5)
    with pytest.raises(FeedError, match="fixed at batches of 4"):
        trained(module, model, 6)
    with pytest.raises(ModelError, match="takes the first 4 samples of a batch of 8, and no other"):
        trained(module, model, 6, batch="N")


def test_groups_of_samples_that_no_form_takes_are_of_one_number() -> None:
    """ONNX has the number of groups in an attribute; of convolutions over images only there is a form without."""

    class PerSample(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            kernels = x.mean(2).reshape(x.shape[0] * x.shape[1], 1, 1).expand(-1, x.shape[1], 3)
            return F.conv1d(x.reshape(1, -1, x.shape[2]), kernels, groups=x.shape[0])

    with pytest.warns(UserWarning, match="batches of 3 only.*an attribute"):
        model = graphc.frontends.export(PerSample(), torch.ones(3, 2, 8))
    assert model.graph.inputs[0].shape[0] == 3


def test_a_decision_by_the_size_is_told() -> None:
    def warm(encoder: Any, a: Any, b: Any) -> Any:
        return encoder(a).mean() * (2 if a.shape[0] < 20 else 1) + b.mean()

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="the batch's size decides what Pairs computes; here batch < 20 always"):
        have, wanted = trained(Pairs(warm), 4, 7)
    np.testing.assert_allclose(have, wanted, rtol=1e-5)


def test_the_exporters_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Where they fail, they write a whole graph to the descriptor of standard output, and log what they raise."""

    class Principal(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return torch.linalg.eigh(x.mT @ x)[1]

    with pytest.raises(ModelError, match="cannot be exported"):
        graphc.frontends.export(Principal(), torch.ones(3, 8, 2))
    with pytest.warns(UserWarning, match="batches of 3 only"):
        graphc.frontends.export(Pairs(sample_by_sample), (torch.ones(3, 8), torch.ones(3, 8)))
    assert capfd.readouterr() == ("", "")

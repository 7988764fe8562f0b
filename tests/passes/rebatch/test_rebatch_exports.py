"""rebatch of PyTorch's exports with default options: the file's batch is baked in, and any other computes what PyTorch does."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphc.errors import ModelError  # noqa: E402
from graphc.frontends import load  # noqa: E402
from graphc.pipeline import run as run_pipeline  # noqa: E402
from tests.frontends.zoo import run  # noqa: E402
from tests.tiers import params  # noqa: E402

pytestmark = pytest.mark.full

Inputs = Callable[[int], Sequence[Any]]


def tokens(batch: int) -> Sequence[Any]:
    return (torch.randint(1, 20, (batch, 7)),)


def tokens_and_lengths(batch: int) -> Sequence[Any]:
    return torch.randint(1, 20, (batch, 7)), torch.randint(1, 8, (batch,))


def vectors(batch: int) -> Sequence[Any]:
    return (torch.randn(batch, 5, 6),)


def images(batch: int) -> Sequence[Any]:
    return (torch.randn(batch, 3, 8, 8),)


class Positions(nn.Module):
    """Ids, a causal mask and rotary tables that are expanded to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.qkv, self.head = (
            nn.Embedding(20, 8),
            nn.Embedding(9, 8),
            nn.Linear(8, 24),
            nn.Linear(8, 3),
        )

    def forward(self, ids: Any) -> Any:
        batch, steps = ids.shape
        places = torch.arange(steps)[None].expand(batch, steps)
        angle = places[:, None, :, None] * torch.tensor([1.0, 0.1])
        h = self.words(ids) + self.places(places)
        q, k, v = self.qkv(h).view(batch, steps, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q = torch.cat([q[..., :2] * angle.cos(), q[..., 2:] * angle.sin()], -1)
        mask = (places[:, None, :, None] >= places[:, None, None, :]) & (ids != 0)[:, None, None, :]
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -1e4)
        return self.head((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, steps, 8))


class Experts(nn.Module):
    """A mixture of experts over batch × steps tokens: routing by scatter, and products by gathered weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.head = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 6)), nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        batch, steps, size = x.shape
        rows = x.reshape(-1, size)
        weight, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        share = torch.zeros(batch * steps, 4).scatter(1, chosen, weight)
        token = torch.arange(batch * steps)[:, None].expand(-1, 2).reshape(-1)
        made = torch.bmm(rows[token][:, None], self.up[chosen.reshape(-1)])[:, 0] * weight.reshape(-1, 1)
        out = torch.zeros_like(rows).index_add(0, token, made) + share.sum(-1, keepdim=True)
        return self.head(out.view(batch, steps, size).mean(1))


class LastStep(nn.Module):
    """The last valid step of each sequence, by a pair of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, ids: Any, lengths: Any) -> Any:
        return self.head(self.words(ids).cumsum(1)[torch.arange(ids.shape[0]), lengths - 1])


class Recurrent(nn.Module):
    """A layer and a cell with initial states of zeros, and a squeeze."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell, self.head = nn.GRU(6, 4, batch_first=True), nn.LSTMCell(4, 4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        y, last = self.layer(x, torch.zeros(1, x.shape[0], 4))
        h = c = y.new_zeros(x.shape[0], 4)
        for step in range(2):
            h, c = self.cell(y[:, step], (h, c))
        return self.head(h + last[-1])


class Grouped(nn.Module):
    """GroupNorm, a pooled vector squeezed of all its ones, and a mask repeated for each head of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        h = self.norm(self.conv(x)).relu()
        heads = h.flatten(2).repeat_interleave(2, 0)
        mask = torch.tril(torch.ones(4, 36)).repeat(2 * x.shape[0], 1, 1)
        pooled = nn.functional.adaptive_avg_pool2d(h, 1).squeeze()
        return self.head(pooled + heads.masked_fill(mask == 0, 0).sum(-1).view(x.shape[0], 2, 4).mean(1))


class Bags(nn.Module):
    """EmbeddingBag, which both exporters write as a loop over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, 3)

    def forward(self, ids: Any) -> Any:
        return self.head(self.words(ids))


CASES: dict[str, tuple[type[nn.Module], Inputs]] = {
    "positions": (Positions, tokens),
    "experts": (Experts, vectors),
    "last step": (LastStep, tokens_and_lengths),
    "recurrent": (Recurrent, vectors),
    "grouped": (Grouped, images),
    "bags": (Bags, tokens),
}


def exported(module: nn.Module, inputs: Sequence[Any], *, dynamo: bool) -> onnx.ModelProto:
    target = io.BytesIO()
    names = [f"x{k}" for k in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, tuple(inputs), target, input_names=names, output_names=["y"], dynamo=dynamo, verbose=False)
    return onnx.load_from_string(target.getvalue())


@pytest.mark.parametrize(
    ("case", "dynamo", "batch"),
    params(
        product(CASES, (True, False), (4, 1)),
        large=[*((case, True, 1) for case in CASES), *((case, False, 4) for case in ("positions", "recurrent", "bags"))],
    ),
)
def test_any_batch_computes_what_pytorch_computes(case: str, dynamo: bool, batch: int) -> None:
    if (case, dynamo) == ("experts", False):
        pytest.skip("the older exporter refuses index_add with repeated indices")
    if (case, dynamo, batch) == ("last step", False, 1):
        pytest.skip("the older exporter folds the index of the one sample away; see the test below")
    if (case, batch) == ("grouped", 1):
        pytest.skip("squeeze drops the axis of one sample in PyTorch too")
    make, inputs = CASES[case]
    torch.manual_seed(0)
    module = make().eval()
    model = load(exported(module, inputs(batch), dynamo=dynamo))
    run_pipeline(model, "legalize,rebatch,simplify,decompose,verify")
    for size in (1, 2, 4, 8):
        if case == "grouped" and size == 1:
            continue
        feeds = inputs(size)
        with torch.no_grad():
            want = module(*feeds).numpy()
        (have,) = run(model, {f"x{k}": v.numpy() for k, v in enumerate(feeds)})
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


def test_a_rewrite_that_mixes_samples_is_refused() -> None:
    """The index of the one sample, 0, is folded into the file, which reads the first sample for all others too."""
    model = load(exported(LastStep().eval(), tokens_and_lengths(1), dynamo=False))
    with pytest.raises(ModelError, match=r"Gather.*the samples of y:.* come out otherwise in a batch of 2 than in one of 1"):
        run_pipeline(model, "legalize,rebatch")


class WithScale(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The last step of each sample and a scale that depends on none, as CLIP returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[torch.arange(x.shape[0]), at], self.scale.exp()


def test_an_output_that_depends_on_no_sample_is_no_total() -> None:
    module, path = WithScale(), io.BytesIO()
    feeds = (torch.randn(3, 5, 2), torch.tensor([4, 0, 2]))
    torch.onnx.export(module, feeds, path, dynamo=False, input_names=["x", "at"])
    model = load(onnx.load_from_string(path.getvalue()))
    run_pipeline(model, "legalize,rebatch,simplify,decompose,verify")
    x, at = torch.randn(7, 5, 2), torch.tensor([4, 0, 2, 1, 3, 0, 1])
    for have, want in zip(run(model, {"x": x.numpy(), "at": at.numpy()}), module(x, at), strict=True):
        np.testing.assert_allclose(have, want.detach().numpy(), rtol=1e-6)

"""Operators that the exporter of PyTorch lacks or writes down wrongly: values and gradients against PyTorch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import graphc  # noqa: E402
from graphc import frontends  # noqa: E402
from graphc.errors import ModelError  # noqa: E402
from tests.frontends.torch_steps import follow  # noqa: E402
from tests.tiers import thinned  # noqa: E402

F = torch.nn.functional
INDEX = torch.tensor([[0, 2, 2, 1, 0, 2]] * 4)
ENDS = torch.tensor([-1.5, -0.5, 0.0, 0.5, 1.0])
LABELS = torch.tensor([[0, 1, -1, 2, 0, 0], [3, -1, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0], [-1, 0, 0, 0, 0, 0]])


def scattered(x: Any, reduce: str, include: bool) -> Any:
    return (x * 0.5).scatter_reduce(1, INDEX, x, reduce, include_self=include)


def put(x: Any) -> Any:
    return x.index_put((torch.tensor([1, 2], dtype=torch.int32),), x[:2], accumulate=True)


def attended(x: Any, *lead: int, mask: Any = None, **options: Any) -> Any:
    """Attention with two heads of queries, where an axis of ``lead`` is 2, and one of keys."""
    queries = torch.stack([x, x.cos()], 1) if 2 in lead else x
    keys = x.sin().reshape(-1, *[1] * len(lead), 6, 1)
    return F.scaled_dot_product_attention(queries.reshape(-1, *lead, 6, 1), keys, keys * 2, mask, **options)


def _with_a_copied_row(x: Any) -> Any:
    changed = x.clone()
    changed[1:3, :4].copy_(2 * x[0, 1:5])
    return changed


def _with_rows(x: Any, mask: Any, change: Callable[[Any], Any]) -> Any:
    changed = x.clone()
    changed[mask] = change(x[mask])
    return changed


def _with_columns(x: Any, mask: Any, number: float) -> Any:
    changed = x.clone()
    changed[:, mask] = number
    return changed


OF_MATRICES: dict[str, Callable[[Any], Any]] = {
    "squeeze of an axis that is longer": lambda x: x.squeeze(1) + x.unsqueeze(1).squeeze(1),
    "squeeze of several axes": lambda x: x.unsqueeze(1).squeeze((0, 1)),
    "index_put of 32-bit indices": put,
    **{f"scatter {r}, {i}": lambda x, r=r, i=i: scattered(x, r, i) for r in ("mean", "sum", "amax") for i in (True, False)},
    "attention of three axes": lambda x: attended(x, is_causal=True, scale=0.3),
    "attention of heads that share their keys": lambda x: attended(x, 2),
    "attention of five axes": lambda x: attended(x, 1, 2, mask=torch.ones(2, 6, 6, dtype=torch.bool).tril()),
    "cumprod": lambda x: x.cumprod(1),
    "cumprod with a zero": lambda x: (x * (x != x.amax(1, keepdim=True))).cumprod(1),
    "cummax": lambda x: x.cummax(1)[0],
    "cummin": lambda x: x.cummin(1)[0],
    "places of cummax": lambda x: x * x.cummax(1)[1],
    "kthvalue": lambda x: x.kthvalue(2, 1)[0],
    "median": lambda x: x.median(1)[0],
    "place of the median": lambda x: x * x.median(1, keepdim=True)[1],
    "median of columns": lambda x: x.median(0)[0],
    "median of all": lambda x: x.median(),
    "one number put where a mask says": lambda x: x.index_put((x > 0.3,), torch.tensor(0.5)) * x,
    "a row copied into columns": lambda x: _with_a_copied_row(x) * x,
    "rows put where a mask says": lambda x: _with_rows(x, x[:, 0] > 0, torch.sin) * x,
    "the same row put where a mask says": lambda x: _with_rows(x, x[:, 0] > 0, lambda _: x[0].cos()) * x,
    "elements put where a mask says": lambda x: _with_rows(x, x > 0, lambda rows: rows.exp()) * x,
    "blocks put where a mask says": lambda x: _with_rows(x.reshape(-1, 2, 3), x[:, ::3] > 0, torch.sin),
    "rows added where a mask says": lambda x: x.index_put((x[:, 1] > 0,), x[x[:, 1] > 0].sin(), accumulate=True) * x,
    "one number put in columns": lambda x: _with_columns(x, x[0] > 0, 0.7) * x,
    "stable sort": lambda x: x.sort(dim=1, stable=True)[0] * x,
    "places of a stable sort": lambda x: x * x.round().argsort(dim=0, descending=True, stable=True),
    "searchsorted": lambda x: x * torch.searchsorted(ENDS, x),
    "searchsorted from the right": lambda x: x * torch.searchsorted(ENDS.expand(4, 5).contiguous(), x.round(), right=True),
    **{
        f"linear upsampling, {options}": lambda x, options=options: F.interpolate(x[None], mode="linear", **options)
        for options in ({"scale_factor": 1.7}, {"size": 9, "align_corners": True}, {"size": 1})
    },
    "bilinear upsampling to a line": lambda x: F.interpolate(x[None, None], size=(1, 9), mode="bilinear"),
    "standard deviation of equal numbers": lambda x: torch.stack([x[:, 0]] * 4, 1).std(1) + x.std() + x.std(1, correction=0),
    "standard deviation and mean": lambda x: torch.cat(torch.std_mean(torch.cat([x, x[:, :2] * 0], 1), 0, keepdim=True)),
    "einsum of integers and floats": lambda x: x * torch.einsum("i,j->ij", torch.arange(4), x[0].cos()),
    "einsum of two kinds of halves": lambda x: torch.einsum("i,j->ij", x.new_tensor([1, 2, 3]).half(), x[0].bfloat16()),
    "einsum whose ellipses differ": lambda x: (
        x * torch.einsum("...ij, ...j -> ...i", x[:, :, None].cos(), x[None, :, :1, None])[0, 0]
    ),
    "einsum with an ellipsis of nothing": lambda x: torch.einsum("...i,...i->...i", x, x[0].cos()),
    "einsum that repeats one": lambda x: torch.einsum("bi,bi->bi", x[:1].sin(), x),
    "rolled by what data choose": lambda x: (
        x.roll(-int(x.mean(0).argmax()), 1) + torch.roll(x, (int(x[0].argmin()), 1), (0, 1))
    ),
    "rolled along one of one axis": lambda x: torch.roll(x, (2,), 1) + torch.roll(x, 1, (0,)) * x.roll(3),
    "frequencies": lambda x: (
        x * torch.fft.rfftfreq(11, 0.5) + x * torch.fft.fftfreq(6) + x[:, :5].sum() * torch.fft.fftfreq(5)[3]
    ),
    "hypot": lambda x: torch.hypot(x, x + 1),
    "copysign": lambda x: torch.copysign(x, torch.tensor([-0.0, 0.0, 1.0, -1.0, 2.0, -3.0])),
    "signbit": lambda x: x * torch.signbit(x),
    "fmax": lambda x: torch.fmax(x, torch.tensor([0.0, math.nan, 9.0, -9.0, 0.1, 0.2])),
    "fmin": lambda x: torch.fmin(torch.tensor([0.0, math.nan, 9.0, -9.0, 0.1, 0.2]), x),
    "erfinv": lambda x: torch.erfinv(torch.tanh(x)),
    "erfinv near one": lambda x: torch.erfinv(1 - 1e-4 * torch.sigmoid(x)),
    "lgamma": lambda x: torch.lgamma(4 * x + 0.01),
    "digamma": lambda x: torch.digamma(x.abs() + 0.3),
    "pdist": lambda x: torch.pdist(x[:3] + torch.arange(3.0)[:, None]),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, LABELS),
    **{f"cdist {p}": lambda x, p=p: torch.cdist(x, x.flip(1) + 1, p=p) for p in (1.0, 2.0, 3.0, math.inf)},
}
OF_IMAGES: dict[str, Callable[[Any], Any]] = {
    "avg_pool2d with a divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=4),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False, ceil_mode=True),
    "avg_pool3d with a divisor": lambda x: F.avg_pool3d(x, 2, divisor_override=3),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "places of adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (2, 3), return_indices=True)[1] * x[:, :, :2, :3],
}
CASES = {"matrix": OF_MATRICES, "image": OF_IMAGES}
SHAPES = {"matrix": (4, 6), "image": (2, 4, 7, 7)}


class Each(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The sum of all functions, weighted by place, each of an operand times a parameter of its own; and their values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.functions = list(CASES[kind].values())
        one = torch.full(SHAPES[kind][1:], 0.95)
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(one.clone()) for _ in self.functions])

    def forward(self, x: Any) -> Any:
        values = [f(x * w) for f, w in zip(self.functions, self.weights, strict=True)]
        total = sum((v.reshape(-1) * torch.linspace(0.5, 1.5, v.numel())).sum() for v in values)
        return total, *values


@functools.cache
def computed(kind: str) -> dict[str, tuple[Any, Any, Any, Any]]:
    """name → value and gradient here, value and gradient of PyTorch."""
    torch.manual_seed(0)
    x, module = torch.randn(SHAPES[kind]), Each(kind)
    loss, *values = module(x)
    loss.backward()
    program = graphc.compile(
        frontends.export(module, (x,), dynamic_batch=False),
        loss=graphc.losses.Output(name="output_0", keep_outputs=True),
        optimizer=graphc.optim.SGD(lr=1.0),
    )
    with graphc.Trainer(program) as trainer:
        results = trainer.step({"x": x.numpy()})
        trained = trainer.trained_values()
    return {
        name: (results[f"output_{k + 1}"], 0.95 - trained[f"weights.{k}"], values[k].detach().numpy(), weight.grad.numpy())
        for k, (name, weight) in enumerate(zip(CASES[kind], module.weights, strict=True))
    }


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, functions in CASES.items() for name in functions])
def test_values_and_gradients_are_those_of_pytorch(kind: str, name: str) -> None:
    value, gradient, wanted, slope = computed(kind)[name]
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=0, atol=2e-5 * float(np.abs(slope).max()))


class OfAnyBatch(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((6,), 0.95))

    def forward(self, x: Any) -> Any:
        x = x * self.weight
        x = (
            x.squeeze(0).squeeze(1).cumprod(1)
            + x.median()
            + x.median(0)[0]
            + torch.cdist(x[:, None], x[:, None] + 1, p=1)[:, 0]
        )
        return (x.cummax(1)[0] ** 2).mean()


def test_they_take_batches_of_any_size() -> None:
    torch.manual_seed(1)
    module = OfAnyBatch()
    program = graphc.compile(
        module, example_inputs=(torch.randn(4, 6),), loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=1.0)
    )
    x = torch.randn(7, 6)
    loss = module(x)
    loss.backward()
    with graphc.Trainer(program) as trainer:
        np.testing.assert_allclose(trainer.step({"x": x.numpy()})["loss"], loss.item(), rtol=1e-6)
        np.testing.assert_allclose(0.95 - trainer.trained_values()["weight"], module.weight.grad.numpy(), rtol=2e-5, atol=1e-6)


ENTROPIES = ["labels", "labels with weights", "labels of positions", "probabilities", "probabilities with weights"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "reduction", "smoothing"), thinned(list(product(ENTROPIES, ("mean", "sum", "none"), (0.0, 0.1))), 7)
)
def test_cross_entropy_is_that_of_pytorch(kind: str, reduction: str, smoothing: float) -> None:
    weights = torch.arange(1.0, 7.0) if "weights" in kind else None
    labels = torch.tensor([0, 2, 5, -100, 1])
    of_positions = "positions" in kind

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 6)

        def forward(self, x: Any, target: Any) -> Any:
            scores = self.linear(x)
            scores = scores.transpose(1, 2) if of_positions else scores
            return F.cross_entropy(scores, target, weights, reduction=reduction, label_smoothing=smoothing).sum()

    torch.manual_seed(0)
    x = torch.randn(5, 4, 8) if of_positions else torch.randn(5, 8)
    target = (
        torch.randn(5, 6).softmax(1) if "probabilities" in kind else labels[:, None].repeat(1, 4) if of_positions else labels
    )
    model = Model()
    wanted = model(x, target)
    wanted.backward()
    program = graphc.compile(
        model, example_inputs=(x[:3], target[:3]), loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=1.0)
    )
    with graphc.Trainer(program) as trainer:
        loss = trainer.step({"x": x.numpy(), "target": target.numpy()})["loss"]
        have = model.linear.weight.detach().numpy() - trainer.trained_values()["linear.weight"]
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-5)
    np.testing.assert_allclose(have, model.linear.weight.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.searchsorted(ENDS, x, sorter=torch.arange(5)), "sort the ends"),
        (lambda x: F.avg_pool2d(x[None], 2, ceil_mode=True, divisor_override=3), "leave one out"),
        (lambda x: x.cummax(0)[0], "fix the axis"),
    ],
)
def test_what_has_no_form_is_refused_by_name(function: Callable[[Any], Any], message: str) -> None:
    class One(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(6))

        def forward(self, x: Any) -> Any:
            return function(x * self.weight)

    with pytest.raises(ModelError, match=message):
        frontends.export(One(), (torch.randn(4, 6),), exporter="dynamo")


class Normalised(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Asks a range for the axes to add up, as code that is also scripted does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        axes = torch.arange(1, h.dim()).tolist()
        return h - h.mean(dim=axes, keepdim=True)


def test_a_range_tells_its_elements() -> None:
    torch.manual_seed(0)
    module, x = Normalised(), torch.randn(5, 3, 6)
    program = graphc.compile(
        frontends.export(module, (x[:2],), exporter="dynamo"), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1)
    )
    follow(program, module, x, torch.randn(5, 3, 4), rate=0.1, steps=3)

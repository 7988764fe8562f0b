"""Models of float64 train on the CPU backend to the digits of PyTorch, also with ops that onnxruntime has for float32 alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

import graphc  # noqa: E402
from graphc.backends.onnxruntime.kernels.products.wide_products import product  # noqa: E402
from graphc.backends.onnxruntime.pool import ThreadPool  # noqa: E402
from graphc.training.inference import run_model  # noqa: E402

nn = torch.nn


def image(*shape: int) -> Any:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Scaled(nn.Module):  # type: ignore[misc]
    """A function of a trained multiple of x."""

    def __init__(self, function: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(1 + image(shape[-1]))

    def forward(self, x: Any) -> Any:
        return self.function(x * self.scale)


def layer(function: Callable[[Any], Any], *shape: int) -> Callable[[], tuple[Any, Any]]:
    return lambda: (Scaled(function, shape), image(*shape))


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "convolution of images": lambda: (nn.Conv2d(3, 16, 3, padding=1), image(3, 3, 15, 17)),
    "convolution with steps and gaps": lambda: (nn.Conv2d(4, 7, (3, 2), (2, 1), (1, 2), (1, 3)), image(2, 4, 12, 13)),
    "convolution in groups": lambda: (nn.Conv2d(12, 18, 3, padding=(0, 2), groups=3, bias=False), image(2, 12, 9, 11)),
    "convolution of channels": lambda: (nn.Conv2d(10, 20, 5, padding=2, groups=10), image(2, 10, 8, 9)),
    "convolution of series": lambda: (nn.Conv1d(5, 9, 4, 3, 2, 2), image(3, 5, 300)),
    "convolution of volumes": lambda: (nn.Conv3d(2, 5, 3, 2, 1), image(2, 2, 7, 8, 9)),
    "convolution of many channels": lambda: (nn.Conv2d(130, 70, 1), image(1, 130, 15, 13)),
    "convolution of one sample, wide windows": lambda: (nn.Conv2d(33, 40, 7, padding=3), image(1, 33, 20, 21)),
    "transposed convolution": lambda: (nn.ConvTranspose2d(6, 4, 4, 2, 1, groups=2), image(2, 6, 7, 8)),
    "transposed convolution of series": lambda: (nn.ConvTranspose1d(6, 4, 5, 3, 2, 1, bias=False), image(2, 6, 50)),
    "linear": lambda: (nn.Linear(70, 45), image(67, 70)),
    "wide linear": lambda: (nn.Linear(300, 260), image(190, 300)),
    "many products": layer(lambda x: x @ x.transpose(1, 2), 5, 41, 17),
    "attention": lambda: (nn.TransformerEncoderLayer(24, 3, 48, 0.0, batch_first=True), image(2, 19, 24)),
    "recurrent": lambda: (nn.GRU(7, 12, batch_first=True), image(3, 9, 7)),
    "batch normalisation": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU()),
        image(4, 3, 8, 8),
    ),
    "average pool": layer(nn.AvgPool2d(3, 2, 1), 2, 3, 9, 10),
    "average pool of volumes": layer(nn.AvgPool3d(2, ceil_mode=True, count_include_pad=False), 1, 2, 5, 6, 7),
    "max pool": layer(nn.MaxPool2d(3, 2, 1), 2, 3, 9, 10),
    "nearest neighbours": layer(nn.Upsample(scale_factor=2), 2, 3, 5, 6),
    "bilinear": layer(nn.Upsample(size=(9, 7), mode="bilinear"), 2, 3, 5, 6),
    "bicubic": layer(nn.Upsample(scale_factor=1.5, mode="bicubic"), 2, 3, 6, 8),
    "fold": layer(nn.Fold((6, 7), 2), 2, 12, 30),
    "determinant": layer(torch.linalg.det, 6, 3, 3),
    "local response": layer(nn.LocalResponseNorm(3), 2, 5, 6, 6),
    "functions": layer(
        lambda x: torch.erf(x) + torch.sin(x) * torch.cos(3 * x) + torch.log(x + 1) + x**1.7 + torch.tan(x / 4), 9, 70
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_have_the_digits_of_pytorch(name: str, optimizer: str) -> None:
    torch.manual_seed(0)
    module, x = MODELS[name]()
    module = module.double().train()
    theirs = copy.deepcopy(module)
    first = theirs(x)[0] if isinstance(module, nn.GRU) else theirs(x)
    goal = torch.rand(first.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    theirs = copy.deepcopy(module)
    options = {"lr": 1e-2, "momentum": 0.9} if optimizer == "SGD" else {"lr": 1e-2}
    program = graphc.compile(
        module, example_inputs=(x,), loss=graphc.losses.MSE(prediction="output_0" if isinstance(module, nn.GRU) else None),
        optimizer=getattr(graphc.optim, optimizer)(**options),
    )  # fmt: skip
    names = [value.name for value in program.model.graph.inputs]
    own = getattr(torch.optim, optimizer)(theirs.parameters(), **options)
    with graphc.Trainer(program, threads=2) as trainer:
        for _ in range(4):
            loss = trainer.step({names[0]: x.numpy(), names[-1]: goal.numpy()})["loss"]
            own.zero_grad()
            y = theirs(x)
            wanted = nn.functional.mse_loss(y[0] if isinstance(y, tuple) else y, goal)
            wanted.backward()
            own.step()
            assert float(loss) == pytest.approx(wanted.item(), rel=1e-11)


@pytest.mark.parametrize(("shape", "out"), [((1, 1, 2, 2), (1, 1, 0, 0)), ((0, 1, 5, 5), (0, 1, 3, 3))])
def test_a_convolution_without_elements_has_its_shape(shape: tuple[int, ...], out: tuple[int, ...]) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (double[{", ".join(map(str, shape))}] x, double[1, 1, 3, 3] w) => (y) {{ y = Conv(x, w) }}"""
    (y,) = run_model(
        ir.from_proto(onnx.parser.parse_model(text)), {"x": np.ones(shape), "w": np.ones((1, 1, 3, 3))}, backend="onnxruntime"
    ).values()
    assert y.shape == out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_products_of_matrices_that_lie_in_any_order(threads: int, dtype: Any) -> None:
    rng, pool, close = np.random.default_rng(0), ThreadPool(threads), 1e-12 if dtype == np.float64 else 1e-4
    for count, rows, depth, columns in [(1, 1, 1, 1), (3, 7, 5, 9), (1, 200, 300, 140), (5, 97, 129, 33), (2, 6, 128, 256)]:
        a, b = (rng.standard_normal((count, *side)).astype(dtype) for side in ((rows, depth), (depth, columns)))
        for left, right in [(a, b), (a.swapaxes(1, 2).copy().swapaxes(1, 2), b), (a, b.swapaxes(1, 2).copy().swapaxes(1, 2))]:
            for bias in (None, rng.standard_normal(columns).astype(dtype)):
                c = np.full((count, rows, columns), np.nan, dtype)
                product(pool, left, right, c, bias)()
                np.testing.assert_allclose(c, a @ b + (0 if bias is None else bias), rtol=close, atol=close)
    pool.close()

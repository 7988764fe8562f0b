"""Linear algebra of PyTorch: values and gradients against PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

import graphc  # noqa: E402
from graphc import frontends  # noqa: E402
from graphc.errors import UnsupportedOpError  # noqa: E402
from graphc.training.inference import run_model  # noqa: E402

pytestmark = pytest.mark.full

LINALG = torch.linalg


def positive(x: Any) -> Any:
    """Symmetric matrices without small eigenvalues."""
    return x @ x.mT / 4 + torch.eye(5)


CASES: dict[str, Callable[[Any], Any]] = {
    "inv": lambda x: LINALG.inv(x),
    "inv of one matrix": lambda x: torch.inverse(x[0]),
    "inv, with zeros on the diagonal": lambda x: LINALG.inv(torch.tril(x, -1) + torch.eye(5).roll(1, 0) * x),
    "solve": lambda x: LINALG.solve(x, x[..., :2] + 1),
    "solve for a vector": lambda x: LINALG.solve(x[0], x[1, 0]),
    "solve for a vector each": lambda x: LINALG.solve(x, x[:, 0] + 1),
    "solve from the right": lambda x: LINALG.solve(x, x[:, :2] + 1, left=False),
    "solve for one side of many": lambda x: LINALG.solve(x, x[0] + 1),
    "solve_triangular": lambda x: LINALG.solve_triangular(x + 3 * torch.eye(5), x[..., :3], upper=False),
    "solve_triangular, upper": lambda x: LINALG.solve_triangular(x + 3 * torch.eye(5), x[..., :3], upper=True),
    "solve_triangular, from the right": lambda x: LINALG.solve_triangular(
        x + 3 * torch.eye(5), x[:, :3], upper=True, left=False
    ),
    "solve_triangular, ones on the diagonal": lambda x: LINALG.solve_triangular(x, x[..., :3], upper=False, unitriangular=True),
    "cholesky": lambda x: LINALG.cholesky(positive(x)),
    "cholesky, upper": lambda x: LINALG.cholesky(positive(x), upper=True),
    "qr": lambda x: torch.cat(LINALG.qr(x), -1),
    "qr of a triangle": lambda x: torch.cat(LINALG.qr(torch.triu(x)), -1),
    "qr of more rows": lambda x: torch.cat(LINALG.qr(x[..., :3]), -2),
    "qr of more columns": lambda x: torch.cat(LINALG.qr(x[0, :3]), -1),
    "householder_product": lambda x: LINALG.householder_product(x[..., :4], x[:, 0, :4] + 1),
    "matrix_exp": lambda x: LINALG.matrix_exp(x),
    "matrix_exp of small and large ones": lambda x: LINALG.matrix_exp((x - x.mT) * torch.tensor([0.01, 1, 40])[:, None, None]),
    "slogdet": lambda x: LINALG.slogdet(x)[1],
    "sign of slogdet": lambda x: LINALG.slogdet(x)[0] * x[:, 0, 0],
    "logdet": lambda x: torch.logdet(positive(x)),
    "a Gaussian's density": lambda x: torch.distributions.MultivariateNormal(
        torch.zeros(5), positive(x), validate_args=False
    ).log_prob(x[:, 0]),
}


class Each(torch.nn.Module):  # type: ignore[misc, name-defined]
    """The sum of all functions, weighted by place, each of an operand times a parameter of its own; and their values."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.full((5, 5), 0.95)) for _ in CASES])

    def forward(self, x: Any) -> Any:
        values = [f(x * w) for f, w in zip(CASES.values(), self.weights, strict=True)]
        total = sum((v.reshape(-1) * torch.linspace(0.5, 1.5, v.numel())).sum() for v in values)
        return total, *values


@functools.cache
def computed() -> dict[str, tuple[Any, Any, Any, Any]]:
    """name → value and gradient here, value and gradient of PyTorch in float64."""
    torch.manual_seed(0)
    x, module = torch.randn(3, 5, 5), Each()
    program = graphc.compile(
        frontends.export(module, (x,), dynamic_batch=False, exporter="dynamo"),
        loss=graphc.losses.Output(name="output_0", keep_outputs=True),
        optimizer=graphc.optim.SGD(lr=1.0),
    )
    with graphc.Trainer(program) as trainer:
        results = trainer.step({"x": x.numpy()})
        trained = trainer.trained_values()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = module.double()
        loss, *values = module(x.double())
        loss.backward()
    finally:
        torch.set_default_dtype(default)
    return {
        name: (results[f"output_{k + 1}"], 0.95 - trained[f"weights.{k}"], values[k].detach().numpy(), weight.grad.numpy())
        for k, (name, weight) in enumerate(zip(CASES, module.weights, strict=True))
    }


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    value, gradient, wanted, slope = computed()[name]
    assert np.abs(value - wanted).max() <= 2e-5 * np.abs(wanted).max()
    assert np.abs(gradient - slope).max() <= 1e-4 * np.abs(slope).max()


def test_an_exponential_of_more_than_its_squarings_is_not_a_number() -> None:
    class Turn(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return LINALG.matrix_exp(x)

    turns = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]) * torch.tensor([600.0, 800.0])[:, None, None]
    model = frontends.export(Turn(), (turns,), dynamic_batch=False, exporter="dynamo")
    (found,) = run_model(model, {"x": turns.numpy()}).values()
    np.testing.assert_allclose(found[0], LINALG.matrix_exp(turns[0].double()).numpy(), atol=1e-4)
    assert np.isnan(found[1]).any()


class Orthogonal(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Layers of orthogonal weights: as exponentials, products of reflections, and Cayley's quotients."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.nn.utils.parametrizations.orthogonal
        self.square, self.tall, self.wide = (made(torch.nn.Linear(*sizes)) for sizes in ((12, 12), (12, 20), (20, 9)))
        self.quotient = made(torch.nn.Linear(9, 9), orthogonal_map="cayley")

    def forward(self, x: Any) -> Any:
        return (self.quotient(self.wide(torch.tanh(self.tall(self.square(x)))).relu()) ** 4).mean()


def losses_beside_pytorch(module: Any, x: Any, rate: float, *, example: int) -> list[float]:
    """The losses of five steps of SGD, the same here as in PyTorch; exported with the first ``example`` samples."""
    program = graphc.compile(
        module, example_inputs=(x[:example],), loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=rate)
    )
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=rate), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with graphc.Trainer(program) as trainer:
        np.testing.assert_allclose([trainer.step({"x": x.numpy()})["loss"] for _ in losses], losses, rtol=1e-5)
    return losses


def test_orthogonal_weights_train_as_in_pytorch() -> None:
    torch.manual_seed(4)
    losses = losses_beside_pytorch(Orthogonal(), torch.randn(8, 12), 0.2, example=8)
    assert losses[-1] < 0.95 * losses[0]


class Coupled(torch.nn.Module):  # type: ignore[misc, name-defined]
    """An invertible 1 × 1 convolution, as in Glow, and its log-determinant; batches of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(LINALG.qr(torch.randn(6, 6))[0].contiguous())

    def forward(self, x: Any) -> Any:
        y = torch.nn.functional.conv2d(x, self.weight[..., None, None])
        back = torch.nn.functional.conv2d(y, LINALG.inv(self.weight)[..., None, None])
        pixels = x.shape[2] * x.shape[3]
        return (y**2).mean() - LINALG.slogdet(self.weight)[1] / pixels + ((back - x) ** 2).mean()


def test_an_invertible_convolution_trains_with_any_batch() -> None:
    torch.manual_seed(3)
    module = Coupled()
    losses_beside_pytorch(module, torch.randn(5, 6, 4, 4), 0.05, example=2)


def test_a_trained_file_runs_without_graphc(tmp_path: Path) -> None:
    class Whitened(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))

        def forward(self, x: Any) -> Any:
            factor = LINALG.cholesky(self.weight @ self.weight.mT)
            white = LINALG.solve_triangular(factor, x.mT, upper=False).mT @ LINALG.inv(self.weight)
            return torch.cumprod(torch.sigmoid(white), 1) * LINALG.slogdet(self.weight)[1]

    torch.manual_seed(6)
    module, x = Whitened(), torch.randn(4, 6)
    program = graphc.compile(module, example_inputs=(x,), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    feeds = dict(zip((v.name for v in program.model.graph.inputs), (x.numpy(), np.ones((4, 6), np.float32)), strict=True))
    with graphc.Trainer(program) as trainer:
        trainer.step(feeds)
        trainer.load_into(module)
        trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()[:3]})
    np.testing.assert_allclose(found, module(x[:3]).detach().numpy(), rtol=1e-5, atol=1e-6)


class Large(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Systems of 60 equations: more than are written out row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(60) + 0.1 * torch.randn(60, 60))

    def forward(self, x: Any) -> Any:
        covariance = self.weight @ self.weight.mT + torch.eye(60)
        factor = LINALG.cholesky(covariance)
        white = LINALG.solve_triangular(factor, x.mT, upper=False)
        whole = (x @ LINALG.inv(self.weight) ** 2).mean() + LINALG.slogdet(self.weight)[1] / 60
        return whole + torch.logdet(covariance) / 60 + (white**2).mean()


def test_large_matrices_train_as_in_pytorch() -> None:
    torch.manual_seed(5)
    losses_beside_pytorch(Large(), torch.randn(4, 60), 0.01, example=4)


def test_large_matrices_have_a_form_in_standard_ops(tmp_path: Path) -> None:
    torch.manual_seed(5)
    module, x = Large(), torch.randn(4, 60)
    program = graphc.compile(module, example_inputs=(x,), loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=0.0))
    with graphc.Trainer(program) as trainer:
        trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, module(x).item(), rtol=1e-4)


def test_a_backend_without_kernels_refuses_the_gradient_of_a_large_determinant() -> None:
    class Volume(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(60))

        def forward(self, x: Any) -> Any:
            return (x * LINALG.det(self.weight)).mean()

    model = frontends.export(Volume(), (torch.randn(4, 60),), exporter="dynamo")
    program = graphc.compile(model, loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(), backend="numpy")
    with pytest.raises(UnsupportedOpError, match="minors of a matrix with 60 rows are too many: use the onnxruntime backend"):
        graphc.Trainer(program).step({"x": np.zeros((4, 60), np.float32)})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_a_determinant_has_the_gradient_of_its_definition(rank: int, dtype: Any) -> None:
    """Of matrices of every rank: the cofactors, which need no inverse."""
    rng = np.random.default_rng(rank)
    left, right = rng.integers(-3, 4, (3, 4, rank)).astype(dtype), rng.integers(-3, 4, (3, rank, 4)).astype(dtype)
    x = left @ right if rank else np.zeros((3, 4, 4), dtype)
    text = f"""<ir_version: 11, opset_import: ["": 26]>
        g ({"float" if dtype == np.float32 else "double"}[3, 4, 4] x) => (y) {{ d = Det(x)  y = ReduceSum<keepdims = 0>(d) }}"""
    model = graphc.grad(onnx.parser.parse_model(text), of="y", wrt=["x"])
    *_, slope = run_model(model, {"x": x}, backend="onnxruntime").values()
    others = [[k for k in range(4) if k != i] for i in range(4)]
    wanted = [
        [
            [(-1) ** (i + j) * LINALG.det(torch.tensor(m[np.ix_(others[i], others[j])]).double()) for j in range(4)]
            for i in range(4)
        ]
        for m in x
    ]
    np.testing.assert_allclose(
        slope, wanted, rtol=1e-5 if dtype == np.float32 else 1e-12, atol=1e-4 if dtype == np.float32 else 1e-11
    )

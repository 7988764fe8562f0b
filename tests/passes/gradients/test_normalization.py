"""Gradients of normalisation layers against PyTorch (float32 and float64) and central differences (float64)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from graphc.ir.builder import Builder
from graphc.ir.infer import propagate
from graphc.passes.gradients.reverse_mode import differentiate
from tests.gradient_check import Array, Run, check_gradient, check_op, new_model, on_onnxruntime, reference

EPSILON = 1e-3
Torch = Callable[..., torch.Tensor]


def sample(*shape: int, seed: int = 0) -> Array:
    """Normal numbers around 2, so that a mean that is not subtracted shows."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape) + 2.0


def assert_like_torch(
    function: Torch,
    op_type: str,
    arrays: Sequence[Array],
    *,
    domain: str = "",
    dtype: Any = np.float32,
    symbolic: Sequence[Any] = (),
    specialise: bool = True,
    run: Callable[[ir.Model], Run] = on_onnxruntime,
    **attributes: Any,
) -> ir.Model:
    """Compare the gradients of Σ dy·op(arrays); ``symbolic`` names the dimensions of the first array during emission."""
    arrays = [a.astype(dtype) for a in arrays]
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    y = function(*tensors)
    dy = sample(*y.shape, seed=9).astype(dtype)
    y.backward(torch.tensor(dy))

    feeds = {f"x{k}": a for k, a in enumerate(arrays)} | {"dy": dy}
    model, values = new_model(feeds)
    image, adjoint = values[0], values[-1]
    known = image.shape
    if symbolic:
        image.shape = adjoint.shape = ir.Shape(list(symbolic))
    op = Builder(model.graph)
    total = op.Mul(op.emit(op_type, values[:-1], attributes, domain=domain)[0], adjoint)
    found = differentiate(model.graph, [total], values[:-1])
    model.graph.outputs.extend(found[v] for v in values[:-1])
    if symbolic and specialise:
        image.shape = adjoint.shape = known
        propagate(model.graph)
    tolerance = 1e-5 if dtype is np.float32 else 1e-9
    for tensor, result in zip(tensors, run(model)(feeds).values(), strict=True):
        assert tensor.grad is not None
        assert result.dtype == dtype
        scale = float(tensor.grad.abs().max())
        np.testing.assert_allclose(result, tensor.grad.numpy(), rtol=tolerance, atol=tolerance * max(scale, 1.0))
    return model


SHAPES = [(6, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 4, 2, 3)]
LATE = [True, False]


def symbols(shape: Sequence[int], *, but: int | None = 1) -> list[Any]:
    return [d if k == but else f"s{k}" for k, d in enumerate(shape)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_normalization_training_like_pytorch(shape: tuple[int, ...], dtype: Any) -> None:
    arrays = [sample(*shape), sample(3, seed=1), sample(3, seed=2)]

    def forward(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, scale, bias, training=True, eps=EPSILON)

    for names in ([], ["N", *shape[1:]], symbols(shape)):
        for specialise in LATE:
            assert_like_torch(
                forward,
                "BatchNormalizationTraining",
                arrays,
                domain="graphc",
                dtype=dtype,
                symbolic=names,
                specialise=specialise,
                epsilon=EPSILON,
            )


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_statistics(shape: tuple[int, ...]) -> None:
    """The op's own outputs: normalised values, mean, biased variance, 1/√(var + ε), also far from zero."""
    feeds = {"x": sample(*shape).astype(np.float32) + 100, "scale": np.ones(3, np.float32), "bias": np.zeros(3, np.float32)}
    model, values = new_model(feeds)
    model.graph.outputs.extend(Builder(model.graph).graphc.BatchNormalizationTraining(*values, epsilon=EPSILON))
    y, mean, var, inv_std = on_onnxruntime(model)(feeds).values()
    axes = tuple(k for k in range(len(shape)) if k != 1)
    exact = feeds["x"].astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(axes), rtol=1e-6)
    np.testing.assert_allclose(var, exact.var(axes), rtol=1e-3)
    np.testing.assert_allclose(inv_std, 1 / np.sqrt(exact.var(axes) + EPSILON), rtol=1e-3)
    centred = exact - exact.mean(axes, keepdims=True)
    np.testing.assert_allclose(y, centred / np.sqrt(exact.var(axes, keepdims=True) + EPSILON), atol=1e-3)


def test_batch_normalization_training_like_differences() -> None:
    feeds = {"x": sample(3, 2, 4, 3), "scale": sample(2, seed=1), "bias": sample(2, seed=2)}
    model, values = new_model(feeds)
    y, *_ = Builder(model.graph).graphc.BatchNormalizationTraining(*values, epsilon=EPSILON)
    model.graph.outputs.append(y)
    check_gradient(model, feeds)


def test_a_loss_on_batch_statistics() -> None:
    """All four outputs at once, and each statistic alone."""
    check_op("BatchNormalizationTraining", [(3, 2, 4, 3), (2,), (2,)], domain="graphc", epsilon=EPSILON)
    for k in (1, 2, 3):
        feeds = {"x": sample(3, 2, 4), "scale": sample(2), "bias": sample(2)}
        model, values = new_model(feeds)
        model.graph.outputs.append(Builder(model.graph).graphc.BatchNormalizationTraining(*values, epsilon=EPSILON)[k])
        check_gradient(model, feeds, ["x"])


@pytest.mark.full
@pytest.mark.parametrize("op_type", ["BatchNormalizationTraining", "LayerNormalization"])
def test_gradients_of_gradients(op_type: str) -> None:
    """∂/∂(x, scale) of ∂(Σ y²)/∂x. In float32 for LayerNormalization, whose float64 statistics ONNX rounds to float32."""
    batch = op_type == "BatchNormalizationTraining"
    shape, width = ((5, 2, 3), 2) if batch else ((4, 5), 5)
    feeds = {"x": sample(*shape), "scale": sample(width, seed=1), "bias": sample(width, seed=2)}
    if not batch:
        feeds = {k: a.astype(np.float32) for k, a in feeds.items()}
    model, values = new_model(feeds)
    op = Builder(model.graph)
    y = op.emit(op_type, values, {"epsilon": EPSILON}, domain="graphc" if batch else "")[0]
    first = differentiate(model.graph, [op.Mul(y, y)], values[:1])
    model.graph.outputs.append(first[values[0]])
    accuracy = {} if batch else {"tolerance": 5e-3, "step": 1e-2}
    check_gradient(model, feeds, ["x", "scale", "bias"], compile_with=on_onnxruntime, **accuracy)  # type: ignore[arg-type]


def test_a_loss_on_running_statistics() -> None:
    feeds = {"x": sample(3, 2, 4), "scale": sample(2), "bias": sample(2), "mean": sample(2), "var": sample(2)}
    model, values = new_model(feeds)
    outputs = Builder(model.graph).emit("BatchNormalization", values, {"training_mode": 1, "momentum": 0.7}, outputs=3)
    model.graph.outputs.extend(outputs[1:])
    check_gradient(model, feeds, ["x", "mean", "var"])


@pytest.mark.parametrize("training", [0, 1])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 4, 2)])
def test_batch_normalization_like_differences(shape: tuple[int, ...], training: int) -> None:
    """In inference mode also with respect to the statistics."""
    feeds = {"x": sample(*shape), "scale": sample(3, seed=1), "bias": sample(3, seed=2)}
    feeds |= {"mean": sample(3, seed=3), "var": np.abs(sample(3, seed=4))}
    for names in ([], symbols(shape)):
        model, values = new_model(feeds)
        if names:
            values[0].shape = ir.Shape(names)
        op = Builder(model.graph)
        y = op.emit("BatchNormalization", values, {"epsilon": EPSILON, "training_mode": training}, outputs=1 + 2 * training)[0]
        model.graph.outputs.append(y)
        check_gradient(model, feeds, ["x", "scale", "bias"] if training else None)


def test_batch_normalization_inference_like_pytorch() -> None:
    mean, var = torch.tensor(sample(3, seed=3), dtype=torch.float32), torch.tensor(sample(3, seed=4) ** 2, dtype=torch.float32)
    arrays = {"x": sample(2, 3, 4, 4), "scale": sample(3, seed=1), "bias": sample(3, seed=2)}
    feeds = {k: a.astype(np.float32) for k, a in arrays.items()} | {"mean": mean.numpy(), "var": var.numpy()}
    model, values = new_model(feeds)
    y = Builder(model.graph).BatchNormalization(*values, epsilon=EPSILON)
    found = differentiate(model.graph, [y], values[:3])
    model.graph.outputs.extend(found[v] for v in values[:3])
    tensors = [torch.tensor(feeds[k], requires_grad=True) for k in arrays]
    F.batch_norm(tensors[0], mean, var, *tensors[1:], training=False, eps=EPSILON).sum().backward()
    for tensor, result in zip(tensors, on_onnxruntime(model)(feeds).values(), strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(result, tensor.grad.numpy(), rtol=1e-5, atol=1e-4)


def layer_norm(axis: int, rank: int) -> Torch:
    def forward(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.layer_norm(x, x.shape[axis % rank :], scale, bias, EPSILON)

    return forward


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "axis"), [((4, 6), -1), ((2, 5, 6), 2), ((2, 3, 4), 1), ((2, 3, 4, 5), -2), ((3, 4), 0)])
def test_layer_normalization_like_pytorch(shape: tuple[int, ...], axis: int, dtype: Any) -> None:
    part = shape[axis:]
    arrays = [sample(*shape), sample(*part, seed=1), sample(*part, seed=2)]
    lead = len(shape) - len(part)
    some = [f"s{k}" if k < lead else d for k, d in enumerate(shape)]
    forward = layer_norm(axis, len(shape))
    for names in ([], some, symbols(shape, but=None)):
        for specialise in LATE:
            assert_like_torch(
                forward,
                "LayerNormalization",
                arrays,
                dtype=dtype,
                symbolic=names,
                specialise=specialise,
                axis=axis,
                epsilon=EPSILON,
            )
    assert_like_torch(forward, "LayerNormalization", arrays[:2], dtype=dtype, axis=axis, epsilon=EPSILON)


@pytest.mark.parametrize(("scale", "bias"), [((1,), (6,)), ((6,), ()), ((5, 6), (1, 6)), ((5, 1), (5, 6))])
def test_layer_normalization_with_broadcast_scale(scale: tuple[int, ...], bias: tuple[int, ...]) -> None:
    def forward(x: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[1:], None, None, EPSILON) * s + b

    arrays = [sample(2, 5, 6), sample(*scale, seed=1), sample(*bias, seed=2)]
    # the reference, for onnxruntime's forward takes a scale of the normalised shape only
    assert_like_torch(forward, "LayerNormalization", arrays, axis=1, epsilon=EPSILON, run=reference)


def test_layer_normalization_keeps_its_statistics_instead_of_computing_them_twice() -> None:
    forward = layer_norm(-1, 3)
    arrays = [sample(2, 5, 6), sample(6, seed=1), sample(6, seed=2)]
    model = assert_like_torch(forward, "LayerNormalization", arrays, symbolic=["N", "T", 6], epsilon=EPSILON)
    assert not [n for n in model.graph if n.op_type == "ReduceMean"]
    (node,) = [n for n in model.graph if n.op_type == "LayerNormalization"]
    assert [v.shape for v in node.outputs[1:]] == [ir.Shape([2, 5, 1])] * 2


def test_layer_normalization_with_a_statistic_left_out() -> None:
    """A node with InvStdDev and an unnamed Mean, as some exporters write it."""
    feeds = {"x": sample(4, 6).astype(np.float32), "scale": sample(6, seed=1).astype(np.float32)}
    model, values = new_model(feeds)
    op = Builder(model.graph)
    y, _, _ = op.emit("LayerNormalization", values, {"epsilon": EPSILON}, outputs=["y", "", "inv"])
    model.graph.outputs.append(y)
    check_gradient(model, feeds, compile_with=on_onnxruntime, tolerance=2e-3, step=1e-2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "axis"), [((4, 6), -1), ((2, 3, 4), 1)])
def test_rms_normalization_like_pytorch(shape: tuple[int, ...], axis: int, dtype: Any) -> None:
    arrays = [sample(*shape), sample(*shape[axis:], seed=1)]

    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[axis % len(shape) :], scale, EPSILON)

    for names in ([], symbols(shape, but=None)):
        assert_like_torch(
            forward, "RMSNormalization", arrays, dtype=dtype, symbolic=names, specialise=False, axis=axis, epsilon=EPSILON
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(2, 4, 5), (3, 4, 5, 2)])
def test_instance_and_group_normalization_like_pytorch(shape: tuple[int, ...], dtype: Any) -> None:
    arrays = [sample(*shape), sample(4, seed=1), sample(4, seed=2)]

    def by_instance(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.instance_norm(x, weight=scale, bias=bias, eps=EPSILON)

    def by_group(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 2, scale, bias, EPSILON)

    for names in ([], ["N", *shape[1:]], symbols(shape)):
        common: dict[str, Any] = {"dtype": dtype, "symbolic": names, "specialise": False, "epsilon": EPSILON}
        common["run"] = on_onnxruntime if dtype is np.float32 else reference
        assert_like_torch(by_instance, "InstanceNormalization", arrays, **common)
        assert_like_torch(by_group, "GroupNormalization", arrays, num_groups=2, **common)


def test_instance_normalization_like_differences() -> None:
    check_op("InstanceNormalization", [(2, 4, 3, 2), (4,), (4,)], epsilon=EPSILON)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 1])
def test_lp_normalization_like_differences(axis: int, p: int) -> None:
    for symbolic in (False, True):
        check_op("LpNormalization", [(3, 4, 2)], symbolic=symbolic, compile_with=on_onnxruntime, axis=axis, p=p)


def test_lp_normalization_of_zeros() -> None:
    model, values = new_model({"x": np.zeros((2, 3), np.float32)})
    y = Builder(model.graph).LpNormalization(*values)
    model.graph.outputs.extend(differentiate(model.graph, [y], values).values())
    (dx,) = on_onnxruntime(model)({"x": np.array([[0, 0, 0], [3, 0, 4]], np.float32)}).values()
    np.testing.assert_allclose(dx, [[0, 0, 0], [0.2 - 0.168, 0.2, 0.2 - 0.224]], atol=1e-6)


def local_response_norm(size: int) -> Torch:
    def forward(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x * x, (0, 0, 0, 0, (size - 1) // 2, size // 2))
        return x / (1.5 + 0.3 / size * padded.unfold(1, size, 1).sum(-1)) ** 0.6

    return forward


@pytest.mark.parametrize("shape", [(2, 6, 3, 2), (2, 3, 4, 4)])
@pytest.mark.parametrize("size", [1, 3, 5, 9])
def test_lrn_like_pytorch(size: int, shape: tuple[int, ...]) -> None:
    attributes = {"alpha": 0.3, "beta": 0.6, "bias": 1.5, "size": size}
    for names in ([], ["N", *shape[1:]], symbols(shape, but=None)):
        for specialise in LATE:
            forward = local_response_norm(size)
            assert_like_torch(forward, "LRN", [sample(*shape)], symbolic=names, specialise=specialise, **attributes)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_lrn_with_an_even_window(size: int) -> None:
    """onnxruntime has no LRN for even sizes, but the gradient must know which side of the window is longer."""
    x = torch.tensor(sample(2, 6, 3, 2).astype(np.float32), requires_grad=True)
    y = local_response_norm(size)(x)
    feeds = {"dy": sample(2, 6, 3, 2, seed=9).astype(np.float32), "x": x.detach().numpy(), "y": y.detach().numpy()}
    y.backward(torch.tensor(feeds["dy"]))
    model, values = new_model(feeds)
    model.graph.outputs.append(Builder(model.graph).graphc.LRNGrad(*values, alpha=0.3, beta=0.6, bias=1.5, size=size))
    (dx,) = on_onnxruntime(model)(feeds).values()
    assert x.grad is not None
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op_type", "weights", "attributes"),
    [
        ("graphc::BatchNormalizationTraining", [(4,), (4,)], {}),
        ("LayerNormalization", [(5,), (5,)], {}),
        ("RMSNormalization", [(5,)], {}),
        ("InstanceNormalization", [(4,), (4,)], {}),
        ("GroupNormalization", [(4,), (4,)], {"num_groups": 2}),
    ],
)
def test_half_precision(op_type: str, weights: list[tuple[int, ...]], attributes: dict[str, Any]) -> None:
    domain, _, name = op_type.rpartition("::")
    arrays = [sample(3, 4, 5), *(sample(*shape, seed=1) for shape in weights), sample(3, 4, 5, seed=2)]
    exact = {f"x{k}": a.astype(np.float16).astype(np.float32) for k, a in enumerate(arrays)}
    results = []
    for feeds in (exact, {k: a.astype(np.float16) for k, a in exact.items()}):
        model, values = new_model(feeds)
        op = Builder(model.graph)
        y = op.emit(name, values[:-1], attributes, domain=domain)[0]
        found = differentiate(model.graph, [op.Mul(y, values[-1])], values[:-1])
        model.graph.outputs.extend(found.values())
        results.append(on_onnxruntime(model)(feeds))
    for single, half in zip(results[0].values(), results[1].values(), strict=True):
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, single, rtol=2e-2, atol=2e-2 * float(np.abs(single).max()))

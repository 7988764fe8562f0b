"""Files of onnxruntime.quantization train like the float network that they were made from, and are written back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from torch import nn

import graphc
from graphc import losses

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 1, 6, 6)).astype(np.float32)
LABELS = (X[:, 0, :3].sum((1, 2)) > X[:, 0, 3:].sum((1, 2))).astype(np.int64)


class Net(nn.Module):
    """Convolutions, a residual sum, pooling and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.three, self.four = nn.Linear(54, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        x = torch.max_pool2d(torch.relu(self.one(x)), 2)
        x = torch.relu(self.two(x) + x)
        return self.four(torch.relu(self.three(x.flatten(1))))


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self.items: Iterator[dict[str, Array]] = iter([{"x": X}])

    def get_next(self) -> dict[str, Array] | None:
        return next(self.items, None)


class Made(NamedTuple):
    net: Net
    folder: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(0)
    net, folder = Net().eval(), tmp_path_factory.mktemp("quantised")
    for parameter in net.parameters():
        parameter.data *= 2
    axes = {"x": {0: "n"}, "y": {0: "n"}}
    torch.onnx.export(
        net, (torch.tensor(X[:2]),), str(folder / "float.onnx"), input_names=["x"], output_names=["y"], dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip
    return Made(net, folder)


# Eight bits of signed weights beside static activations saturate in onnxruntime on CPUs without VNNI, so those have seven.
FORMS = [
    ("dynamic", QuantType.QInt8, True, False),
    ("dynamic", QuantType.QUInt8, False, True),
    ("QDQ", QuantType.QInt8, True, True),
    ("QDQ", QuantType.QUInt8, False, False),
    ("QOperator", QuantType.QInt8, True, True),
    ("QOperator", QuantType.QUInt8, False, False),
]


def quantised(made: Made, form: tuple[str, Any, bool, bool]) -> str:
    """The path of the network in a form: how, the type of weights, per channel, seven bits."""
    how, kind, per_channel, reduced = form
    path = made.folder / f"{how}-{kind.name}-{per_channel}-{reduced}.onnx"
    if not path.exists():
        logging.disable(logging.WARNING)
        options = {"weight_type": kind, "per_channel": per_channel, "reduce_range": reduced}
        if how == "dynamic":
            quantize_dynamic(made.folder / "float.onnx", path, **options)
        else:
            activations = QuantType.QInt8 if per_channel and how == "QDQ" else QuantType.QUInt8
            quantize_static(
                made.folder / "float.onnx", path, Calibration(), quant_format=QuantFormat[how], activation_type=activations,
                **options,
            )  # fmt: skip
        logging.disable(logging.NOTSET)
    return str(path)


def outputs(path: str | Path) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return np.asarray(ort.InferenceSession(str(path), options).run(None, {"x": X})[0])


def kinds(path: str | Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def train(
    path: str, optimizer: Any, *, epochs: int = 1, out: Path | None = None, **options: Any
) -> tuple[dict[str, Array], Any]:
    """Parameters after training on all of the data as one batch, and the last loss."""
    program = graphc.compile(path, loss=losses.SoftmaxCrossEntropy(), optimizer=optimizer, **options)
    with graphc.Trainer(program, threads=1) as trainer:
        means = trainer.fit([{"x": X, "label": LABELS}], epochs=epochs)
        if out is not None:
            trainer.export(out)
        return {name: np.array(v) for name, v in trainer.trained_values().items()}, means["loss"]


def gradient_of(net: Net) -> Array:
    """All gradients of the loss in the float network, as one vector in the order of its parameters."""
    net = copy.deepcopy(net)
    nn.functional.cross_entropy(net(torch.tensor(X)), torch.tensor(LABELS)).backward()
    return np.concatenate([p.grad.numpy().reshape(-1) for p in net.parameters() if p.grad is not None])


@pytest.mark.full
@pytest.mark.parametrize("mode", ["auto", pytest.param("always", marks=pytest.mark.large)])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form[:1])) + form[1].name)
def test_the_gradient_is_that_of_the_float_network(made: Made, form: tuple[str, Any, bool, bool], mode: str) -> None:
    path = quantised(made, form)
    before, _ = train(path, graphc.optim.SGD(lr=0.0), dequantize=mode)
    after, loss = train(path, graphc.optim.SGD(lr=1.0), dequantize=mode)
    found = []
    for layer in ("one", "two", "three", "four"):
        for part in ("weight", "bias"):
            (name,) = (n for n in before if n.startswith(f"{layer}.{part}"))
            step = before[name] - after[name]
            found.append((step.T if step.ndim == 2 and "dynamic" in path else step).reshape(-1))
    gradient, true = np.concatenate(found), gradient_of(made.net)
    assert gradient @ true / np.linalg.norm(gradient) / np.linalg.norm(true) > 0.99
    assert np.linalg.norm(gradient) == pytest.approx(np.linalg.norm(true), rel=0.05)
    if mode == "auto" and "dynamic" not in path:  # activations are rounded as in the file
        wanted = nn.functional.cross_entropy(torch.tensor(outputs(path)), torch.tensor(LABELS))
        assert loss == pytest.approx(float(wanted), rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form[:1])) + form[1].name)
def test_it_trains_as_the_float_file_and_is_written_back_as_integers(
    made: Made, form: tuple[str, Any, bool, bool], tmp_path: Path
) -> None:
    path, out, adam = quantised(made, form), tmp_path / "trained.onnx", graphc.optim.Adam(lr=0.01)
    _, first = train(path, graphc.optim.SGD(lr=0.0))
    _, wanted = train(str(made.folder / "float.onnx"), adam, epochs=40)
    _, loss = train(path, adam, epochs=40, out=out)
    assert loss < wanted + 0.05 < first / 2
    assert kinds(out) == kinds(path)
    stored = {t.name: t.data_type for t in onnx.load(path).graph.initializer}
    assert {t.name: t.data_type for t in onnx.load(out).graph.initializer} == stored
    y = outputs(out)
    assert float(nn.functional.cross_entropy(torch.tensor(y), torch.tensor(LABELS))) < loss + 0.1
    assert (y.argmax(1) == LABELS).mean() > 0.95


@pytest.mark.full
def test_what_did_not_train_is_written_back_bit_for_bit(made: Made, tmp_path: Path) -> None:
    for form in FORMS:
        path = quantised(made, form)
        train(path, graphc.optim.SGD(lr=0.0), out=tmp_path / "same.onnx")
        held = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
        for tensor in onnx.load(tmp_path / "same.onnx").graph.initializer:
            assert np.array_equal(onnx.numpy_helper.to_array(tensor), held[tensor.name]), tensor.name


def test_never_refuses_an_integer_product_on_the_path_by_name(made: Made) -> None:
    with pytest.raises(graphc.GraphcError, match=r"MatMulInteger at /three/Gemm_MatMul_quant[\s\S]*--dequantize auto"):
        train(quantised(made, FORMS[0]), graphc.optim.SGD(lr=0.1), dequantize="never")
    with pytest.raises(graphc.GraphcError, match=r"dequantize='alway' \(did you mean 'always'|dequantize='alway'"):
        train(quantised(made, FORMS[0]), graphc.optim.SGD(lr=0.1), dequantize="alway")


def test_one_line_says_what_became_float(made: Made) -> None:
    program = graphc.compile(quantised(made, FORMS[4]), loss=losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    (line,) = (line for line in program.log if line.startswith("dequantize"))
    assert "2 integer products are computed in float and 8 parameters (4 of int32, 4 of int8) are float" in line

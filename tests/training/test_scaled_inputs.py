"""Inputs of integers with a stated scale: images as files hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import graphc
from graphc import losses, optim
from graphc.cli import main
from graphc.errors import UsageError

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = "1/255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225"
LABEL = RNG.integers(0, 4, 12)
W = (RNG.standard_normal((4, 3, 2, 2)) / 4).astype(np.float32)


def model(channels_last: bool = False) -> onnx.ModelProto:
    """A convolution of images with 3 channels, averaged to 4 logits."""
    given = ["b", 2, 5, 3] if channels_last else ["b", 3, 2, 5]
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2])] if channels_last else []
    nodes += [
        helper.make_node("Conv", ["t" if channels_last else "x", "w"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, given)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 4])],
        [onnx.numpy_helper.from_array(W, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def torch_weights(images: Array, steps: int) -> tuple[Array, float]:
    """The weights after SGD on batches of 4, and the first loss; ``images`` are floats with the channels on axis 1."""
    w, first = torch.tensor(W, requires_grad=True), 0.0
    for k in range(steps):
        part = slice(4 * k % 12, 4 * k % 12 + 4)
        logits = torch.nn.functional.conv2d(torch.tensor(images[part]), w).mean((2, 3))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(LABEL[part]))
        first = first or float(loss.detach())
        (grad,) = torch.autograd.grad(loss, w)
        w = (w - 0.1 * grad).detach().requires_grad_()
    return w.detach().numpy(), first


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_images_of_a_file_are_normalised_as_torchvision_does(tmp_path: Path, channels_last: bool, dtype: str) -> None:
    onnx.save(model(channels_last), tmp_path / "m.onnx")
    top = np.iinfo(dtype).max
    raw = RNG.integers(0, top + 1, (12, 3, 2, 5)).astype(dtype)
    images = (raw / np.float32(top) - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
    np.savez(tmp_path / "d.npz", x=raw.transpose(0, 2, 3, 1) if channels_last else raw, label=LABEL)
    scale = f"x={NORMALIZE}" if dtype == "uint8" else f"x={NORMALIZE.replace('255', str(top))},dtype=uint16"
    options = [
        "--data",
        str(tmp_path / "d.npz"),
        "--loss",
        "softmax_cross_entropy",
        "--optimizer",
        "sgd:lr=0.1",
        "--no-shuffle",
    ]
    split = ["--batch-size", "4", "-n", "2", "--transport", "threads", "--epochs", "2"]
    out = tmp_path / "t.onnx"
    assert main(["train", str(tmp_path / "m.onnx"), *options, *split, "--scale", scale, "-o", str(out)]) == 0
    trained = onnx.load(out)
    (w,) = trained.graph.initializer
    wanted, _ = torch_weights(images.astype(np.float32), 6)
    np.testing.assert_allclose(onnx.numpy_helper.to_array(w), wanted, rtol=1e-5, atol=1e-6)
    assert trained.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT


def test_in_python_a_scale_is_a_number() -> None:
    raw = RNG.integers(0, 256, (12, 3, 2, 5)).astype(np.uint8)
    program = graphc.compile(model(), loss=losses.SoftmaxCrossEntropy(), optimizer=optim.SGD(lr=0.1), scale={"x": 1 / 255})
    wanted, first = torch_weights((raw / np.float32(255)).astype(np.float32), 1)
    with graphc.Trainer(program, threads=1) as trainer:
        feeds = {"x": raw[:4], "label": LABEL[:4]}
        assert trainer.evaluate([feeds])["loss"] == pytest.approx(first, rel=1e-5)
        assert trainer.step(feeds)["loss"] == pytest.approx(first, rel=1e-5)
        np.testing.assert_allclose(trainer.state.fetch("w"), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ("y=1/255", "no input 'y'"),
        ("x=1/0", "scale x=1/0: write a factor as in x=1/255"),
        ("x=nan", "scale x=nan"),
        ("x=1/255,std=0", "write a factor"),
        ("x=1/255,median=3", "write a factor"),
        ("x=1/255,dtype=float32", "dtype= one of uint8"),
        ("x=1,mean=1:2", "2 means and 1 deviations do not fit the channels of x:float\\[b,3,2,5\\]"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused_by_name(scale: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        graphc.compile(model(), loss=losses.SoftmaxCrossEntropy(), optimizer=optim.SGD(lr=0.1), scale=[scale])


def test_without_a_scale_the_error_says_how_to_state_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 3, 2, 5), np.uint8), label=LABEL[:4])
    options = ["--data", str(tmp_path / "d.npz"), "--loss", "softmax_cross_entropy", "--optimizer", "sgd:lr=0.1"]
    assert main(["train", str(tmp_path / "m.onnx"), *options]) == 1
    assert "--scale x=1/255" in " ".join(capsys.readouterr().err.split())

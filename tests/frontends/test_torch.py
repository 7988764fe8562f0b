"""PyTorch modules exported as they train: names, modes, shared parameters, a batch of any size, the same numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import graphc
from graphc import frontends
from graphc.errors import ModelError, UsageError
from graphc.frontends.torch import export, frozen
from graphc.ir.facts import dims
from graphc.ir.parameters import select_trainable
from graphc.passes.rebatch.rebatch import rebatch
from graphc.pipeline import Context
from tests.frontends.zoo import legal, run
from tests.tiers import params

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch")
nn = torch.nn

EXPORTERS = ("torchscript", "dynamo")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.stem(image)))
        x = torch.relu(self.bn2(self.conv(x)) + x)
        return self.fc(self.drop(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)))


class Language(nn.Module):
    """A small encoder with a positional buffer and an output layer that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.randn(1, 6, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens) + self.position))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def video() -> nn.Module:
    """Volumes without a bias, to which the newer exporter gives zeros of a shape that ONNX does not allow."""
    frames, time = nn.Conv3d(3, 4, (1, 3, 3), bias=False), nn.Conv3d(4, 4, (3, 1, 1), padding=(1, 0, 0), bias=False)
    return nn.Sequential(frames, nn.BatchNorm3d(4), nn.ReLU(), time, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 5))


MODULES = {
    "mlp": (mlp, lambda n: torch.randn(n, 6)),
    "residual": (Residual, lambda n: torch.randn(n, 3, 8, 8)),
    "video": (video, lambda n: torch.randn(n, 3, 4, 6, 6)),
    "language": (Language, lambda n: torch.randint(0, 50, (n, 6))),
}


@pytest.mark.parametrize(("name", "exporter"), params(product(MODULES, EXPORTERS), large=[("residual", EXPORTERS[1])]))
def test_export_trains_what_the_module_trains_and_computes_the_same(name: str, exporter: str) -> None:
    torch.manual_seed(0)
    make, sample = MODULES[name]
    module = make().eval()
    with torch.no_grad():
        for buffer in module.buffers():
            if buffer.dtype == torch.float32:
                buffer.uniform_(0.5, 1.5)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    model = export(module, sample(1), exporter=exporter)
    assert not module.training
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    onnx.checker.check_model(ir.to_proto(model), full_check=True)

    legalised = legal(model)
    assert {v.name for v in select_trainable(legalised.graph)} == {k for k, _ in module.named_parameters()}
    assert dims(legalised.graph.outputs[0])[0] == "batch"
    assert legalised.graph.outputs[0].name == "output"
    x = sample(3)
    with torch.no_grad():
        want = module(x).numpy()
    for candidate in (model, legalised):
        (have,) = run(candidate, {candidate.graph.inputs[0].name: x.numpy()})
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_module_keeps_nothing_of_its_export(exporter: str) -> None:
    """Capturing makes up tensors: what a module kept of them for its next call would break it."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(4, 4), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.bias is None:
                self.bias = torch.arange(float(x.shape[1]))
                self.register_buffer("seen", torch.ones(x.shape[1]), persistent=False)
            return self.layer(x) + self.bias * self.seen  # type: ignore[operator]

    module = Cached().eval()
    export(module, (torch.randn(3, 4),), exporter=exporter)
    assert module.bias is None
    assert not module.training
    assert set(module._buffers) == set()
    assert torch.isfinite(module(torch.randn(2, 4))).all()


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_dropout_and_batch_normalization_can_be_put_back_to_training(exporter: str) -> None:
    model = legal(export(Residual(), torch.randn(2, 3, 8, 8), exporter=exporter))
    kinds = [n.op_type for n in model.graph]
    assert kinds.count("BatchNormalization") == 2
    assert kinds.count("Dropout") == 1
    (dropout,) = (n for n in model.graph if n.op_type == "Dropout")
    assert ir.convenience.get_const_tensor(dropout.inputs[1]).numpy() == pytest.approx(0.3)
    for node in model.graph:
        if node.op_type == "BatchNormalization":
            assert [v.name.rpartition(".")[2] for v in node.inputs[3:]] == ["running_mean", "running_var"]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_transformer_exported_for_one_batch_size_takes_any(batch: int) -> None:
    torch.manual_seed(0)
    module = Language().eval()
    model = legal(export(module, torch.randint(0, 50, (batch, 6)), exporter="torchscript", dynamic_batch=False))
    assert dims(model.graph.inputs[0]) == (batch, 6)
    rebatch(model, Context())
    assert dims(model.graph.outputs[0]) == ("batch", 6, 50)
    x = torch.randint(0, 50, (3, 6))
    with torch.no_grad():
        want = module(x).numpy()
    np.testing.assert_allclose(run(model, {model.graph.inputs[0].name: x.numpy()})[0], want, rtol=1e-4, atol=1e-5)


def test_names_arrays_and_mappings() -> None:
    class Two(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return left + right, left * right

    a, b = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)
    model = frontends.load(Two(), example_inputs={"right": b, "left": a})
    assert [v.name for v in model.graph.inputs] == ["left", "right"]
    assert [v.name for v in model.graph.outputs] == ["output_0", "output_1"]
    named = export(Two(), (a, b), input_names=["a", "b"], output_names=["sum", "product"], exporter="torchscript")
    have = run(named, {"a": a, "b": b})
    assert [v.name for v in named.graph.outputs] == ["sum", "product"]
    np.testing.assert_array_equal(have, [a + b, a * b])


def test_inputs_behind_a_star_have_a_batch_of_any_size_too() -> None:
    class Total(nn.Module):
        def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return first + sum(others)

    model = export(Total(), tuple(torch.ones(4, 3) for _ in range(3)), exporter="dynamo")
    assert [v.name for v in model.graph.inputs] == ["first", "others_0", "others_1"]
    assert [dims(v) for v in model.graph.inputs] == [("batch", 3)] * 3


def test_the_export_is_a_copy_and_frozen_parameters_are_listed() -> None:
    module = mlp()
    module[0].weight.requires_grad = False
    assert frozen(module) == ["0.weight"]
    model = export(module, torch.randn(1, 6), exporter="torchscript")
    before = model.graph.initializers["2.weight"].const_value.numpy().copy()
    with torch.no_grad():
        module[2].weight.zero_()
    np.testing.assert_array_equal(model.graph.initializers["2.weight"].const_value.numpy(), before)


class Positions(nn.Module):
    """Reads all of a parameter, and all of a buffer, in slices that may be shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.position = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.randn(1, 5, 6))
        self.register_buffer("shift", torch.randn(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b):
            x = layer(torch.tanh(x + self.position[:, : x.shape[1]] + self.shift[: x.shape[1]]))
        return x


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_slice_that_holds_all_of_a_parameter_is_that_parameter(exporter: str) -> None:
    torch.manual_seed(3)
    module, x, y = Positions(), torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    model = frontends.export(module, x, exporter=exporter)
    program = graphc.compile(model, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.5))
    trainer, labels = graphc.Trainer(program), program.model.graph.inputs[-1].name
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        assert trainer.step({"x": x.numpy(), labels: y.numpy()})["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_what_cannot_be_exported() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no way through")

    with pytest.raises(ModelError, match=r"Odd cannot be exported(.|\n)*torchscript: RuntimeError: no way through"):
        export(Odd(), torch.ones(2, 2), exporter="torchscript")

    with pytest.raises(ModelError, match="cannot be exported to ONNX") as caught:
        export(nn.FractionalMaxPool2d(2, output_size=3), torch.ones(3, 4, 8, 8))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all("fractional_max_pool2d" in line and "\x1b" not in line for line in lines[1:])

    class PerSample(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, channels, size = x.shape
            kernels = x.mean(2).reshape(batch * channels, 1, 1).expand(-1, channels, 3)
            return nn.functional.conv1d(x.reshape(1, -1, size), kernels, groups=batch)

    with pytest.raises(ModelError, match=r"batches of 3 only: graphc\.frontends\.export\(.*dynamic_batch=False"):
        export(PerSample(), torch.ones(3, 2, 8), exporter="torchscript")
    assert [node.op_type for node in export(PerSample(), torch.ones(3, 2, 8), dynamic_batch=False).graph][-1] == "Conv"
    with pytest.raises(ModelError, match=r"'0' has proj_size=4, and ONNX has no LSTM with projections: use proj_size=0"):
        export(nn.Sequential(nn.LSTM(6, 8, proj_size=4)), torch.ones(3, 2, 6))
    with pytest.raises(UsageError, match=r"do not fit Sequential\.forward"):
        export(mlp(), (torch.ones(1, 6), torch.ones(1, 6)))
    with pytest.raises(UsageError, match="only tensors can be graph inputs"):
        export(mlp(), ("text",))
    with pytest.raises(UsageError, match="needs example_inputs"):
        frontends.load(mlp())


class Asking(nn.Module):
    """Asks for a value, which the newer exporter refuses, as ``nn.Transformer`` does with a mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool((x.detach().sum() > 0).item()) else x


def test_an_exporter_that_fails_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    model = export(Asking(), torch.ones(2, 3))
    assert [node.op_type for node in model.graph][-1] == "Mul"
    assert capfd.readouterr() == ("", "")

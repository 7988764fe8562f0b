"""The benchmark and parity models as PyTorch modules.

PyTorch trains the module itself; graphc trains the ONNX file exported from it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from graphc.bench.specs import SPECS


class Mlp(nn.Module):
    """784-512-512-10 with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling on 28×28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))  # type: ignore[no-any-return]


class _Fire(nn.Module):
    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.expand1(x)), torch.relu(self.expand3(x))], 1)


class SqueezeNet(nn.Module):
    """SqueezeNet 1.1 (Iandola et al., 2016) without dropout, 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            _Fire(64, 16, 64), _Fire(128, 16, 64), nn.MaxPool2d(3, 2),
            _Fire(128, 32, 128), _Fire(256, 32, 128), nn.MaxPool2d(3, 2),
            _Fire(256, 48, 192), _Fire(384, 48, 192), _Fire(384, 64, 256), _Fire(512, 64, 256),
            nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).flatten(1)  # type: ignore[no-any-return]


class _Block(nn.Module):
    """A residual block: basic (two 3×3) or bottleneck (1×1, 3×3, 1×1)."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, bottleneck: bool, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        if bottleneck:
            shape = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            shape = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in shape)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in shape)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            if k + 1 < len(self.convs):
                y = self.activation(y)
        return self.activation(y + self.shortcut(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Residual network (He et al., 2015): ``depth`` 50 with bottlenecks, or a small 18-like one for parity tests."""

    def __init__(
        self, depth: int = 50, classes: int = 1000, width: int = 64, stem: int = 7, activation: type[nn.Module] = nn.ReLU
    ) -> None:
        super().__init__()
        bottleneck = depth >= 50
        counts = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]
        pool: nn.Module = nn.MaxPool2d(3, 2, 1) if stem == 7 else nn.Identity()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, stem, 2 if stem == 7 else 1, stem // 2, bias=False),
            nn.BatchNorm2d(width), activation(), pool,
        ]  # fmt: skip
        inputs = width
        for stage, count in enumerate(counts):
            inner = width * 2**stage
            outputs = inner * 4 if bottleneck else inner
            for k in range(count):
                layers.append(_Block(inputs, inner, outputs, 2 if stage > 0 and k == 0 else 1, bottleneck, activation()))
                inputs = outputs
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """An encoder over token ids with learned positions and a classifier over the mean."""

    def __init__(self, layers: int = 4, width: int = 256, heads: int = 8, vocabulary: int = 1000, length: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(1, length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, width * 4, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.position).mean(1))  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "lenet": LeNet,
    "squeezenet": SqueezeNet,
    "resnet50": ResNet,
    "transformer": Transformer,
    "resnet18-small": lambda: ResNet(18, 10, 16, 3),
    "resnet18-smooth": lambda: ResNet(18, 10, 16, 3, nn.SiLU),
    "transformer-small": lambda: Transformer(2, 64, 4, 100, 16),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """Make the module ``name`` with seeded weights."""
    torch.manual_seed(seed)
    return MAKERS[name]()


def export(name: str, path: str, seed: int = 0) -> None:
    """Write the module as an ONNX file with a dynamic batch dimension, input ``input`` and output ``logits``."""
    from graphc import frontends

    x, _ = SPECS[name].batch(2)
    model = frontends.export(build(name, seed), (torch.from_numpy(x),), input_names=["input"], output_names=["logits"])
    frontends.save(model, path)

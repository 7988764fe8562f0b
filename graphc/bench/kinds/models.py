"""The ten kinds as PyTorch modules, each in two sizes for processors and one for GPUs.

A kind is written as its users write it: attention, norms and activations are PyTorch's own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A model with its feeds.

    Attributes:
        module: makes it; seed PyTorch before.
        inputs: makes the inputs, the batch first.
        classes: of the labels.
        labels: their shape.
    """

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    classes: int
    labels: tuple[int, ...]


class Dlrm(nn.Module):
    """Tables of embeddings beside a dense tower; their dot products go through a second tower (Naumov et al., 2019)."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(width + (tables + 1) ** 2, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 2)
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(ids[:, k]) for k, table in enumerate(self.tables))], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products], 1))  # type: ignore[no-any-return]


class WaveNet(nn.Module):
    """Gated dilated convolutions with residual and skip connections (van den Oord et al., 2016)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2 ** (k % 6), dilation=2 ** (k % 6)) for k in range(layers)
        )
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        skips = torch.zeros_like(x)
        for gate, mix in zip(self.gates, self.mixes, strict=True):
            a, b = gate(x).chunk(2, 1)
            y, skip = mix(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, skips = x + y, skips + skip
        return self.head(torch.relu(skips).mean(2))  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """Basic residual blocks with BatchNorm (He et al., 2015) on small images."""

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
            )  # fmt: skip
            self.shortcut = nn.Identity() if inputs == outputs else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.body(x) + self.shortcut(x))

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
        for size in sizes:
            layers.append(self.Block(before, size, 1 if size == before else 2))
            before = size
        self.features, self.head = nn.Sequential(*layers), nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]


class MobileNetV2(nn.Module):
    """Inverted residuals with depthwise convolutions, BatchNorm and ReLU6 (Sandler et al., 2018)."""

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
            super().__init__()
            inner = inputs * expand
            self.adds = stride == 1 and inputs == outputs
            self.body = nn.Sequential(
                nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
                nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
                nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x) if self.adds else self.body(x)  # type: ignore[no-any-return]

    def __init__(self, stages: tuple[tuple[int, int, int], ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
        before = 16
        for width, count, stride in stages:
            for k in range(count):
                layers.append(self.Block(before, width, stride if k == 0 else 1, 6))
                before = width
        self.features, self.drop, self.head = nn.Sequential(*layers), nn.Dropout(0.2), nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.features(x).mean((2, 3))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A decoder with causal attention that predicts the next token, its table shared with the head."""

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            parts = self.attend(self.first(x)).reshape(batch, length, 3, self.heads, width // self.heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
            x = x + self.project(y)
            return x + self.mlp(self.second(x))  # type: ignore[no-any-return]

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(1, length, width) * 0.02)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(self.Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions)))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """PyTorch's encoder layers over tokens of ``embed``: BERT over ids (norms behind), ViT over patches (norms before)."""

    def __init__(self, embed: nn.Module, layers: int, width: int, heads: int, length: int, before: bool, drop: float) -> None:
        super().__init__()
        self.embed, self.positions = embed, nn.Parameter(torch.randn(1, length, width) * 0.02)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(drop)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, drop, "gelu", batch_first=True, norm_first=before)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if x.dim() == 4:
            x = x.flatten(2).transpose(1, 2)
        return self.head(self.layers(self.drop(self.norm(x + self.positions))).mean(1))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Encoder and decoder with skips; GroupNorm and SiLU as in diffusion models (Ho et al., 2020)."""

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.first, self.second = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
            self.a, self.b = nn.Conv2d(inputs, outputs, 3, 1, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
            self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(functional.silu(self.first(x)))
            return self.shortcut(x) + self.b(functional.silu(self.second(y)))  # type: ignore[no-any-return]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList([self.Block(width, width), self.Block(width, 2 * width)])
        self.middle = self.Block(2 * width, 2 * width)
        self.up = nn.ModuleList([self.Block(4 * width, width), self.Block(2 * width, width)])
        self.norm, self.head = nn.GroupNorm(8, width), nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.start(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0, mode="nearest"), skips.pop()], 1))
        return self.head(functional.silu(self.norm(x)))  # type: ignore[no-any-return]


class ConvNeXt(nn.Module):
    """7×7 depthwise convolutions, LayerNorm over channels, a scaled residual (Liu et al., 2022)."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.depthwise, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.scale = nn.Parameter(torch.full((width,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            y = self.scale * self.narrow(functional.gelu(self.wide(y)))
            return x + y.permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    def __init__(self, widths: tuple[int, ...], counts: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4)]
        for k, (width, count) in enumerate(zip(widths, counts, strict=True)):
            layers += [nn.Conv2d(widths[k - 1], width, 2, 2)] if k else []
            layers += [self.Block(width) for _ in range(count)]
        self.features, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x).mean((2, 3))))  # type: ignore[no-any-return]


class Lstm(nn.Module):
    """A stack of LSTM layers over a sequence; the last state is classified."""

    def __init__(self, layers: int, inputs: int, width: int) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(inputs, width, layers, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])  # type: ignore[no-any-return]


def _images(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def _ids(count: int, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, count, shape),)


def _ratings(batch: int, tables: int, rows: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, 13), torch.randint(0, rows, (batch, tables)))


def _bert(layers: int, width: int, length: int) -> Encoder:
    return Encoder(nn.Embedding(2000, width), layers, width, width // 32, length, False, 0.1)


def _vit(layers: int, width: int, side: int) -> Encoder:
    return Encoder(nn.Conv2d(3, width, 4, 4), layers, width, width // 32, (side // 4) ** 2, True, 0.0)


KINDS: dict[str, dict[str, ModelKind]] = {
    "dlrm": {
        "full": ModelKind(lambda: Dlrm(8, 10000, 64), _ratings(256, 8, 10000), 2, (256,)),
        "small": ModelKind(lambda: Dlrm(5, 2000, 32), _ratings(96, 5, 2000), 2, (96,)),
        "large": ModelKind(lambda: Dlrm(8, 100000, 64), _ratings(4096, 8, 100000), 2, (4096,)),
    },
    "resnet18": {
        "full": ModelKind(lambda: ResNet18(64), _images(16, 3, 32, 32), 10, (16,)),
        "small": ModelKind(lambda: ResNet18(24), _images(8, 3, 28, 28), 10, (8,)),
        "large": ModelKind(lambda: ResNet18(64), _images(256, 3, 32, 32), 10, (256,)),
    },
    "wavenet": {
        "full": ModelKind(lambda: WaveNet(12, 32), _images(8, 1, 1024), 10, (8,)),
        "small": ModelKind(lambda: WaveNet(8, 24), _images(4, 1, 700), 10, (4,)),
        "large": ModelKind(lambda: WaveNet(12, 64), _images(32, 1, 4096), 10, (32,)),
    },
    "mobilenet": {
        "full": ModelKind(
            lambda: MobileNetV2(((24, 2, 2), (32, 3, 2), (64, 3, 2), (96, 2, 1))), _images(16, 3, 96, 96), 10, (16,)
        ),
        "small": ModelKind(lambda: MobileNetV2(((16, 1, 1), (24, 2, 2), (48, 2, 2))), _images(6, 3, 72, 72), 10, (6,)),
        "large": ModelKind(
            lambda: MobileNetV2(((24, 2, 2), (32, 3, 2), (64, 3, 2), (96, 2, 1))), _images(128, 3, 128, 128), 10, (128,)
        ),
    },
    "gpt": {
        "full": ModelKind(lambda: Gpt(4, 256, 8, 8000, 128), _ids(8000, 8, 128), 8000, (8, 128)),
        "small": ModelKind(lambda: Gpt(3, 144, 6, 3000, 96), _ids(3000, 4, 96), 3000, (4, 96)),
        "large": ModelKind(lambda: Gpt(6, 512, 8, 16000, 512), _ids(16000, 16, 512), 16000, (16, 512)),
    },
    "vit": {
        "full": ModelKind(lambda: _vit(6, 192, 32), _images(16, 3, 32, 32), 10, (16,)),
        "small": ModelKind(lambda: _vit(4, 128, 28), _images(8, 3, 28, 28), 10, (8,)),
        "large": ModelKind(lambda: _vit(6, 384, 64), _images(64, 3, 64, 64), 10, (64,)),
    },
    "bert": {
        "full": ModelKind(lambda: _bert(4, 256, 128), _ids(2000, 8, 128), 10, (8,)),
        "small": ModelKind(lambda: _bert(3, 160, 72), _ids(2000, 6, 72), 10, (6,)),
        "large": ModelKind(lambda: _bert(6, 512, 256), _ids(2000, 32, 256), 10, (32,)),
    },
    "unet": {
        "full": ModelKind(lambda: UNet(32), _images(4, 3, 64, 64), 4, (4, 64, 64)),
        "small": ModelKind(lambda: UNet(24), _images(2, 3, 48, 48), 4, (2, 48, 48)),
        "large": ModelKind(lambda: UNet(64), _images(16, 3, 128, 128), 4, (16, 128, 128)),
    },
    "convnext": {
        "full": ModelKind(lambda: ConvNeXt((48, 96, 192), (2, 2, 4)), _images(16, 3, 64, 64), 10, (16,)),
        "small": ModelKind(lambda: ConvNeXt((40, 80), (2, 3)), _images(8, 3, 48, 48), 10, (8,)),
        "large": ModelKind(lambda: ConvNeXt((96, 192, 384), (3, 3, 9)), _images(64, 3, 128, 128), 10, (64,)),
    },
    "lstm": {
        "full": ModelKind(lambda: Lstm(2, 64, 256), _images(32, 64, 64), 10, (32,)),
        "small": ModelKind(lambda: Lstm(2, 48, 160), _images(16, 40, 48), 10, (16,)),
        "large": ModelKind(lambda: Lstm(2, 128, 512), _images(128, 128, 128), 10, (128,)),
    },
}
"""ModelKind → size (``small``, ``full``, ``large`` for a GPU) → model."""

"""Small PyTorch networks of the kinds that a tensor axis divides, none of which its rules were written for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

TOKENS, WIDTH, HEADS, CLASSES = 6, 16, 4, 5
EACH = WIDTH // HEADS


class Encoder(nn.Module):
    """PyTorch's own encoder layer: normalised behind the sums, batch and heads in one axis."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class Multihead(nn.Module):
    """nn.MultiheadAttention with the sequence first, and cross-attention to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.MultiheadAttention(WIDTH, HEADS), nn.MultiheadAttention(WIDTH, HEADS, kdim=8, vdim=8)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        y = y + self.own(y, y, y, need_weights=False)[0]
        memory = y[..., :8]
        y = self.norm(y + self.cross(y, memory, memory, need_weights=False)[0])
        return self.head(y[0])


class MergedHeads(nn.Module):
    """Attention as BART had it: [B, S, H·D] → [B·H, S, D], and products of three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm = nn.LayerNorm(WIDTH)

    def _heads(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        return x.view(b, s, HEADS, EACH).transpose(1, 2).reshape(b * HEADS, s, EACH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(torch.bmm(q * EACH**-0.5, k.transpose(1, 2)), -1)
        y = torch.bmm(weights, v).view(b, HEADS, s, EACH).transpose(1, 2).reshape(b, s, WIDTH)
        x = self.norm(x + self.o(y))
        return self.head((x + self.down(F.relu(self.up(x)))).mean(1))


class VisionTransformer(nn.Module):
    """timm's: patches by a convolution, one product for q, k and v seen as [B, N, 3, H, D], a token of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.n1, self.n2, self.n3 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        b, n, c = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, n, 3, HEADS, EACH).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * EACH**-0.5).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))
        x = x + self.down(F.gelu(self.up(self.n2(x))))
        return self.head(self.n3(x)[:, 0])


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class Llama(nn.Module):
    """RMSNorm, rotary embeddings, grouped queries, SwiGLU with two products; embeddings and logits are tied."""

    def __init__(self, groups: int = 2, fused: bool = False) -> None:
        super().__init__()
        self.groups, self.fused = groups, fused
        self.table = nn.Embedding(24, WIDTH)
        self.n1, self.n2, self.n3 = RMSNorm(), RMSNorm(), RMSNorm()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, groups * EACH, bias=False) for _ in range(2))
        self.gate = nn.Linear(WIDTH, 64 if fused else 32, bias=False)
        self.up = None if fused else nn.Linear(WIDTH, 32, bias=False)
        self.down = nn.Linear(32, WIDTH, bias=False)
        angles = torch.outer(torch.arange(TOKENS), 1e4 ** (-torch.arange(0, EACH, 2) / EACH)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.triu(torch.full((TOKENS, TOKENS), -1e9), 1), persistent=False)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], count, EACH).transpose(1, 2)

    def _repeat(self, x: Tensor) -> Tensor:
        b, g, s, d = x.shape
        return x[:, :, None].expand(b, g, HEADS // self.groups, s, d).reshape(b, HEADS, s, d)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        b, s, _ = x.shape
        y = self.n1(x)
        q, k, v = self._heads(self.q(y), HEADS), self._heads(self.k(y), self.groups), self._heads(self.v(y), self.groups)
        q, k = (t * self.cos + rotate(t) * self.sin for t in (q, k))
        k, v = self._repeat(k), self._repeat(v)
        weights = torch.softmax(q @ k.transpose(2, 3) * EACH**-0.5 + self.mask, -1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(b, s, WIDTH))
        y = self.n2(x)
        if self.up is None:
            gate, up = self.gate(y).chunk(2, -1)
        else:
            gate, up = self.gate(y), self.up(y)
        x = self.n3(x + self.down(F.silu(gate) * up))
        return F.linear(x, self.table.weight).transpose(1, 2)


class Relative(nn.Module):
    """T5's: no scale, a bias by distance from a table, a gated GELU; and ALiBi's slopes are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Embedding(24, WIDTH), nn.Embedding(11, HEADS)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.a, self.b, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.n1, self.n2 = RMSNorm(), RMSNorm()
        self.head = nn.Linear(WIDTH, 24)
        places = torch.arange(TOKENS)
        self.register_buffer("distance", places[None] - places[:, None] + TOKENS - 1, persistent=False)
        self.register_buffer("slopes", -(2.0 ** -torch.arange(1, HEADS + 1)).view(HEADS, 1, 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        y = self.n1(x)
        q, k, v = (t.unflatten(-1, (HEADS, EACH)).transpose(1, 2) for t in (self.q(y), self.k(y), self.v(y)))
        scores = torch.matmul(q, k.transpose(3, 2)) + self.bias(self.distance).permute(2, 0, 1).unsqueeze(0)
        weights = F.softmax(scores + self.slopes * self.distance, -1)
        x = x + self.o(torch.matmul(weights, v).transpose(1, 2).contiguous().flatten(2))
        y = self.n2(x)
        x = x + self.down(F.gelu(self.a(y), approximate="tanh") * self.b(y))
        return self.head(x).transpose(1, 2)


class Residual(nn.Module):
    """ResNet's basic blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.a = nn.Sequential(
            *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        )
        self.b = nn.Sequential(
            *(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)),
        )
        self.skip = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), nn.BatchNorm2d(16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        x = F.relu(x + self.a(x))
        x = F.relu(self.b(x) + self.skip(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Inverted(nn.Module):
    """MobileNet's inverted residual with squeeze and excitation: expand, a convolution per channel, project."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.expand, self.n1 = nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.each, self.n2 = nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project, self.n3 = nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.hardswish(self.n1(self.expand(x)))
        y = F.hardswish(self.n2(self.each(y)))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return self.head((x + self.n3(self.project(y))).mean((2, 3)))


class ConvNeXt(nn.Module):
    """ConvNeXt's block: a convolution per channel, a norm with channels last, two products, a scale of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.each = nn.Conv2d(3, 16, 2, 2), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale, self.head = nn.Parameter(torch.rand(16)), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.each(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((-2, -1)))


class Diffusion(nn.Module):
    """A block of a U-Net: GroupNorm, SiLU, a shift of the channels from an embedding, grouped and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.n1, self.c1 = nn.GroupNorm(4, 16), nn.Conv2d(16, 32, 3, padding=1)
        self.shift = nn.Linear(3, 32)
        self.n2, self.c2 = nn.GroupNorm(8, 32), nn.Conv2d(32, 16, 3, padding=1)
        self.groups, self.up = nn.Conv2d(16, 32, 3, 2, 1, groups=4), nn.ConvTranspose2d(32, 16, 2, 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift(x.mean((2, 3)))
        x = self.stem(x)
        y = self.c1(F.silu(self.n1(x))) + shift[:, :, None, None]
        x = x + self.c2(F.silu(self.n2(y)))
        x = x + self.up(F.silu(self.groups(x)))
        return self.head(x.mean((2, 3)))


class Mixer(nn.Module):
    """MLP-Mixer: products over tokens and over channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.t1, self.t2 = nn.LayerNorm(WIDTH), nn.Linear(TOKENS, 32), nn.Linear(32, TOKENS)
        self.n2, self.c1, self.c2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.t2(F.gelu(self.t1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.c2(F.gelu(self.c1(self.n2(x))))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    """LSTM and GRU, which are kept whole, between a table and an MLP, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(24, 8), nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.gru(self.lstm(self.table(tokens))[0])[0]
        return self.down(torch.tanh(self.up(y[:, -1])))


def _sequence() -> Tensor:
    return torch.randn(4, TOKENS, WIDTH)


def _image() -> Tensor:
    return torch.randn(4, 3, 8, 8)


def _tokens() -> Tensor:
    return torch.randint(0, 24, (4, TOKENS))


@dataclass(frozen=True)
class Case:
    """A network, one batch of its input, and the least part of its parameters' bytes that two ranks have to divide."""

    make: Callable[[], nn.Module]
    feed: Callable[[], Tensor]
    share: float


CASES: dict[str, Case] = {
    "encoder": Case(Encoder, _sequence, 0.9),
    "multihead": Case(Multihead, _sequence, 0.9),
    "merged heads": Case(MergedHeads, _sequence, 0.9),
    "vision transformer": Case(VisionTransformer, _image, 0.7),
    "llama": Case(Llama, _tokens, 0.9),
    "llama, gate and up fused": Case(lambda: Llama(4, True), _tokens, 0.9),
    "one group of queries": Case(lambda: Llama(1), _tokens, 0.9),
    "relative": Case(Relative, _tokens, 0.9),
    "residual": Case(Residual, _image, 0.85),
    "inverted": Case(Inverted, _image, 0.8),
    "convnext": Case(ConvNeXt, _image, 0.75),
    "diffusion": Case(Diffusion, _image, 0.7),
    "mixer": Case(Mixer, _sequence, 0.9),
    "recurrent": Case(Recurrent, _tokens, 0.5),
}

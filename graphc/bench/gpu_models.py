"""The jobs of ``make gpu-bench`` as PyTorch modules and ONNX files.

    python -m graphc.bench.gpu_models gpt2 gpt2.onnx --layers 2

Attention is ``scaled_dot_product_attention`` and activations are PyTorch's own: PyTorch runs its fastest kernels, and graphc
must find the patterns in the exported graph.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from graphc.bench.gpu_specs import JOBS, BenchJob
from graphc.bench.models import ResNet


class _Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.pack, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        parts = self.pack(x).split(width, dim=2)
        q, k, v = (p.unflatten(2, (self.heads, width // self.heads)).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """Attention and a feed-forward network, each with a residual; GPT-2 normalises before them, BERT after."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.first = causal
        self.attention = _Attention(width, heads, causal)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.approximate = "tanh" if causal else "none"

    def network(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x), approximate=self.approximate))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = x + self.attention(self.norm1(x))
            return x + self.network(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.network(x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """GPT-2 (Radford et al., 2019) if ``causal``, else BERT (Devlin et al., 2018); no dropout, a tied head."""

    def __init__(self, job: BenchJob, causal: bool) -> None:
        super().__init__()
        width, (length,) = job.width, job.inputs
        self.tokens, self.positions = nn.Embedding(job.tokens, width), nn.Parameter(torch.empty(1, length, width))
        self.blocks = nn.ModuleList(_Block(width, job.heads, causal) for _ in range(job.layers))
        self.norm = nn.LayerNorm(width)
        self.transform = None if causal else nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, job.tokens, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        if self.transform is not None:
            x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) if self.transform is None else self.transform(x))  # type: ignore[no-any-return]


def build(name: str, job: BenchJob | None = None, seed: int = 0) -> nn.Module:
    """Make the module of a job with seeded weights."""
    job = job or JOBS[name]
    torch.manual_seed(seed)
    if name in ("gpt2", "bert"):
        return LanguageModel(job, causal=name == "gpt2")
    if name == "resnet50":
        return ResNet(job.layers, job.classes, job.width)
    (inputs,), width = job.inputs, job.width
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, job.classes)]
    return nn.Sequential(*layers)


def export(name: str, path: str | Path, job: BenchJob | None = None) -> None:
    """Write the module as an ONNX file with a dynamic batch dimension, input ``input`` and output ``logits``."""
    from graphc import frontends

    job = job or JOBS[name]
    x = torch.from_numpy(job.smaller(batch=2).feeds()["input"])
    frontends.save(frontends.export(build(name, job), (x,), input_names=["input"], output_names=["logits"]), str(path))


def main() -> None:
    """Write one model as a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", choices=sorted(JOBS))
    parser.add_argument("path")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has (transformers)")
    parser.add_argument("--tiny", action="store_true", help="the job at a size that any machine runs in a moment")
    arguments = parser.parse_args()
    job = JOBS[arguments.model].tiny() if arguments.tiny else JOBS[arguments.model]
    export(arguments.model, arguments.path, job.smaller(layers=arguments.layers if job.heads else 0))


if __name__ == "__main__":
    main()

"""Gradients of random ops: draws depend on no differentiable value."""

from __future__ import annotations

from graphc.gradient import zero_gradient

zero_gradient(
    "graphc::DropoutMask",
    "graphc::Uniform",
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    origin=__name__,
)

"""Passes that turn the forward graph into a training graph."""

import graphc.passes.quantization.dequantize  # noqa: F401

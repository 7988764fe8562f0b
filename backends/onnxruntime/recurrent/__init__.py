"""Recurrent layers for training: native kernels whose threads share the batch; importing this registers them."""

from __future__ import annotations

from graphc.backends.onnxruntime.recurrent import layers

__all__ = ["layers"]

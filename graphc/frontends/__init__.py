"""Reads models (ONNX files, protos, ``onnx_ir`` models, PyTorch modules) and writes trained ones."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.frontends import onnx as _onnx
from graphc.frontends.onnx import TEXT, files_of, hold, save, write_back
from graphc.frontends.requantize import quantized_parameters
from graphc.frontends.writing import save_text
from graphc.options import ReadOptions

__all__ = ["TEXT", "export", "files_of", "frozen", "hold", "load", "quantized_parameters", "save", "save_text", "write_back"]


def load(source: Any, *, example_inputs: Any = None, dynamic_axes: Any = None, reading: ReadOptions | None = None) -> ir.Model:
    """Load the model behind ``source``: a path, ``-``, ``onnx.ModelProto``, ``onnx_ir.Model`` or ``torch.nn.Module``.

    Args:
        example_inputs: what a PyTorch module is exported with: a tensor, a sequence of tensors, or a mapping from names of
            its ``forward``'s parameters; required for a module, refused otherwise.
        dynamic_axes: which of their axes may have any size; see :func:`graphc.frontends.torch.export`.
        reading: what the file may ask for.
    """
    if _is_torch_module(source):
        if example_inputs is None:
            raise UsageError("a torch.nn.Module needs example_inputs=(…): the tensors its forward takes")
        return export(source, example_inputs, dynamic_axes=dynamic_axes)
    if example_inputs is not None or dynamic_axes is not None:
        raise UsageError("example_inputs and dynamic_axes are for a torch.nn.Module; an ONNX model says itself what it takes")
    return _onnx.load(source, reading or ReadOptions())


def export(module: Any, example_inputs: Any, **options: Any) -> ir.Model:
    """Export a PyTorch module; see :func:`graphc.frontends.torch.export`."""
    from graphc.frontends.torch import export as export_module

    return export_module(module, example_inputs, **options)


def frozen(module: Any) -> list[str]:
    """Names of a PyTorch module's parameters with ``requires_grad=False``."""
    from graphc.frontends import torch

    return torch.frozen(module)


def _is_torch_module(source: Any) -> bool:
    return any(base.__module__ == "torch.nn.modules.module" and base.__name__ == "Module" for base in type(source).__mro__)

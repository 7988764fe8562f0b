"""Exports PyTorch modules as ONNX models that train as the module does."""

from graphc.frontends.torch.export import export, frozen

__all__ = ["export", "frozen"]

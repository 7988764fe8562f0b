"""The intermediate representation: ``onnx_ir`` models in one opset, plus the ops of the ``graphc`` domain."""

from __future__ import annotations

OPSET = 26
"""The ``ai.onnx`` opset of a legalised graph: the newest that the pinned onnxruntime runs."""

IR_VERSION = 11
"""ONNX file format version that graphc writes: the first with multi-device annotations."""

DOMAIN = "graphc"
"""Domain of the ops that ONNX lacks; see :mod:`graphc.ir.ops`."""

DOMAIN_VERSION = 1

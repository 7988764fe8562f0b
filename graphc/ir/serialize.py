"""Models and nodes as protocol buffers, with graphc's own errors as they are."""

from __future__ import annotations

from typing import overload

import onnx
import onnx_ir as ir

from graphc.errors import GraphcError


@overload
def to_proto(thing: ir.Model) -> onnx.ModelProto: ...


@overload
def to_proto(thing: ir.Node) -> onnx.NodeProto: ...


def to_proto(thing: ir.Model | ir.Node) -> onnx.ModelProto | onnx.NodeProto:
    """``onnx_ir.to_proto``, which hides what the read of a tensor says inside an error of its own.

    Raises:
        GraphcError: a tensor cannot be read; its file has been overwritten, for example.
    """
    try:
        return ir.to_proto(thing)
    except ir.serde.SerdeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, GraphcError):
            cause = cause.__cause__
        raise cause or error from None

"""graphc: a dataflow-graph compiler that trains ONNX models, on one worker or many.

    program = graphc.compile("model.onnx", loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.Adam(lr=1e-3))
    with graphc.Trainer(program) as trainer:
        trainer.fit(batches, epochs=3)
        trainer.export("trained.onnx")

Names are loaded on first use, so that ``import graphc`` (and the command line) starts fast.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# onnxruntime's wheels report usage unless this is set before they are imported; a setting of the user's stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_EXPORTS = {
    "compile": "graphc.compiler",
    "grad": "graphc.compiler",
    "Program": "graphc.compiler",
    "Trainer": "graphc.training.trainer",
    "Mesh": "graphc.mesh",
    "GraphcError": "graphc.errors",
    "Role": "graphc.ir.declare",
    "custom_op": "graphc.custom",
    "custom_primitive": "graphc.custom",
}
_MODULES = ("losses", "optim", "data", "errors")

__all__ = [
    "GraphcError",
    "Mesh",
    "Program",
    "Role",
    "Trainer",
    "__version__",
    "compile",
    "custom_op",
    "custom_primitive",
    "data",
    "errors",
    "grad",
    "losses",
    "optim",
]

if TYPE_CHECKING:
    from graphc import data, errors, losses, optim
    from graphc.compiler import Program, compile, grad
    from graphc.custom import custom_op, custom_primitive
    from graphc.errors import GraphcError
    from graphc.ir.declare import Role
    from graphc.mesh import Mesh
    from graphc.training.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name in _EXPORTS or name in _MODULES:
        from graphc.ir.lazy_sympy import import_onnx_ir

        import_onnx_ir()
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"graphc.{name}")
    raise AttributeError(f"module 'graphc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

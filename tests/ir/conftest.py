"""Training graphs for the tests of the IR."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir
import pytest

from graphc.pipeline import Context, run

LIGHT = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "light")
PIPELINE = (
    "legalize,train_mode,loss{kind=softmax_cross_entropy},autodiff,optimizer{name=adam},allreduce,bucket,schedule,simplify"
)


@pytest.fixture(scope="session")
def squeezenet_training() -> ir.Model:
    """SqueezeNet as a scheduled Adam training graph; do not change it."""
    model = ir.load(os.path.join(LIGHT, "light_squeezenet.onnx"))
    run(model, PIPELINE, Context())
    return model

"""What a backend did not foresee when it prepares a step names the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc.backends.numpy import NumpyBackend
from graphc.errors import InternalError
from graphc.ir.facts import dims, dtype_of
from tests.cli.models import MLP, parse


class Faulty(NumpyBackend):
    """A backend of a plugin, with a bug."""

    def bind_segment(self, model: onnx.ModelProto, *arguments: Any, **keywords: Any) -> Any:
        raise ValueError("no such\nprimitive")


def test_a_bug_of_a_backend_names_the_nodes(register_backend: Callable[..., None]) -> None:
    register_backend("faulty", Faulty)
    program = graphc.compile(
        parse(MLP), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), backend="faulty"
    )
    feeds = {v.name or "": np.zeros([4, *(dims(v) or ())[1:]], dtype_of(v).numpy()) for v in program.model.graph.inputs}
    with (
        graphc.Trainer(program) as trainer,
        pytest.raises(InternalError, match=r"backend cannot prepare .* = .*: ValueError: no such primitive; report it"),
    ):
        trainer.step(feeds)

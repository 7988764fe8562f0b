"""Label sequences without places in time on the GPU, where standard ops and loops compute the loss: beside the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphc
from tests.training.sequence_labels import Speech, data

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("time_first", [True, False])
def test_steps_are_those_of_the_cpu(time_first: bool) -> None:
    torch.manual_seed(4)
    module = Speech(time_first, "scores")

    def losses(backend: str) -> list[float]:
        program = graphc.compile(
            module,
            example_inputs=(torch.zeros(5, 17, 6),),
            loss=graphc.losses.CTC(lengths="frames"),
            optimizer=graphc.optim.SGD(lr=0.1),
            backend=backend,
        )
        with graphc.Trainer(program) as trainer:
            return [trainer.step(data())["loss"] for _ in range(3)]

    np.testing.assert_allclose(losses("cupy"), losses("auto"), rtol=2e-5)

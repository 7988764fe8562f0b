"""A small recogniser and its data: sound, and label sequences whose places in time are not known."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LABELS = [[3, 3, 3, 1, 2, 6], [5, 1], [], [1, 2, 1, 2], [4, 5, 6, 6, 1]]
FRAMES = torch.tensor([17, 9, 12, 17, 16])


class Speech(torch.nn.Module):  # type: ignore[misc, name-defined]
    """What a recogniser ends in: scores, log-probabilities or probabilities, with the time first or second."""

    def __init__(self, time_first: bool, end: str) -> None:
        super().__init__()
        self.time_first, self.end = time_first, end
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 7))

    def forward(self, sound: Any) -> Any:
        y = self.layers(sound)
        y = {"scores": lambda v: v, "log": lambda v: v.log_softmax(2), "softmax": lambda v: v.softmax(2)}[self.end](y)
        return y.transpose(0, 1) if self.time_first else y


def padded(end: int = -100) -> np.ndarray[Any, Any]:
    table = np.full((len(LABELS), 6), end)
    for row, labels in zip(table, LABELS, strict=True):
        row[: len(labels)] = labels
    return table


def data() -> dict[str, np.ndarray[Any, Any]]:
    sound = np.random.default_rng(2).standard_normal((5, 17, 6)).astype(np.float32)
    return {"sound": sound, "label": padded(), "frames": FRAMES.numpy()}

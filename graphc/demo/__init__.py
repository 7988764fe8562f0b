"""Model and data of ``graphc demo``: a small CNN and scikit-learn's handwritten digits.

``scripts/make_demo_model.py`` exported ``digits_cnn.onnx`` from PyTorch, with initial weights and a dynamic batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphc.device import Array
from graphc.errors import MissingExtraError

MODEL = Path(__file__).parent / "digits_cnn.onnx"
TEST_SHARE = 5  # every fifth sample is a test sample


@dataclass(frozen=True)
class Digits:
    """The data by the names of the model's input and of the label.

    Attributes:
        train, test: ``image`` float32 [N, 1, 8, 8] in 0 … 1 and ``label`` int64 [N] in 0 … 9.
    """

    train: dict[str, Array]
    test: dict[str, Array]


def load_digits(seed: int = 0) -> Digits:
    """Load the 1797 digits, split 4 to 1 with a fixed seed.

    Raises:
        MissingExtraError: scikit-learn, which ships the images, is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise MissingExtraError(
            "the demo trains on images that scikit-learn ships, and it is not installed; run: pip install 'graphc[demo]'"
        ) from None
    bunch = load()
    images = (np.asarray(bunch.images, dtype=np.float32) / 16.0)[:, None]
    labels = np.asarray(bunch.target, dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[: len(order) // TEST_SHARE], order[len(order) // TEST_SHARE :]
    return Digits({"image": images[train], "label": labels[train]}, {"image": images[test], "label": labels[test]})

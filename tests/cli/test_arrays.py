"""Arrays from files become what the model wants, where that loses nothing but digits."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from graphc.cli.training.arrays import convert, read_arrays
from graphc.errors import FeedError


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_wider_numbers_lose_digits_alone(dtype: type) -> None:
    notes: list[str] = []
    found = convert(np.array([1.5, -2.0]), np.dtype(dtype), "x", "d.npz", notes.append)
    assert found.dtype == dtype
    assert found.tolist() == [1.5, -2.0]
    assert "converted" in notes[0]
    with pytest.raises(FeedError, match="too large"):
        convert(np.array([1e300]), np.dtype(dtype), "x", "d.npz", notes.append)


def test_bfloat16_comes_back_from_a_file(tmp_path: Path) -> None:
    """numpy's files keep its bytes and forget its name."""
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    np.savez(tmp_path / "d.npz", x=values)
    found = convert(read_arrays(str(tmp_path / "d.npz"))["x"], values.dtype, "x", "d.npz", lambda line: None)
    assert found.dtype == values.dtype
    assert found.tolist() == [1.5, -2.0]


def test_integers_are_no_numbers_of_the_model() -> None:
    with pytest.raises(FeedError, match="convert it with"):
        convert(np.array([1]), np.dtype(np.float32), "x", "d.npz", lambda line: None)

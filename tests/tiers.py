"""The tiers of parametrized tests: cases as parameters that bear the marks of the tiers they belong to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def params(cases: Iterable[Any], *, full: Collection[Any] = (), large: Collection[Any] = ()) -> list[Any]:
    """One parameter for each case; a tuple is a case of several arguments. Those in ``full`` and ``large`` are marked so."""
    tiers = ((full, pytest.mark.full), (large, pytest.mark.large))
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[mark for listed, mark in tiers if case in listed])
        for case in cases
    ]


def thinned(cases: Sequence[Any], every: int) -> list[Any]:
    """The cases whose siblings assert the same: one of ``every`` of them stays in `make test`, the others are large."""
    return params(cases, large=[case for k, case in enumerate(cases) if k % every])

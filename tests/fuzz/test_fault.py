"""Runs with a fault end in time, blame the right one and leave nothing behind; ``make fuzz FUZZ="--kind fault"`` tries more.

A fault is a whole run of several processes (4 to 15 s), so ``make test`` has only a few.
"""

from __future__ import annotations

import pytest

from tests.fuzz.fault import choose, run

pytestmark = [pytest.mark.mpi, pytest.mark.full]


@pytest.mark.parametrize("number", [1, 3, 5, 10])
def test_a_run_with_a_fault_ends_in_order(number: int) -> None:
    run(choose(number))

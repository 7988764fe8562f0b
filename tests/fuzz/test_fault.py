"""Runs with a fault end in time, blame the right one and leave nothing behind; ``make fuzz FUZZ="--kind fault"`` tries more.

A fault of a process is a whole run of several of them (4 to 15 s), so ``make test`` has only a few. Ranks that are threads fail
in a few milliseconds each: 300 of those stand beside them.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from graphc.distributed import threads
from graphc.distributed.threads import ThreadCommunicator, run_threads
from graphc.errors import WorldError
from tests.fuzz.fault import choose, run


@pytest.mark.mpi
@pytest.mark.full
@pytest.mark.parametrize("number", [1, 3, 5, 10])
def test_a_run_with_a_fault_ends_in_order(number: int) -> None:
    run(choose(number))


COLLECTIVES = {
    "allreduce": lambda comm: comm.allreduce(np.ones(5, np.float32), "sum", "gradient"),
    "broadcast": lambda comm: comm.broadcast(np.ones(5, np.float32), 0),
    "barrier": lambda comm: comm.barrier(),
}
FAULTS = ("raises", "leaves", "another collective")
COUNT = 300


def _attempt(number: int) -> str:
    """One run in which a rank does something else than the others; returns why its end is wrong, or nothing."""
    rng = random.Random(number)
    size, steps = rng.randint(2, 4), rng.randint(1, 6)
    plan = [rng.choice(sorted(COLLECTIVES)) for _ in range(steps)]
    culprit, moment, fault = rng.randrange(size), rng.randrange(steps), rng.choice(FAULTS)
    other = rng.choice([name for name in COLLECTIVES if name != plan[moment]])

    def work(comm: ThreadCommunicator) -> None:
        for k, name in enumerate(plan):
            if comm.rank == culprit and k == moment:
                if fault == "raises":
                    raise ArithmeticError(f"fault {number}")
                if fault == "leaves":
                    return
                name = other
            COLLECTIVES[name](comm)

    try:
        run_threads(size, work, deadline=20)
    except ArithmeticError as error:
        return "" if fault == "raises" and str(error) == f"fault {number}" else f"the cause is {error}"
    except WorldError as error:
        named = f"rank {culprit}" in str(error) and fault != "raises"
        return "" if named else f"rank {culprit} {fault}: {error}"
    return f"rank {culprit} {fault} and nobody noticed"


@pytest.mark.full
def test_ranks_that_are_threads_blame_the_one_at_fault() -> None:
    wrong = {number: why for number in range(COUNT) if (why := _attempt(number))}
    assert not wrong
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith(threads._THREADS)]
    assert not names, "a thread was left behind"

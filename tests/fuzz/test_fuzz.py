"""Every attempt of the fuzz campaign is a result or a clear error: no bare exception, no death, no hang."""

from __future__ import annotations

import os
import signal
import time

import pytest

from graphc.errors import GraphcError, InternalError
from tests.fuzz.child import attempt
from tests.fuzz.kinds import KINDS, prepare

COUNT = 300

pytestmark = pytest.mark.full


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_end_in_a_result_or_a_clear_error(kind: str) -> None:
    prepare()
    faults = []
    for number in range(COUNT):
        name, work = KINDS[kind](number)
        found = attempt(work)
        if not found.good:
            faults.append(f"{kind} {number} ({name}): {found.ending} {found.detail}")
        if kind == "model" and number % 50 == 0 and found.ending != "result":
            faults.append(f"the valid model {name} does not train: {found.detail}")
    assert not faults, "\n".join(faults)


def refuse() -> None:
    raise GraphcError("no")


def be_wrong() -> None:
    raise InternalError("a bug")


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def be_greedy() -> None:
    bytearray(1 << 40)


@pytest.mark.parametrize(
    ("work", "ending"),
    [
        (list, "result"),
        (refuse, "refused"),
        (be_wrong, "internal"),
        (be_greedy, "exception"),
        (die, "death"),
        (lambda: os._exit(3), "death"),
        (lambda: time.sleep(60), "hang"),
    ],
)
def test_the_campaign_sees_every_ending(work, ending: str) -> None:
    assert attempt(work, seconds=1).ending == ending

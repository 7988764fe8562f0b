"""Every attempt of the fuzz campaign is a result or a clear error: no bare exception, no death, no hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from graphc.errors import GraphcError, InternalError
from tests.fuzz import corpus
from tests.fuzz.child import attempt
from tests.fuzz.corpus import Finding
from tests.fuzz.kinds import KINDS, prepare
from tests.fuzz.past import PAST

COUNT = 15
"""Attempts of a kind; ``make fuzz`` has 1000."""

pytestmark = pytest.mark.full


def test_mutants_end_in_a_result_or_a_clear_error(tmp_path: Path) -> None:
    # In a process of its own: an attempt is a fork, which inherits locks that threads of earlier tests may hold.
    command = [sys.executable, "-m", "tests.fuzz", "--count", str(COUNT), "--keep", str(tmp_path)]
    command += [
        word for kind in KINDS if kind not in ("network", "fault") for word in ("--kind", kind)
    ]  # have tests of their own
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    worked = re.search(r"model: .*?(\d+) result", done.stdout)
    assert worked is not None, done.stdout
    assert int(worked[1]) > COUNT / 10, "a fifth of them is valid (docs/reliability.md); else all would only be refused"


@pytest.mark.parametrize("path", list(corpus.files()), ids=lambda path: path.stem)
def test_a_finding_of_an_earlier_campaign_does_not_come_back(path: Path) -> None:
    prepare()
    finding = corpus.read(path)
    found = attempt(finding.work)
    assert found.good, f"{finding.why}: {found}"


@pytest.mark.parametrize("finding", PAST.values(), ids=PAST)
def test_a_finding_of_the_first_attack_is_refused(finding: Finding) -> None:
    prepare()
    found = attempt(finding.work, megabytes=1024)
    assert found.ending == "refused", f"{finding.why}: {found}"


def test_a_finding_is_written_as_the_corpus_holds_it(tmp_path: Path) -> None:
    for finding in (PAST["M2 Split"], replace(PAST["M2 Split"], content=b"\x08\x08junk")):
        again = corpus.read(corpus.write(tmp_path, "one", finding))
        assert (again.why, again.how, again.content) == (finding.why, finding.how, finding.content)
        assert {name: a.shape for name, a in again.seed.feeds.items()} == {n: a.shape for n, a in finding.seed.feeds.items()}


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

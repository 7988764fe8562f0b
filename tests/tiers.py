"""The tiers of tests: cases as parameters that bear the marks of their tiers, and tests listed by the time they took."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
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


LISTED = Path(__file__).parent / "slow_tests.txt"
"""Lines ``TIER TEST``: tests that bear the mark of a tier for the time they took; `python -m tests.tiers` writes them."""

SHARE = 0.25
"""How much of the time of a test with many cases stays in `make test`."""

TOGETHER = 1.0
"""Seconds from which the cases of a test are divided so."""

QUICK = 0.25
"""Seconds from which a test is left out of `make quick`."""

DURATION = re.compile(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*)$", re.MULTILINE)
"""A line of `pytest --durations=0 -vv`."""


def listed() -> dict[str, str]:
    """The tier of each listed test."""
    lines = LISTED.read_text(encoding="utf-8").splitlines()
    return {test: tier for tier, _, test in (line.partition(" ") for line in lines if not line.startswith("#"))}


def divided(seconds: Mapping[str, float]) -> dict[str, str]:
    """The tier of each test that has one because of its time.

    Of a test with many cases, `make test` runs those that bring the most for their time: a value of a parameter that cases of
    its folder have brought before counts for less, so that each strategy, dtype and size stays somewhere.
    """
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for test in sorted(seconds):
        cases[test.partition("[")[0]].append(test)
    whole = {function: sum(seconds[case] for case in its) for function, its in cases.items()}
    brought: Counter[tuple[str, str]] = Counter()
    large = set()
    for function in sorted(cases, key=lambda function: (whole[function], function)):
        left, spent, first = cases[function], 0.0, True
        share = SHARE * whole[function] if whole[function] >= TOGETHER else whole[function]
        while left:
            case = min(left, key=lambda case: (seconds[case] * (1 + sum(brought[value] for value in values(case))), case))
            spent += seconds[case]
            if spent > share and not first:
                break
            left, first = [other for other in left if other != case], False
            brought.update(values(case))
        large.update(case for case in left if seconds[case] >= QUICK)
    tiers = dict.fromkeys(large, "large")
    tiers |= {test: "full" for test, took in seconds.items() if took >= QUICK and test not in large}
    return dict(sorted(tiers.items(), key=lambda entry: (entry[1] != "large", entry[0])))


def values(case: str) -> list[tuple[str, str]]:
    """The values of a case's parameters, each with the folder of its test."""
    test, _, parameters = case.partition("[")
    return [(test.partition("::")[0].rpartition("/")[0], value) for value in parameters.removesuffix("]").split("-") if value]


def main(log: str) -> None:
    """Lists the slow tests of a run's log, in which tests of MPI, and those that are large by themselves, have no place."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for took, test in DURATION.findall(Path(log).read_text(encoding="utf-8")):
        seconds[test] += float(took)
    lines = [f"{tier} {test}" for test, tier in divided(seconds).items()]
    LISTED.write_text("\n".join((HEAD, *lines)) + "\n", encoding="utf-8")


HEAD = """\
# Tests that only `make test-large` runs (large) or that `make quick` leaves out (full), by the time they took.
# Written by `python -m tests.tiers LOG` from the log of `pytest --unlisted -vv --durations=0 --durations-min=0.05 -m "not mpi
# and not large"`: without the marks of this list, so that no case is left out of the choice."""


if __name__ == "__main__":
    main(sys.argv[1])

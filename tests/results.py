"""``--results FILE``: what became of every test so far, as one JSON file that is written anew after each."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


class Results:
    """Counts of tests, those that failed with their last words, and why others were skipped.

    Attributes:
        running: the test that was begun last: where a run was cut short, the one that took too long.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = time.monotonic()
        self.passed = 0
        self.failed: dict[str, str] = {}
        self.skipped: Counter[str] = Counter()
        self.slowest: dict[str, float] = {}
        self.running = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = nodeid
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, _end(report))  # a process that ends with it reports it once more
        elif report.skipped:
            self.skipped[_reason(report)] += 1
        elif report.when == "call":
            self.passed += 1
        if report.when == "call":
            self.slowest[report.nodeid] = round(report.duration, 2)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = _end(report)

    def pytest_sessionfinish(self) -> None:
        self.running = ""
        self.write()

    def write(self) -> None:
        slowest = sorted(self.slowest.items(), key=lambda item: -item[1])[:10]
        found: dict[str, Any] = {
            "seconds": round(time.monotonic() - self.begin, 1),
            "passed": self.passed,
            "failed": self.failed,
            "skipped": dict(self.skipped),
            "slowest_s": dict(slowest),
            "running": self.running,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".tmp")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(self.path)


def _end(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr).strip()[-800:]


def _reason(report: pytest.TestReport) -> str:
    found = report.longrepr
    return found[2].removeprefix("Skipped: ") if isinstance(found, tuple) else str(found)

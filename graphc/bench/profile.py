"""Profiles a training step: one timer around every plan step."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable

from graphc.device import Run


class StepTimer:
    """Profiler: pass :meth:`wrap` to :class:`graphc.Trainer`; :meth:`report` prints the most expensive steps on stderr."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)

    def wrap(self, kind: str, name: str, run: Run) -> Run:
        """Time ``run`` under (kind, name)."""
        key, seconds, clock = (kind, name), self.seconds, self.clock

        def timed() -> None:
            start = clock()
            run()
            seconds[key] += clock() - start

        return timed

    def report(self, steps: int, most: int = 25) -> None:
        """Print milliseconds per step by kind, then the ``most`` expensive plan steps."""
        kinds: dict[str, float] = defaultdict(float)
        for (kind, _), spent in self.seconds.items():
            kinds[kind] += spent
        for kind, spent in sorted(kinds.items(), key=lambda item: -item[1]):
            print(f"{spent / steps * 1e3:9.3f} ms  {kind}", file=sys.stderr)
        for (kind, name), spent in sorted(self.seconds.items(), key=lambda item: -item[1])[:most]:
            print(f"    {spent / steps * 1e3:9.3f} ms  {kind:<8} {name}", file=sys.stderr)

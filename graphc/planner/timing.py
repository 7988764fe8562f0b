"""Where the planner has the times of plan steps from: measured now, or read from a file of this or another machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from graphc.backend import Backend
from graphc.errors import UsageError
from graphc.plan.steps import PlanStep
from graphc.planner.costs import Timing
from graphc.report.step_measure import profile_steps
from graphc.report.step_profile import COMPUTES, StepProfile, work_of


def profiled(path: str | Path | None, seconds: float, say: Callable[[str], None]) -> Timing:
    """Times from the profile ``path`` if there is such a file, else measured on this machine and written there.

    Args:
        path: None: nothing is written.
        seconds: limit of the measurements; what is left is modelled from what was measured.
        say: called with a line for people.
    """
    known = StepProfile.read(path) if path is not None and Path(path).exists() else None

    def timing(steps: Iterable[PlanStep], engine: Backend) -> StepProfile:
        if known is not None:
            if known.backend != engine.name:
                raise UsageError(
                    f"profile {path}: its times are those of the backend {known.backend!r}, and the plans are for"
                    f" {engine.name!r}; name another file, which will be written"
                )
            keys = {work_of(step).key for step in steps if step.kind in COMPUTES}
            missing = len(keys - set(known.steps))
            say(f"{len(keys) - missing} of {len(keys)} distinct steps have times in {path}, measured on {known.machine}")
            return known
        found = profile_steps(steps, engine, threads=1, seconds=seconds, say=say)
        if path is not None:
            found.write(path)
        return found

    return timing

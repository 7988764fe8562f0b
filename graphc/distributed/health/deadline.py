"""The deadline of collectives, in seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping

from graphc.errors import UsageError

DEADLINE = "GRAPHC_DEADLINE"
"""Environment variable: seconds after which a collective that has not ended ends the run."""


def find_deadline(environment: Mapping[str, str] | None = None) -> float:
    """Seconds a collective may take: ``GRAPHC_DEADLINE``, or 300.

    Raises:
        UsageError: the variable is not a positive number.
    """
    text = (os.environ if environment is None else environment).get(DEADLINE, "300")
    try:
        return check_deadline(float(text))
    except ValueError:
        raise UsageError(f"{DEADLINE} is {text!r}, not a positive number of seconds") from None


def check_deadline(seconds: float) -> float:
    """``seconds``, or UsageError unless it is a positive number."""
    if not seconds > 0:
        raise UsageError(f"the deadline of collectives must be a positive number of seconds, not {seconds:g}")
    return seconds

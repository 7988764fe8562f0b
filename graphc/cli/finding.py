"""What ``graphc doctor`` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``state`` is ``ok``, ``missing`` (of something optional), ``broken`` (of the core) or ``other`` (a version that graphc was
    not tried with).
    """

    what: str
    state: str
    detail: str

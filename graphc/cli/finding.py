"""What ``graphc doctor`` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``state`` is ``ok``, ``missing`` (of something optional) or ``broken`` (of the core)."""

    what: str
    state: str
    detail: str

"""Findings of ``graphc doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``state`` is ``ok``, ``missing`` (an optional part), ``broken`` (a required part) or ``other`` (an untested version).
    """

    what: str
    state: str
    detail: str

"""Rogue peers at the meeting of ranks: every attempt ends with the right result or a clear error."""

from __future__ import annotations

import hmac
from typing import Any

import pytest

from tests.fuzz.child import attempt
from tests.fuzz.network import KINDS, kind_of, meet

COUNT = 150
AT_ONCE = 15

pytestmark = pytest.mark.full


@pytest.mark.parametrize("kind", KINDS)
def test_rogue_peers(kind: str) -> None:
    numbers = [number for number in range(COUNT) if kind_of(number) == kind]
    faults = []
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        found = attempt(lambda some=some: meet(kind, some), seconds=40)  # type: ignore[misc]
        if not found.good:
            faults.append(f"{kind} {some}: {found.ending} {found.detail}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("kind", [pytest.param("strangers", marks=pytest.mark.large), "relay"])
def test_the_campaign_sees_a_store_that_checks_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(one: Any, other: Any) -> bool:
        return True

    monkeypatch.setattr(hmac, "compare_digest", believe)
    numbers = [number for number in range(200) if kind_of(number) == kind][:10]
    assert any(not attempt(lambda number=number: meet(kind, [number])).good for number in numbers)  # type: ignore[misc]

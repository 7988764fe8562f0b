"""``graphc bench --threads``: which numbers of threads it takes, and what the rows say."""

from __future__ import annotations

import pytest

from graphc.bench import run
from graphc.bench.run import run_scaling
from graphc.errors import UsageError


def test_efficiency_is_relative_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of 8 ms on one thread and 5 on two: 8 / (2 · 5); the fastest of three rounds counts."""
    times = {
        ("graphc", "1"): [9.0, 80.0, 8.0],
        ("graphc", "2"): [5.0, 6.0, 9.0],
        ("torch", "1"): [6.0] * 3,
        ("torch", "2"): [3.0] * 3,
    }
    monkeypatch.setattr(run, "available_cores", lambda: 2)
    monkeypatch.setattr(run, "_python", lambda *words: None)
    monkeypatch.setattr(
        run, "_measure", lambda side, model, *words: {"ms": times[side, words[words.index("--threads") + 1]].pop(0)}
    )
    rows = run_scaling(["mlp"], [1, 2], rounds=3, seconds=1.0, say=lambda text: None)
    assert [(row.threads, row.ours_ms, row.peer_ms) for row in rows] == [(1, 8.0, 6.0), (2, 5.0, 3.0)]
    assert [row.ours_efficiency for row in rows] == pytest.approx([1.0, 0.8])
    assert [row.peer_efficiency for row in rows] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("threads", "fault"), [([2], "needs 1"), ([0, 1], "at least 1"), ([1, 100_000], "usable cores")])
def test_numbers_that_measure_nothing_are_refused(threads: list[int], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        run_scaling(["mlp"], threads, rounds=1, seconds=0.1, say=lambda text: None)

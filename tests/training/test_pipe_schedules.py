"""Pipeline schedules against the formulas of their papers."""

from __future__ import annotations

import pytest

from graphc.errors import UsageError
from graphc.pipe.clock import grid, in_flight, play
from graphc.pipe.tables import Action, PipeSchedule


def cost(schedule: PipeSchedule, action: Action) -> float:
    """F takes one tick, and the backward pass two, in one piece or in two."""
    if action.kind == "U":
        return 0.0
    return (1.0 if action.kind == "F" else 2.0 if not schedule.splits_weights and action.kind == "B" else 1.0) / max(
        1, schedule.stages // 4 if schedule.stages else 1
    )


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_idle_shares_are_those_of_the_papers(ranks: int, count: int) -> None:
    wanted = {
        "gpipe": (ranks - 1) / (count + ranks - 1),
        "1f1b": (ranks - 1) / (count + ranks - 1),
        f"interleaved:stages={2 * ranks}": (ranks - 1) / 2 / (count + (ranks - 1) / 2),
        "zero-bubble": (ranks - 1) / (3 * count + ranks - 1),
    }
    idle = {}
    for text, theory in wanted.items():
        schedule = PipeSchedule.parse(text)
        idle[text] = play(schedule.table(ranks, count), lambda a, s=schedule: cost(s, a)).idle()
        assert idle[text] == pytest.approx(theory, rel=1e-9), text
    assert sorted(idle, key=idle.__getitem__)[0] == "zero-bubble"


def test_the_stash_is_bounded_as_the_schedules_promise() -> None:
    ranks, count = 4, 12

    def stash(text: str) -> list[int]:
        schedule = PipeSchedule.parse(text)
        table = schedule.table(ranks, count)
        return [in_flight(table[stage % ranks], stage) for stage in range(schedule.stages_on(ranks))]

    assert stash("gpipe") == [12, 12, 12, 12]
    assert stash("1f1b") == [4, 3, 2, 1]
    assert stash("zero-bubble") == [4, 4, 4, 4]


@pytest.mark.parametrize("text", ["gpipe", "1f1b", "interleaved", "interleaved:stages=8", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 4), (4, 8)])
def test_every_stage_takes_each_micro_batch_once_in_order(text: str, ranks: int, count: int) -> None:
    schedule = PipeSchedule.parse(text)
    table = schedule.table(ranks, count)
    play(table)  # comes to its end
    for stage in range(schedule.stages_on(ranks)):
        for kind in "FBW" if schedule.splits_weights else "FB":
            found = [a.micro for row in table for a in row if (a.stage, a.kind) == (stage, kind)]
            assert found == list(range(count))


def test_a_schedule_prints_as_a_grid() -> None:
    shown = grid(PipeSchedule.parse("1f1b").table(2, 3))
    assert shown.splitlines() == ["rank 0  0F0 0F1 ·   0B0 0F2 0B1 ·   0B2", "rank 1  ·   1F0 1B0 1F1 1B1 1F2 1B2 ·"]
    assert Action.parse("1F0") == Action("F", 1, 0)
    assert str(Action.parse("3U")) == "3U"


def test_wrong_schedules_say_what_is_right() -> None:
    with pytest.raises(UsageError, match="did you mean 'gpipe'"):
        PipeSchedule.parse("gpip")
    with pytest.raises(UsageError, match="multiple of 2"):
        PipeSchedule.parse("interleaved:stages=3").table(2, 4)
    with pytest.raises(UsageError, match="--accumulate 4"):
        PipeSchedule.parse("interleaved").table(4, 6)
    with pytest.raises(UsageError, match="0B0, 1F0, which wait for each other"):
        play([[Action.parse(t) for t in ("0B0", "0F0")], [Action.parse(t) for t in ("1F0", "1B0")]])

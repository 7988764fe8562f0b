"""Diagnoses which rank blocks a collective, from the flight logs of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphc.distributed.health.flight_recorder import SUBGROUPS, Entry, RankLog, counterpart, has_reached, last_of


def join_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def explain_timeout(
    wanted: Entry,
    seconds: float,
    logs: Mapping[int, Sequence[Entry]],
    pids: Mapping[int, int],
    states: Mapping[int, str],
    now: float,
    ranks: Sequence[int],
    group: str = "",
) -> str:
    """Say why the collective ``wanted`` has not ended within its deadline of ``seconds``.

    Args:
        logs: the entries of all ranks of this machine, the waiting one's included; those of other groups are left out.
        pids: process ids by rank, where ranks are processes.
        states: for ranks that do not run: why, ``is stopped (SIGSTOP)`` say.
        now: ``time.monotonic()``, as in the entries.
        ranks: those that take part; those without a log run on other machines.
        group: what they have in common; empty for all ranks.
    """
    logs = {rank: entries for rank, entries in logs.items() if rank in ranks}
    limit = f"within {seconds:g} s{f' ({group}: {join_ranks(ranks)})' if group else ''}"
    missing = [rank for rank, entries in logs.items() if not has_reached(entries, wanted)]
    elsewhere = [rank for rank in ranks if rank not in logs]
    if missing:
        each = [_last_seen(_name(rank, pids), logs[rank], wanted, states.get(rank), now) for rank in missing]
        text = f"{join_ranks(missing)} did not come to {wanted.what} {limit}: {'; '.join(each)}"
        return text + (f"; {join_ranks(elsewhere)} on other machines cannot be seen from here" if elsewhere else "")
    stuck = [rank for rank in logs if rank in states]
    if stuck:
        each = [f"{_name(rank, pids)} {states[rank]}" for rank in stuck]
        return f"{wanted.what} did not end {limit}: all ranks have come to it, but {'; '.join(each)}"
    if elsewhere:
        here = f"all ranks of this machine ({', '.join(map(str, logs))}) have come to it"
        there = f"{'one of ' if len(elsewhere) > 1 else ''}{join_ranks(elsewhere)} on other machines"
        return f"{wanted.what} did not end {limit}: {here}, so {there}, which cannot be seen from here, has not"
    return f"{wanted.what} did not end {limit}, although all ranks have come to it: the transport is stuck"


def waits_between_stages(logs: Mapping[int, Sequence[Entry]], gone: int) -> str:
    """Say which transfers of a pipeline the other ranks waited for when rank ``gone`` ended, and what it received last.

    A transfer's tag names stages and micro-batch. Empty where the run has no pipeline.
    """
    waits = [
        f"rank {rank} waited for {entry.what}"
        for rank, entries in logs.items()
        for entry in entries
        if rank != gone and entry.end is None and entry.kind == "recv"
    ]
    last = next((e for e in reversed(logs.get(gone, ())) if e.kind in ("recv", "send") and e.end is not None), None)
    if last is not None:
        waits.append(f"the last that rank {gone} ended is {last.what}")
    return "; ".join(waits)


def disagreement(logs: Mapping[int, Sequence[Entry]]) -> str:
    """Say where the collectives of the ranks differ first."""
    entries = next(iter(logs.values()))
    numbers = {entry.communicator for entry in entries}
    found = filter(None, (_first_difference(logs, number) for number in sorted(numbers)))
    return next((text for _, text in found), "the ranks disagree")


def _disagree(rank: int, entry: Entry, other_rank: int, other: Entry) -> str:
    pairs = sorted(((rank, entry), (other_rank, other)), key=lambda pair: pair[0])
    if not entry.differs_from(other):
        ranks = join_ranks([number for number, _ in pairs])
        return f"the ranks disagree: {ranks} did different collectives some time before {pairs[0][1].what}"
    first, second = (f"rank {number} is in {found.what}" for number, found in pairs)
    return f"the ranks disagree: {first} and {second}"


def _name(rank: int, pids: Mapping[int, int]) -> str:
    return f"rank {rank} (pid {pids[rank]})" if pids.get(rank) else f"rank {rank}"


def _last_seen(name: str, entries: Sequence[Entry], wanted: Entry, state: str | None, now: float) -> str:
    last = last_of(entries, wanted.communicator)
    process = f"{name} {state or 'is busy with something else'}"
    if last is None:
        return f"{process}; it has not come to any collective yet"
    if last.end is None:
        return f"{process}; it is in {last.what} since {now - last.start:.1f} s"
    return f"{process}; its last was {last.what}, which ended {now - last.end:.1f} s ago"


def compare(flights: Sequence[RankLog]) -> list[str]:
    """Compare the logs of several ranks: which are behind, and where their collectives differ; one line each."""
    lines = []
    logs = {flight.rank: flight.entries for flight in flights}
    for communicator in sorted({entry.communicator for entries in logs.values() for entry in entries}):
        lasts = {rank: last_of(entries, communicator) for rank, entries in logs.items()}
        if communicator >= SUBGROUPS:  # of a subgroup, the ranks that have come to a collective
            lasts = {rank: last for rank, last in lasts.items() if last is not None}
        difference = _first_difference(logs, communicator)
        if difference:
            lines.append(f"#{difference[0]}: {difference[1]}")
            continue
        front = max((entry for entry in lasts.values() if entry is not None), key=lambda entry: entry.sequence)
        behind = [rank for rank, last in lasts.items() if last is None or last.sequence < front.sequence]
        waiting = [
            rank for rank, last in lasts.items() if last is not None and last.sequence == front.sequence and not last.end
        ]
        for rank in behind:
            lines.append(_behind(rank, lasts[rank], front, waiting))
        if not behind and waiting and len(waiting) == len(lasts):
            lines.append(f"all ranks are in #{front.sequence} {front.what}; none has ended it")
        elif not behind and waiting:
            done = [rank for rank in lasts if rank not in waiting]
            lines.append(f"{join_ranks(waiting)} in #{front.sequence} {front.what}, which {join_ranks(done)} has ended")
    missing = sorted(set(range(max(flight.size for flight in flights))) - set(logs))
    if missing:
        lines.append(f"there is no log of {join_ranks(missing)}")
    return lines or ["all ranks ended the same collectives; none is behind"]


def _behind(rank: int, last: Entry | None, front: Entry, waiting: Sequence[int]) -> str:
    who = f"{join_ranks(waiting)} waited" if waiting else "the others were"
    goal = f"#{front.sequence} {front.what}, where {who}"
    if last is None:
        return f"rank {rank} is behind: it never came to a collective; the front is {goal}"
    state = "is in" if last.end is None else "has ended"
    behind = f"rank {rank} is behind by {front.sequence - last.sequence}: it {state} #{last.sequence} {last.what}"
    return f"{behind}; the front is {goal}"


def _first_difference(logs: Mapping[int, Sequence[Entry]], communicator: int) -> tuple[int, str] | None:
    """The sequence number of the first difference, and a text that describes it."""
    first, *others = logs
    for wanted in logs[first]:
        if wanted.communicator != communicator:
            continue
        for other in others:
            found = counterpart(logs[other], wanted)
            if found is not None and (wanted.differs_from(found) or wanted.diverged_from(found)):
                return wanted.sequence, _disagree(first, wanted, other, found)
    return None

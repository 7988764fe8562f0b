"""Prints the progress of a training run: JSON events, or a table of epochs and a progress bar."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from graphc.cli.terminal import output
from graphc.cli.terminal.output import Format
from graphc.errors import GraphcError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

JSON_LOG_EVERY = 10
"""Steps between ``step`` events without ``--log-every``; text output then has none."""


class Reporter:
    """Prints events on rank 0. A closed standard output does not end the run, whose results are files.

    Args:
        form: ``json``: one line per event; ``text``: for people.
        steps: total steps of the run.
        log_every: steps between ``step`` events; 0 takes the default of the form.
        columns: what an epoch reports besides its number and time: the same names from its first line to its last.
        done: steps that a resumed run has already done.
    """

    def __init__(self, form: Format, steps: int, log_every: int, columns: Sequence[str], *, done: int = 0) -> None:
        self._json = form is Format.json
        self._every = log_every or (JSON_LOG_EVERY if self._json else 0)
        self._main = output.is_main()
        self._stack = contextlib.ExitStack()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._names = list(columns)
        self._columns = ["epoch", *(["step"] if self._every else []), *columns, "seconds"]
        self._headed = False
        self._steps, self._done = steps, done
        self._unheard = False

    def __enter__(self) -> Self:
        if self._main and not self._json and output.is_terminal("stderr"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = self._stack.enter_context(
                Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("steps"),
                    TimeRemainingColumn(),
                    console=Console(file=sys.stderr, force_terminal=True),
                    transient=True,
                    redirect_stdout=output.is_terminal("stdout"),
                )
            )
            self._task = self._progress.add_task("training", total=self._steps, completed=self._done)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report that step ``step`` is finished."""
        if not self._main:
            return
        if self._progress is not None and self._task is not None:
            loss = metrics.get("loss")
            description = "training" if loss is None else f"loss {loss:.4f}"
            self._progress.update(self._task, completed=step, description=description)
        if self._every and step % self._every == 0:
            if self._json:
                self._event({"event": "step", "step": step, **metrics})
            else:
                self._row({"step": step, **metrics})

    def skipped(self, step: int, count: int) -> None:
        """Report that step ``step`` was skipped, the ``count``-th skipped step of the run."""
        if self._main and self._json:
            self._event({"event": "skipped", "step": step, "skipped": count})
        elif self._main:
            so_far = output.counted(count, "step")
            output.note(f"step {step} skipped: a NaN or infinity in loss or gradients ({so_far} so far)")

    def epoch(self, event: Mapping[str, Any], step: int) -> None:
        """Report the end of an epoch, after step ``step``."""
        if not self._main:
            return
        if self._json:
            self._event({**{name: event.get(name) for name in ("event", "epoch", *self._names)}, "seconds": event["seconds"]})
        else:
            self._row({**event, "step": step})

    def _row(self, event: Mapping[str, Any]) -> None:
        """Print a line of the table, which has one layout for steps and epochs; the first has a heading above it."""
        if not self._headed:
            self._headed = True
            self._say("  ".join(f"{name.replace('_', ' '):>{_width(name)}}" for name in self._columns))
        cells = (f"{_cell(name, event.get(name)):>{_width(name)}}" for name in self._columns)
        self._say("  ".join(cells).rstrip())

    def end(self, event: Mapping[str, Any]) -> None:
        """Report the end of the run."""
        if not self._main:
            return
        if self._json:
            self._event(event)
            return
        servers = event.get("servers", 0)
        own, workers = event["steps_of_run"], output.counted(event["world_size"] - servers, "worker")
        steps = output.counted(own, "step") + ("" if own == event["steps"] else f" ({event['steps']:,} in all)")
        if servers:
            lost = f", worker {', '.join(map(str, event['lost']))} lost on the way" if event["lost"] else ""
            self._say(f"{steps} on {workers} and {output.counted(servers, 'server')} in {event['seconds']:.1f} s{lost}")
        else:
            reductions = output.counted(event["allreduces_per_step"], "AllReduce")
            self._say(f"{steps} on {workers} in {event['seconds']:.1f} s, {reductions} a step, equal state on all")
        self._say(f"state {event['state_sha256']}")
        if "trace" in event:
            self._say(event["communication"])
            self._say(f"wrote {event['trace']}")
        if "output" in event:
            self._say(f"wrote {event['output']}")

    def _event(self, event: Mapping[str, Any]) -> None:
        self._tell(functools.partial(output.event, event))

    def _say(self, text: str) -> None:
        self._tell(functools.partial(output.say, text))

    def _tell(self, write: Callable[[], None]) -> None:
        if self._unheard:
            return
        try:
            write()
        except (BrokenPipeError, GraphcError) as error:
            self._unheard = True
            output.drop_standard_output()
            output.note(f"{error if isinstance(error, GraphcError) else 'standard output is closed'}; the training goes on")


def _width(name: str) -> int:
    return max(len(name), 8)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ("epoch", "step", "skipped"):
        return str(value)
    if name == "seconds":
        return f"{value:.2f}"
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.5f}"

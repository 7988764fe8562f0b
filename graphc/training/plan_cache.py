"""Caches a program's plans: one per set of feed shapes, bound to a worker's state."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.backend import DETERMINISTIC, Backend, host_backend
from graphc.compiler import Program, collection_paused
from graphc.device import Array, Run
from graphc.distributed.collective_proof import prove_collectives
from graphc.distributed.groups import Groups
from graphc.errors import DataDependentShapeError, DeviceMemoryError, WorldError
from graphc.ir.ops.losses import label_checks, symbolic_classes
from graphc.plan.found_sizes import split_at_found_sizes
from graphc.plan.group_places import CollectiveEvent, collective_events
from graphc.plan.partition import Plan, make_plan
from graphc.runtime.buffers import Arenas
from graphc.runtime.executor import Executor
from graphc.runtime.state import State
from graphc.training.feeds import check_arrays, check_feed_names, check_sample_labels, key_of_shapes
from graphc.training.found_sizes import SizeFinder

Wrap = Callable[[str, str, Run], Run]

MOST = 256
"""Plans of a graph that are kept; where feeds have more shapes, that which was used least recently makes room.

Beside the memory that plans share, one holds 3 MB (a layer of a transformer) to 9 MB (twelve); 1 to 2 MB of that, the machine
code of kernels among it, stay for the process.
"""


FEW = 1
"""Plans of a graph whose kernels are made for one shape each; those of later ones serve for other shapes too."""


class PlanCache:
    """Plans, binds and caches a program's training and evaluation graphs on one worker.

    Args:
        program: the graphs.
        backend: the worker's.
        groups: the communicators of the mesh.
        threads: threads of the host backend, where a device needs one beside it.
        check: whether gradients and loss are tested for NaN and infinity before the updates.
        batched: the feeds whose first axis is the batch.

    Attributes:
        state: the state that all plans share.
        wrap: hook around every plan step, for plans bound from now on; see :class:`Executor`.
        training, evaluation: the bound plans, by the shapes of their feeds.

    Raises:
        DeviceMemoryError: the state does not fit on the device.
    """

    finds_sizes = True
    """Whether sizes that depend on the contents of feeds are found before a step."""

    def __init__(
        self,
        program: Program,
        backend: Backend,
        groups: Groups,
        *,
        threads: int,
        check: bool,
        batched: Sequence[str],
    ) -> None:
        self.wrap: Wrap | None = None
        self.training: dict[tuple[Any, ...], Executor] = {}  # that used last is the last
        self.evaluation: dict[tuple[Any, ...], Executor] = {}
        self._arenas = Arenas(backend.memory)
        self._program, self._backend, self._comm = program, backend, groups.world
        self._groups = groups
        self._threads, self.check, self._batched = threads, check, batched
        self._host: Backend | None = None
        self._same = DETERMINISTIC in program.model.metadata_props
        self._finders: dict[bool, SizeFinder | None] = {}
        self._found: dict[str, Array] = {}
        self._labels, self._classes = label_checks(program.model.graph), symbolic_classes(program.model.graph)
        self._collectives: list[str] | None = None
        self._available = backend.memory.available() or 0
        self.state = self._make_state()
        self._left = backend.memory.available() or 0

    def for_training(self, feeds: Mapping[str, Array]) -> Executor:
        """Return the training graph's plan for the shapes of ``feeds``.

        Raises:
            FeedError: names or shapes do not match the graph.
            DeviceMemoryError: the plan does not fit on the device; nothing has run.
            WorldError: the ranks' collectives differ, or depend on the batch.
        """
        return self._executor(feeds, self._program.model, self.training)

    def for_evaluation(self, feeds: Mapping[str, Array]) -> Executor:
        """Return the evaluation graph's plan for the shapes of ``feeds``; raises as :meth:`for_training` does."""
        return self._executor(feeds, self._program.inference, self.evaluation)

    def _executor(self, feeds: Mapping[str, Array], model: ir.Model, plans: dict[tuple[Any, ...], Executor]) -> Executor:
        finder = self._finder(model)
        self._found = found = (finder.find(feeds) if finder is not None else None) or {}
        key = finder.key(feeds, found) if finder is not None and found else key_of_shapes(feeds)
        executor, trains = plans.pop(key, None), plans is self.training
        if executor is None:
            if len(plans) >= MOST:
                self._backend.memory.synchronize()  # a device may still work in its memory
                del plans[next(iter(plans))]
            try:
                if finder is not None and found:
                    part, fed = finder.bound(found)
                    executor = self._bound({**feeds, **fed}, part, trains=trains)
                else:
                    executor = self._bound(feeds, model, trains=trains)
            except DataDependentShapeError:
                if finder is None or finder.always:
                    raise
                finder.always = True  # nothing can run these shapes unplanned
                return self._executor(feeds, model, plans)
        plans[key] = executor
        return executor

    def _bound(self, feeds: Mapping[str, Array], model: ir.Model, *, trains: bool) -> Executor:
        """A new plan; if it does not fit beside those for other shapes, they make room."""
        try:
            return self._bind(feeds, model, trains=trains)
        except DeviceMemoryError as error:
            if not self.training and not self.evaluation:
                raise
            _release(error)
        self._backend.memory.synchronize()
        self.training.clear()
        self.evaluation.clear()
        self._arenas.forget()
        gc.collect()
        return self._bind(feeds, model, trains=trains)

    def _finder(self, model: ir.Model) -> SizeFinder | None:
        """What finds the sizes of a graph whose shapes depend on the contents of feeds; None: they do not."""
        which = model is self._program.model
        if which not in self._finders:
            parts = split_at_found_sizes(model) if self.finds_sizes else None
            host = self._backend if self._backend.memory.on_host or parts is None else self.on_host()
            always = self._same or not self._backend.unknown_sizes
            finder = SizeFinder(parts, host, self._backend.memory, always=always) if parts is not None else None
            self._finders[which] = finder
        return self._finders[which]

    def checked(self, executor: Executor, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Convert the feeds for which ``executor`` was looked up, and check the labels; FeedError if that fails."""
        if self._found:
            feeds = {**feeds, **{name: array for name, array in self._found.items() if name in executor.inputs}}
        arrays = check_arrays(feeds, executor.inputs, self._labels, self._backend.memory, executor.index_ranges)
        if self._classes:
            check_sample_labels(arrays, self._program.model.graph, self._classes)
        return arrays

    def on_host(self) -> Backend:
        """The host backend beside a device backend; created on first use."""
        if self._host is None:
            self._host = host_backend(threads=self._threads, spin=False)
        return self._host

    def close(self) -> None:
        """Release the host backend."""
        if self._host is not None:
            self._host.close()

    def _make_state(self) -> State:
        try:
            groups = self._groups
            place = groups.mesh.coordinate("data", groups.world.rank)
            return State(self._program.model, place, groups.mesh.data, self._backend.memory, groups)
        except DeviceMemoryError as error:
            from graphc.report.memory_advice import explain_state

            raise explain_state(self._program, self._available, self._backend.name) from error

    @collection_paused()
    def _bind(self, feeds: Mapping[str, Array], model: ir.Model, *, trains: bool) -> Executor:
        shapes, rank, size = check_feed_names(feeds, model.graph), self._comm.rank, self._comm.size
        guarded = self.check and not self._backend.memory.on_host
        plan = make_plan(model, shapes, self._backend, world_size=size, rank=rank, guarded=guarded, mesh=self._groups.mesh)
        if trains:
            self._compare_collectives(plan)
        comm, groups = (self._comm, self._groups) if size > 1 else (None, None)
        taken = self._left - (self._backend.memory.available() or 0)  # by other plans, and what their kernels loaded
        host = self.on_host() if self.state.offloaded else None  # runs updates whose state lies there
        try:
            return Executor(
                plan,
                self.state,
                self._backend,
                comm,
                groups=groups,
                host=host,
                check=self.check,
                wrap=self.wrap,
                arenas=self._arenas,
                varying=len(self.training if trains else self.evaluation) >= FEW,
            )
        except DeviceMemoryError as error:
            from graphc.report.memory_advice import Case, explain

            _release(error)
            case = Case(model, shapes, self._batched, plan.mesh, rank, self._available - max(0, taken), self._program)
            raise explain(case, plan, self._backend.name, error) from error

    def _events(self, plan: Plan) -> list[CollectiveEvent]:
        """The collectives of a step."""
        return collective_events(plan.steps)

    def _compare_collectives(self, plan: Plan) -> None:
        if self._collectives is None:
            self._groups.open_channels(prove_collectives(self._comm, plan.mesh, self._events(plan)))
            self._collectives = plan.collectives
        elif self._collectives != plan.collectives:
            raise WorldError("the collectives of a step depend on the batch size, which other workers cannot know")


def _release(error: BaseException | None) -> None:
    """Free the arrays of a plan that did not fit, which the frames of its error hold: a smaller batch may need their memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
    gc.collect()

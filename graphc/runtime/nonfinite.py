"""Checks loss and gradients before the updates: a step with a NaN or an infinity changes nothing.

On the host the check raises. On a device it sets the flag that skips the updates (:mod:`graphc.plan.skip_flag`), and the
executor clears it and raises when it has fetched the results; where the updates take no flag, the check waits for the device.
"""

from __future__ import annotations

import functools

import numpy as np

from graphc.backend import Backend
from graphc.device import Array, HostSync, Run, in_order
from graphc.distributed.communicator import Communicator
from graphc.ir.declare import Role, operand
from graphc.ir.facts import is_float
from graphc.ir.names import SKIPPED, kept_outputs
from graphc.ir.updates import role_of, state_of
from graphc.plan.segment_model import bind_op
from graphc.runtime.buffers import BufferMap

FINITE = "finite?"
"""Tag of the AllReduce by which ranks with sharded gradients agree whether all are finite."""


class NonFiniteStepError(ArithmeticError):
    """Raised by the check or after it; no update has changed anything."""


class Check:
    """The check of a plan.

    Args:
        comm: of the ranks among which gradients are sharded.
        together: of ranks that see different gradients in any case, as the stages of a pipeline.

    Attributes:
        scaled: the flag of a step that overflowed, the loss scale, and the least that this may become, where the graph has a
            loss scale and does not count skipped steps: an overflow that no smaller scale can cure stops the run then.
        counted: whether the graph skips and counts such steps itself, whatever they are.
    """

    def __init__(
        self, places: BufferMap, backend: Backend, comm: Communicator | None, together: Communicator | None = None
    ) -> None:
        self._places, self._backend, self._comm, self._together = places, backend, comm, together
        self.counted = SKIPPED in places.state.names
        self.scaled = None if self.counted else self._scaled()

    def bind(self) -> Run | None:
        """A closure that tests all gradients and reported scalars before the first update; None where that is not needed."""
        if self.counted or (self.scaled is not None and not self._places.memory.on_host):
            return None
        if self.scaled is not None:
            return self._bind_scaled(*self.scaled)
        plan = self._places.plan
        kept = kept_outputs(plan.model)  # an output may hold infinities on purpose, such as masked scores
        reported = [v for v in plan.model.graph.outputs if is_float(v) and v.name not in kept]
        watched = [self._places.array(v).reshape(-1) for v in reported]
        sources = [(group, k) for group in plan.groups if (k := group.source) is not None]
        gradients = [(group, k) for group, k in sources if group.buffer(k) not in self._places.state.flat]
        parts = [self._places.part(group, k) for group, k in gradients]
        watched += [part for part in parts if part.size and part.dtype.kind not in "iub"]  # counters are always finite
        apart = any(group.sharded for group, _ in gradients) or plan.mesh.tensor > 1
        comm = self._comm if apart else self._together
        if self._places.memory.on_host:
            return self._bind_on_host(watched, comm)
        return self._bind_on_device(watched, comm)

    def _bind_scaled(self, flag: Array, scale: Array, least: float) -> Run:
        def check_scale() -> None:
            if flag and scale <= least:
                raise NonFiniteStepError

        return check_scale

    def _bind_on_host(self, watched: list[Array], comm: Communicator | None) -> Run:
        if comm is None:

            def fail() -> None:
                raise NonFiniteStepError

            return self._backend.bind_check(watched, fail)
        flag = np.zeros(1, dtype=np.float32)
        search = self._backend.bind_check(watched, functools.partial(flag.fill, 1.0))

        def check_together() -> None:
            """Agree over ranks that see only their own parts: all stop when one of them meets a NaN."""
            flag[0] = 0.0
            search()
            comm.allreduce(flag, "max", FINITE)
            if flag[0]:
                raise NonFiniteStepError

        return check_together

    def _bind_on_device(self, watched: list[Array], comm: Communicator | None) -> Run:
        places, backend, flag = self._places, self._backend, self._places.stop
        runs = [
            bind_op(backend, "AnyNonFiniteOr", {}, [flag, *(array for array in watched if array.dtype == dtype)], [flag])
            for dtype in dict.fromkeys(array.dtype for array in watched)
        ]
        if comm is not None:
            number = places.new((1,), np.dtype(np.float32))
            runs.append(bind_op(backend, "Cast", {"to": 1}, [flag.reshape((1,))], [number], domain=""))
            handle = comm.prepare(number, "max", FINITE, overlap=False)
            meet = in_order([functools.partial(comm.begin, handle), functools.partial(comm.wait, handle)])
            runs.append(meet if handle.queued else HostSync(meet))
            runs.append(bind_op(backend, "Cast", {"to": 9}, [number], [flag.reshape((1,))], domain=""))
        if places.plan.stop is None:
            clear = places.memory.bind_fill(flag, 0)
            runs.append(HostSync(lambda: self._raise_if(flag, clear)))
        return in_order(runs)

    def _raise_if(self, flag: Array, clear: Run) -> None:
        if self._places.memory.fetch(flag):
            clear()
            raise NonFiniteStepError

    def _scaled(self) -> tuple[Array, Array, float] | None:
        for group in self._places.plan.groups:
            node = group.nodes[0]
            flag = operand(node, "skip") if role_of(node) is Role.SCALE else None
            if flag is not None:
                least = float(group.declaration.attribute_values(node)["minimum"])
                return self._places.array(flag), self._places.array(state_of(node)), least
        return None

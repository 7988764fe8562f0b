"""The backend protocol and the table of native kernels.

A backend compiles the compute segments of a :class:`~graphc.plan.partition.Plan`, runs its native kernels and owns no policy:
what is one segment, where buffers lie and when collectives start is decided by the plan.

Adding a kernel is one decorated function in one file of a backend:

    @kernel("onnxruntime", "graphc::MaxPoolGrad", dtypes=(ir.DataType.FLOAT,))
    def max_pool_grad(k: Binding) -> Callable[[], None]:
        dy, x = k.inputs                        # numpy arrays over planned buffers, fixed for the life of the plan
        (dx,) = k.outputs                       # written in full by every run
        pool = k.pool
        return pool.bind(_loop, (dy, x, dx), total=x.shape[0])

The function is called once per node when a plan is bound, does all look-ups and allocations there, and returns a closure
without arguments that is called once per step.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from graphc.device import ALIGNMENT, Array, Arrays, Memory, Run, in_order
from graphc.errors import MissingExtraError, UnsupportedOpError, UsageError, nearest
from graphc.gradient import key_of
from graphc.registry import Registry


class Pool(Protocol):
    """Threads for native kernels.

    Attributes:
        bf16_products: whether matrix products and convolutions may round their operands to bfloat16.
    """

    threads: int
    bf16_products: bool

    def bind(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        total: int,
        grain: int = 1,
        *,
        held: tuple[object, ...] = (),
    ) -> Run:
        """Bind ``function(*arguments, start, stop)`` over a fixed partition of ``range(total)``; the result runs it and waits.

        ``function`` must release the GIL (``numba.njit(nogil=True)``). ``arguments`` are arrays, whose addresses are taken now,
        and numbers. Ranges hold at least ``grain`` items; the same ``total`` is always cut the same way, so results do not
        depend on timing. ``held`` lives as long as the result.
        """

    def run(self, function: Callable[..., None], arguments: tuple[Any, ...], total: int, grain: int = 1) -> None:
        """Bind ``function`` and run it once."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a kernel gets when a plan is bound.

    Attributes:
        inputs: one array per node input, None where the input is left out.
        outputs: one array per node output.
        attributes: the node's attributes with defaults filled in.
        aliases: output index → input index whose memory the output shares (only pairs the kernel declared ``inplace``).
        rows: what the backend knows about the rows of output 0, if kernels like this one alone write it
            (:meth:`Backend.note_writers`); of the backend's own type.
    """

    node: ir.Node
    inputs: Sequence[Array | None]
    outputs: Sequence[Array]
    attributes: Mapping[str, Any]
    pool: Pool
    aliases: Mapping[int, int]
    rows: object = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A native kernel of one backend.

    Attributes:
        dtypes: element types for which the kernel may be chosen: of the first floating input, or, where no input is floating,
            of the first output.
        when: further condition on the node (its shapes are static when this is asked).
        inplace: output index → input index whose buffer the output may take over.
    """

    backend: str
    op: str
    bind: Callable[[Binding], Run]
    dtypes: tuple[ir.DataType, ...]
    when: Callable[[ir.Node], bool] | None
    inplace: Mapping[int, int]

    def accepts(self, node: ir.Node) -> bool:
        floats = (v.dtype for v in node.inputs if v is not None and v.dtype is not None and v.dtype.is_floating_point())
        if next(floats, node.outputs[0].dtype) not in self.dtypes:
            return False
        return self.when is None or self.when(node)


KERNELS: dict[tuple[str, str], Kernel] = {}


def kernel(
    backend: str,
    op: str,
    *,
    dtypes: tuple[ir.DataType, ...] = (ir.DataType.FLOAT,),
    when: Callable[[ir.Node], bool] | None = None,
    inplace: Mapping[int, int] | None = None,
) -> Callable[[Callable[[Binding], Run]], Callable[[Binding], Run]]:
    """Register a native kernel of ``backend`` for ``op`` (``"Gelu"`` or ``"graphc::ConvGradWeight"``)."""

    def register(function: Callable[[Binding], Run]) -> Callable[[Binding], Run]:
        KERNELS[backend, op] = Kernel(backend, op, function, dtypes, when, dict(inplace or {}))
        return function

    return register


def native_kernel(backend: str, node: ir.Node) -> Kernel | None:
    """The kernel of ``backend`` that takes this node, or None."""
    found = KERNELS.get((backend, key_of(node.domain, node.op_type)))
    return found if found is not None and found.accepts(node) else None


Whole = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Runs a model: from feeds by name to results by name."""


class Capabilities(Protocol):
    """The properties of a backend that a plan depends on; by default those of a runtime of standard ops in single precision."""

    alignment: int = ALIGNMENT
    """Alignment, in bytes, of values that one step hands to another."""

    rewrites: str = ""
    """Pipeline text of passes to run on the decomposed graph with static shapes; mostly empty."""

    state_rewrites: str = ""
    """Pipeline text of passes that change which state a training graph keeps (:mod:`graphc.plan.state_rewrites`); mostly
    empty.
    """

    faster_bfloat16: str = ""
    """The text that selects this backend with products in bfloat16, for a backend that otherwise emulates bfloat16 on a machine
    that multiplies it; mostly empty.
    """

    separate: int | None = None
    """Neighbouring nodes become segments of their own unless they share a value of at least this many bytes
    (:mod:`graphc.plan.apart`). None: neighbours always form one segment, which suits a runtime that takes long to start one.
    """

    unknown_sizes: bool = False
    """Whether a segment may hold nodes whose shapes depend on data, and ``graphc`` ops with them, which it decomposes then."""

    def prefers_native(self, node: ir.Node) -> bool:
        """Whether the node runs as a native kernel, in a step of its own, instead of inside a segment."""
        return False

    def holds(self, node: ir.Node) -> bool:
        """Whether a segment may hold this ``graphc`` op undecomposed."""
        return False

    def repeats(self, node: ir.Node) -> bool:
        """Whether a segment computes the node in less time than its result is written and read: a plan repeats it rather than
        store that (:mod:`graphc.plan.rematerialise`). A runtime that passes through memory for every op says no.
        """
        return False

    def computes_halves(self, node: ir.Node) -> bool:
        """Whether the backend computes the node in half precision; otherwise the plan computes it in float32."""
        return False

    def inplace(self, node: ir.Node) -> Mapping[int, int]:
        """Output index → index of the input in whose memory the native kernel of ``node`` may write that output.

        A plan uses it where no later step reads the input. The kernel finds the pairs that share memory in its
        :class:`Binding`.
        """
        return {}


class StandardCapabilities(Capabilities):
    """The defaults."""


STANDARD: Capabilities = StandardCapabilities()


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Nodes of a segment that run together.

    Attributes:
        runs: ``kernel`` for one generated kernel, or the name of a runtime.
        nodes: their names; a composite op that is taken apart may be in several parts.
    """

    runs: str
    nodes: tuple[str, ...]


class Backend(Capabilities, Protocol):
    """Compiles and runs compute segments.

    A segment is an ONNX model of standard ops, and of those ``graphc`` ops that the backend :meth:`holds`, with static shapes.
    Its inputs and outputs are bound to arrays of :attr:`memory` once; the returned closure runs it.
    """

    name: str
    memory: Memory

    def use_cores(self, cores: Sequence[int]) -> None:
        """Learn which cores are this worker's, before anything is bound; a backend may keep its threads on them."""
        return

    def prepare_segments(self, models: Sequence[onnx.ModelProto], *, varying: bool = False) -> None:
        """Begin to compile segments, each of which :meth:`bind_segment` binds later.

        Args:
            models: the segments of a plan.
            varying: whether there are plans of the same graph for other shapes, so that more may follow.
        """
        return

    def bind_segment(
        self, model: onnx.ModelProto, inputs: Arrays, outputs: Arrays, *, reusable_buffers: Sequence[Array] = ()
    ) -> Run:
        """Compile ``model`` with its inputs and outputs bound to ``inputs`` and ``outputs`` by name.

        Args:
            reusable_buffers: flat arrays of bytes. The segment may use the range of an output in one of them as scratch, from
                the start of a run until it writes that output.
        """

    def segment_parts(self, model: onnx.ModelProto) -> Sequence[SegmentPart]:
        """What runs the nodes of a segment, in order; empty where one runtime runs it whole."""
        return ()

    def bind_whole(self, model: onnx.ModelProto) -> Whole:
        """Return a function that runs ``model``, with memory that the backend allocates itself.

        For what no plan can hold: shapes that depend on data, sequences (lists of arrays), optionals (None when empty) and
        strings (arrays of ``object``).
        """

    def bind_kernel(
        self, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array], aliases: Mapping[int, int]
    ) -> Run:
        """Bind a native kernel.

        Raises:
            UnsupportedOpError: the backend has none for the node.
        """
        raise UnsupportedOpError(f"the {self.name} backend has no native kernel for {node.op_type}")

    def note_writers(self, alone: Sequence[Array], others: Sequence[Array]) -> None:
        """Learn who writes the memory that the plans for all shapes share, before a plan is bound.

        Args:
            alone: outputs of ``GatherGrad`` that nothing else in this plan writes: rows that a run left zero are still zero in
                the next one, unless another plan writes them.
            others: everything else that this plan writes there.
        """
        return

    def settle(self) -> None:
        """Allocate the memory and compile the kernels of everything bound: the plan is complete, and steps allocate nothing."""
        return

    def joins(self, run: Run) -> bool:
        """Whether a backend on the host runs this and neighbours of its kind faster as one (:meth:`record`)."""
        return False

    def record(self, runs: Sequence[Run]) -> Run:
        """Combine bound work that only queues, or that a backend on the host joins, into one closure.

        They run in order. None of ``runs`` reads a result on the host of a device, which may record what they queue and replay
        it in later calls.
        """
        return in_order(runs)

    def bind_check(self, arrays: Sequence[Array], fail: Run) -> Run:
        """A closure that calls ``fail``, which may raise, if one of the 1-D float arrays holds a NaN or an infinity.

        Runs between the backward pass and the updates.
        """
        fetch = self.memory.fetch

        def check() -> None:
            if not all(np.isfinite(fetch(array)).all() for array in arrays):
                fail()

        return check

    def remark(self) -> str:
        """What of this installation makes the backend start or run faster or slower, for ``graphc doctor``; empty: nothing."""
        return ""

    def close(self) -> None:
        """Release threads and sessions."""
        return


BACKENDS: Registry[Callable[..., Backend]] = Registry("backend", "graphc.backends", apart=True)
"""Name → factory ``(*, threads: int, spin: bool) -> Backend``."""


class PlannedMemory(Memory, Protocol):
    """A device that does not exist: it counts the memory that it is asked for.

    Attributes:
        allocated: bytes on the device.
        host: bytes of :meth:`pinned` memory.
        workspaces: the part of ``allocated`` that libraries ask for, by name.
        context: bytes that the driver, the libraries and their kernels take beside all this.
    """

    allocated: int
    host: int
    workspaces: Mapping[str, int]
    context: int


@dataclass(frozen=True, slots=True)
class Fallback:
    """A node in the middle of a device segment that runs on the host.

    Attributes:
        nbytes: bytes copied to the host and back in every run.
    """

    op: str
    node: str
    nbytes: int


class Planner(Backend, Protocol):
    """A backend that plans and binds without a device, to report memory."""

    memory: PlannedMemory

    def fallbacks(self, model: onnx.ModelProto) -> Sequence[Fallback]:
        """The nodes of a segment that would run on the host."""

    @property
    def scratch(self) -> int:
        """The part of ``allocated`` that holds values inside segments."""


PLANNERS: dict[str, Callable[..., Planner]] = {}
"""Name of a backend → its planning version; filled by the backends that need one."""


COVERAGE: dict[str, Callable[[str], str]] = {}
"""Name of a backend → (registry key of an op → how the backend runs it, in a word or two), for the list of ops."""


def host_backend(*, threads: int, spin: bool = False) -> Backend:
    """The backend that computes in the host's memory: onnxruntime, or numpy where it is not installed."""
    try:
        return BACKENDS["onnxruntime"](threads=threads, spin=spin)
    except MissingExtraError:
        return BACKENDS["numpy"](threads=threads, spin=spin)


DETERMINISTIC = "deterministic"
"""The option of backends that otherwise tune by measuring; the program sets it."""

_TRUTH = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


def make_backend(text: str, *, threads: int, spin: bool = True, deterministic: bool = False) -> Backend:
    """Make the backend of ``text``; ``auto`` takes onnxruntime on the CPU, or numpy where that is not installed, never a GPU.

    Args:
        deterministic: equal runs must have equal bits, even where that costs speed.

    Raises:
        UsageError: an unknown backend or option.
    """
    if text == "auto":
        return host_backend(threads=threads, spin=spin)
    factory, options = backend_of(text)
    if deterministic and DETERMINISTIC in _options(factory):
        options[DETERMINISTIC] = True
    return factory(threads=threads, spin=spin, **options)


def name_of(text: str) -> str:
    """The backend's name, without options."""
    return text.partition(":")[0]


def backend_of(text: str) -> tuple[Callable[..., Backend], dict[str, Any]]:
    """The factory of a backend, and the options in ``text``.

    Raises:
        UsageError: an unknown backend or option, or a value that is neither true nor false.
    """
    name, _, rest = text.partition(":")
    factory = BACKENDS[name]
    known = _options(factory)
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if key not in known:
            listed = f"its options are {', '.join(known)}" if known else "it has none"
            raise UsageError(f"backend {name!r} has no option {key!r}{nearest(key, known)}; {listed}")
        if equals and value not in _TRUTH:
            raise UsageError(f"backend {name!r}: {key}={value} is neither true nor false")
        found[key] = _TRUTH[value] if equals else True
    return factory, found


def check_backend(text: str) -> None:
    """Check name and options of a backend that may lack its packages here: another machine may train the program.

    Raises:
        UsageError: an unknown backend or option, or a value that is neither true nor false.
    """
    if text != "auto":
        with contextlib.suppress(MissingExtraError):
            backend_of(text)


def backend_options(name: str) -> list[str]:
    """The options of a backend, each true or false."""
    return _options(BACKENDS[name])


def _options(factory: Callable[..., Backend]) -> list[str]:
    parameters = inspect.signature(factory).parameters.values()
    return [p.name for p in parameters if isinstance(p.default, bool) and p.name != "spin"]

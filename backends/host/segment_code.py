"""A compiled segment as plain data: kernels, models of the nodes that are left, and the places of values.

    values:  x, y, t (in the scratch memory), u (t by another shape), c (a constant)
    parts:   kernel k1 (x, c → t)   model (u → y)

So a segment can be kept on disk (:mod:`graphc.backends.host.shared`), and binding it builds no graph.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (names of element types)
import numpy as np
import onnx

from graphc.backend import Pool, SegmentPart
from graphc.backends.host.compiler import Function, compiler
from graphc.device import Array, Arrays, Run, in_order
from graphc.plan.arena import Arena

GRAIN = 1 << 14
"""Elements worth handing to another thread."""

Rest = Callable[[onnx.ModelProto, Arrays, Arrays], Run]
"""Binds a model of the nodes that are left."""


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """A value.

    Attributes:
        name: of an input or output of the segment, and by which the models of :class:`RestPart` know the value.
        base: index of the value in whose memory it lies, its own but for views.
        constant: its bytes, in base 64.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    base: int
    constant: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class KernelPart:
    """A compiled kernel.

    Attributes:
        kernel, units, elements, sizes: see :class:`~graphc.backends.host.compiler.HostKernel`.
        reads, writes: indices of values.
        nodes: names of the nodes that it computes.
    """

    kernel: str
    units: int
    elements: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    nodes: tuple[str, ...]
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RestPart:
    """Neighbouring nodes that are left: ``model``, in base 64, in standard ops."""

    model: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    nodes: tuple[str, ...]


Part = KernelPart | RestPart


@dataclass(frozen=True, slots=True)
class SegmentCode:
    """The parts of a segment in order.

    Attributes:
        inputs, outputs: indices of the segment's own values.
        kernels: what loads those of the parts, by name; this process has compiled them or found them on disk.
    """

    places: Sequence[ValuePlace]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parts: Sequence[Part]
    kernels: Mapping[str, Callable[[], Function]]

    def described(self, names: Mapping[str, str]) -> Iterator[SegmentPart]:
        """The parts, each with the segment's nodes that it computes, or of whose composite ops it computes something.

        Args:
            names: name of a node of the segment → name to print.
        """
        for part in self.parts:
            found = dict.fromkeys(_origin(name, names)[1] for name in part.nodes)
            yield SegmentPart("kernel" if isinstance(part, KernelPart) else "onnxruntime", tuple(found))

    def bind(
        self,
        inputs: Arrays,
        outputs: Arrays,
        pool: Pool,
        rest: Rest,
        scratch: Callable[[int], Array],
        names: Mapping[str, str],
    ) -> Run:
        """Bind to arrays.

        Args:
            inputs, outputs: the arrays.
            pool: threads for kernels.
            rest: binds what is left.
            scratch: bytes → memory for the values between parts, used again as soon as nobody reads them.
            names: name of a node → its name in errors.
        """
        arrays = self._arrays(inputs, outputs, scratch)
        runs: list[Run] = []
        for part in self.parts:
            if isinstance(part, KernelPart):
                runs.append(_bound(self.kernels[part.kernel](), part, [arrays[k] for k in (*part.reads, *part.writes)], pool))
            else:
                made = onnx.ModelProto.FromString(base64.b64decode(part.model))
                for node in made.graph.node:
                    own, shown = _origin(node.name, names)
                    node.name = shown + node.name.removeprefix(own)
                of_reads, of_writes = ({self.places[k].name: arrays[k] for k in ends} for ends in (part.reads, part.writes))
                runs.append(rest(made, of_reads, of_writes))
        return in_order(runs) if len(runs) > 1 else runs[0]

    def _arrays(self, inputs: Arrays, outputs: Arrays, scratch: Callable[[int], Array]) -> list[Array]:
        """The arrays of all values; those between parts share one memory."""
        last: dict[int, int] = {}
        for number, part in enumerate(self.parts):
            for index in part.reads:
                last[self.places[index].base] = last[index] = number
        found = {index: inputs[self.places[index].name] for index in self.inputs if self.places[index].name in inputs}
        found |= {index: outputs[self.places[index].name] for index in self.outputs}
        arena, offsets = Arena(), dict[int, int]()
        for number, part in enumerate(self.parts):
            for index in part.writes:
                if index not in found:
                    offsets[index] = arena.take(self.places[index].nbytes, last.get(index, number))
            arena.free_after(number)
        memory = scratch(arena.size)
        for index, offset in offsets.items():
            place = self.places[index]
            found[index] = memory[offset : offset + place.nbytes].view(place.dtype).reshape(place.shape)
        for index, place in enumerate(self.places):
            if index not in found and place.constant is not None:
                found[index] = np.ndarray(place.shape, place.dtype, bytearray(base64.b64decode(place.constant)))
        return [found[k] if k in found else found[place.base].reshape(place.shape) for k, place in enumerate(self.places)]

    def to_bytes(self) -> bytes:
        """For :meth:`from_bytes`."""
        parts = [{"kind": type(part).__name__, **asdict(part)} for part in self.parts]
        places = [asdict(place) for place in self.places]
        return json.dumps({"places": places, "inputs": self.inputs, "outputs": self.outputs, "parts": parts}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> SegmentCode | None:
        """What :meth:`to_bytes` has written, if its kernels are on disk."""
        found = json.loads(text)
        places = [ValuePlace(**{**held, "shape": tuple(held["shape"])}) for held in found["places"]]
        parts: list[Part] = []
        kernels: dict[str, Callable[[], Function]] = {}
        for held in found["parts"]:
            kind = _PARTS[held.pop("kind")]
            part = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in held.items()})
            if isinstance(part, KernelPart):
                kernel = compiler().kept(part.kernel)
                if kernel is None:
                    return None
                kernels[part.kernel] = kernel
            parts.append(part)
        return cls(places, tuple(found["inputs"]), tuple(found["outputs"]), parts, kernels)


_PARTS: Mapping[str, Any] = {kind.__name__: kind for kind in (KernelPart, RestPart)}


def _origin(name: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The node among ``names`` that was taken apart into the node called ``name``, and what it is called there."""
    found = [n for n in names if name == n or name.startswith((f"{n}/", f"{n}."))]
    own = max(found, key=len, default=name)
    return own, names.get(own, own)


def _bound(kernel: Function, part: KernelPart, arrays: Sequence[Array], pool: Pool) -> Run:
    operands = [*arrays, np.array(part.sizes, dtype=np.int64)] if part.sizes is not None else arrays
    addresses = (ctypes.c_void_p * len(operands))(*[a.ctypes.data for a in operands])
    grain = max(1, GRAIN // max(1, part.elements))
    if part.units * part.elements < 2 * GRAIN:
        grain = part.units
    return pool.bind(kernel, (ctypes.addressof(addresses),), part.units, grain, held=(addresses, operands))

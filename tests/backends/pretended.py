"""Registers the backend ``pretended`` in a process: a GPU whose kernels run on the host."""

from __future__ import annotations

from graphc.backend import BACKENDS
from graphc.backends.cupy import CupyBackend
from tests.backends.host_kernels import HostDevice, cupy_on


def _make(*, threads: int = 1, spin: bool = False, tf32: bool = False) -> CupyBackend:
    return cupy_on(HostDevice())


BACKENDS.register("pretended", _make, origin=__name__)

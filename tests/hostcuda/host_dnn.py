"""Replaces cuDNN's convolutions and attention, once imported, by numpy in a host function of the stream."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from graphc.backends.cupy.libraries import cudnn_attention, cudnn_convolution
from graphc.backends.cupy.libraries.cudnn import WORKSPACE
from tests.backends.host_cudnn import compute, view


def _host(array: Any) -> Any:
    raw = (ctypes.c_char * array.nbytes).from_address(int(array.data.ptr))
    return np.frombuffer(raw, dtype=array.dtype).reshape(array.shape)


class OnStream:
    """Replaces :class:`graphc.backends.cupy.libraries.cudnn.Dnn` on an emulated stream."""

    def __init__(self, device: Any) -> None:
        self.device, self.deterministic = device, True
        self._workspace = device.empty(WORKSPACE)  # the library allocates it, used or not

    def bind(self, description: Any, arrays: Mapping[str, Any]) -> Callable[[], None]:
        held = dict(arrays)
        assert set(held) == set(description.tensors)
        results = [name for name in description.tensors if name not in description.operands]
        views = {name: view(_host(array), description.tensors[name]) for name, array in held.items()}

        def work(_: object) -> None:
            try:
                found = compute(description, {name: views[name].astype(np.float64) for name in description.operands})
                for name in results:
                    views[name][...] = found[name].astype(views[name].dtype)
            except BaseException:  # no Python exception may leave a function that the stream calls
                traceback.print_exc()

        stream = self.device.stream
        return lambda: stream.launch_host_func(work, held)


for module in (cudnn_attention, cudnn_convolution):
    module.Dnn = OnStream  # type: ignore[attr-defined,misc]

"""Evaluates cuDNN descriptions with numpy in float64, through their sizes and strides.

Nothing here looks at the node or its attributes, so a wrong stride, padding or flag shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from graphc.backends.cupy.libraries.cudnn import Description, Tensor
from graphc.backends.cupy.libraries.cudnn_attention import Attention
from graphc.backends.cupy.libraries.cudnn_convolution import Convolution
from tests.backends.strict import host_of


class HostDnn:
    """Replaces :class:`graphc.backends.cupy.libraries.cudnn.Dnn` on the host."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.calls: list[Description] = []
        self.deterministic = False

    def bind(self, description: Description, arrays: Mapping[str, Any]) -> Callable[[], None]:
        self.calls.append(description)
        results = [name for name in description.tensors if name not in description.operands]
        assert set(arrays) == set(description.tensors)
        views = {name: view(host_of(array), description.tensors[name]) for name, array in arrays.items()}

        def run() -> None:
            read = {name: views[name].astype(np.float64) for name in description.operands}
            found = compute(description, read)
            for name in results:
                views[name][...] = found[name].astype(views[name].dtype)

        return run


def view(array: Any, tensor: Tensor) -> Any:
    """The elements of ``array`` as the library reads them: from its beginning, by strides."""
    assert array.dtype == np.dtype(tensor.dtype.numpy())
    last = sum((n - 1) * s for n, s in zip(tensor.dims, tensor.strides, strict=True))
    assert last < array.size, "the library would read beyond the end"
    steps = [s * array.itemsize for s in tensor.strides]
    return np.lib.stride_tricks.as_strided(array.reshape(-1), tensor.dims, steps)


def compute(description: Description, read: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(description, Attention):
        return attend(description, read)
    assert isinstance(description, Convolution)
    return convolve(description, read)


def attend(a: Attention, read: Mapping[str, Any]) -> dict[str, Any]:
    """Attention that saves one number per row, from which the gradient recomputes the probabilities."""
    group = a.q.dims[1] // a.k.dims[1]
    q, k, v = read["q"], *(np.repeat(read[name], group, axis=1) for name in "kv")
    scores = a.scale * q @ k.swapaxes(2, 3)
    if a.mask is not None:
        scores = scores + read["mask"]
    if a.causal:
        scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    keep = read["keep"] if a.keep is not None else 1.0
    if not a.backward:
        top = scores.max(-1, keepdims=True)
        saved = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
        return {"y": (np.exp(scores - saved) * keep) @ v, "saved": saved}
    p, dy = np.exp(scores - read["saved"]), read["dy"]
    ds = p * (keep * (dy @ v.swapaxes(2, 3)) - (dy * read["y"]).sum(-1, keepdims=True)) * a.scale
    heads = (a.q.dims[0], a.k.dims[1], group, a.k.dims[2], -1)
    dk, dv = (x.reshape(heads).sum(2) for x in (ds.swapaxes(2, 3) @ q, (p * keep).swapaxes(2, 3) @ dy))
    return {"dq": ds @ k, "dk": dk, "dv": dv}


def convolve(c: Convolution, read: Mapping[str, Any]) -> dict[str, Any]:
    """The defining sum of a convolution over its taps, or its gradients."""
    space = c.y.dims[2:]
    padded = [n + b + e for n, b, e in zip(c.x.dims[2:], c.begin, c.end, strict=True)]
    axes = list(zip(padded, c.w.dims[2:], c.strides, c.dilations, strict=True))
    assert tuple((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in axes) == space, "cuDNN works out the size of y by itself"
    groups = c.x.dims[1] // c.w.dims[1]
    big = np.zeros((*c.x.dims[:2], *padded))
    inner = (..., *(slice(b, b + n) for b, n in zip(c.begin, c.x.dims[2:], strict=True)))
    if "x" in read:
        big[inner] = read["x"]
    w = read.get("w", np.zeros(c.w.dims))
    y = read.get("dy", np.zeros(c.y.dims))
    w, y = w.copy(), y.copy()
    for tap in np.ndindex(*c.w.dims[2:]):
        starts = [t * d for t, d in zip(tap, c.dilations, strict=True)]
        window = (..., *(slice(b, b + (o - 1) * s + 1, s) for b, o, s in zip(starts, space, c.strides, strict=True)))
        seen, at = big[window], (..., *tap)
        for g in range(groups):
            m = slice(g * c.w.dims[0] // groups, (g + 1) * c.w.dims[0] // groups)
            k = slice(g * c.w.dims[1], (g + 1) * c.w.dims[1])
            if c.kind == "Conv":
                y[:, m] += np.einsum("nc...,mc->nm...", seen[:, k], w[m][at])
            elif c.kind == "ConvGradInput":
                seen[:, k] += np.einsum("nm...,mc->nc...", y[:, m], w[m][at])
            else:
                flat = (part.reshape(*part.shape[:2], -1) for part in (seen[:, k], y[:, m]))
                w[m][at] += np.einsum("ncp,nmp->mc", *flat)
    if c.kind == "ConvGradInput":
        return {"dx": big[inner]}
    if c.kind == "ConvGradWeight":
        return {"dw": w}
    if c.bias:
        y = y + read["b"]
    return {"y": np.maximum(y, 0) if c.activation == "relu" else y}

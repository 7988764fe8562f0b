"""Gives a PyTorch module the values that training has found for its parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graphc.errors import MissingExtraError, ModelError, UsageError

if TYPE_CHECKING:
    import torch

    Array = np.ndarray[Any, Any]


def load(module: torch.nn.Module, values: Mapping[str, Array], trained: Collection[str]) -> None:
    """Copy ``values`` into the module's parameters and buffers of the same names, on their devices and in their dtypes.

    Args:
        values: name → array; names that the module does not have are passed over.
        trained: names that the module must have.

    Raises:
        MissingExtraError: PyTorch is not installed.
        UsageError: ``module`` is no PyTorch module.
        ModelError: the module lacks a trained parameter, or has it in another shape. It is left as it was.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("a torch.nn.Module needs PyTorch; install it with: pip install 'graphc[torch]'") from None
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"a torch.nn.Module is expected, not {type(module).__name__}")
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own |= module.named_buffers(remove_duplicate=False)
    pairs = []
    for name in values:
        if name not in own:
            if name in trained:
                raise ModelError(
                    f"the module has no parameter {name!r}, which was trained; give the module that was compiled, or one of the"
                    f" same class (the program was made from another one, or from a file whose exporter changed the names)"
                )
            continue
        target = torch.view_as_real(own[name]) if own[name].is_complex() else own[name]
        if tuple(target.shape) != values[name].shape:
            raise ModelError(f"{name!r} has shape {values[name].shape}, and in the module {tuple(target.shape)}")
        pairs.append((target, values[name]))
    with torch.no_grad():
        for target, array in pairs:
            # PyTorch does not know the NumPy types of bfloat16 and float8
            target.copy_(torch.tensor(array if array.dtype.kind in "biuf" else array.astype(np.float32)))

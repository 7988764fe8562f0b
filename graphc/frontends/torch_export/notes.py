"""What an export cannot keep of a module, and its warnings."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch


class Notes(NamedTuple):
    """What an exporter found out about a module.

    Attributes:
        asked: what the module's code found out about the batch, and which is not so for every batch.
        hooked: whether ``forward`` puts a hook on the gradient of a tensor.
        changed: names of the buffers that a step of PyTorch's changes, and one of graphc's does not.
        assigned: names of the parameters that train and that ``forward`` assigns to.
        padded: whether ``forward`` pads a packed sequence to its longest sample.
        checks: the places of the checks of data in the module's code, which a graph does not make.
        least: the size from which on the graph is known to hold, for axes of ``dynamic_axes``; 0: for any.
    """

    asked: str = ""
    hooked: bool = False
    changed: Sequence[str] = ()
    assigned: Sequence[str] = ()
    padded: bool = False
    checks: Sequence[str] = ()
    least: int = 0


def warn(module: torch.nn.Module, recorded: Collection[int | None], notes: Notes) -> None:
    """Warns of what trains differently than in PyTorch.

    Args:
        recorded: the rows for padding that the file tells.
        notes: of the exporter.
    """
    if notes.asked:
        warnings.warn(
            f"the batch's size decides what {type(module).__name__} computes; here {notes.asked} always", stacklevel=5
        )
    if notes.changed:
        names = ", ".join(map(repr, notes.changed))
        warnings.warn(f"PyTorch changes {names} with every step of training; here each stays as it is now", stacklevel=5)
    if notes.assigned:
        names = ", ".join(map(repr, notes.assigned))
        warnings.warn(
            f"forward assigns to {names}: it computes with what it assigns, but the optimizer goes on from what was there"
            " before, and in PyTorch from what was assigned",
            stacklevel=5,
        )
    if notes.padded:
        warnings.warn(
            "pad_packed_sequence gives all steps of the batch here, and in PyTorch those of its longest sample: mask the steps"
            " behind the lengths where they count, or give it total_length",
            stacklevel=5,
        )
    if notes.checks:
        warnings.warn(
            f"the checks of data at {', '.join(notes.checks)} are taken to hold: a graph raises no errors", stacklevel=5
        )
    if notes.least:
        warnings.warn(
            f"{type(module).__name__} was captured for sizes of {notes.least} and more along dynamic_axes: with shorter"
            " inputs some tensor inside it has a size of 1, which PyTorch may compute differently",
            stacklevel=5,
        )
    for hooked in _hooked(module, notes.hooked):
        warnings.warn(f"the hook on the gradient of {hooked} does not run in graphc", stacklevel=5)
    for name, part in module.named_modules():
        if getattr(part, "running_mean", None) is not None and getattr(part, "momentum", 0) is None:
            warnings.warn(f"ONNX has no average over all batches: {name!r} with momentum=None averages otherwise", stacklevel=5)
        row = part.padding_idx if isinstance(part, torch.nn.Embedding) else None
        if row is not None and row not in recorded and part.weight.requires_grad:
            warnings.warn(
                f"this file tells no padding_idx: row {row} of '{name}.weight' trains here, which it does not in PyTorch; the"
                " exporter of torch.export programs records it",
                stacklevel=5,
            )


def _hooked(module: torch.nn.Module, inside: bool) -> Iterator[str]:
    """What has a hook on its gradient."""
    if inside:
        yield "a tensor that forward computes"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"the parameter {name!r}"
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            yield f"the module {name!r}"

"""Finds the files of external data, checks them, and binds the tensors of a model to them.

Data may lie in the folder that the model was named in, in the folder of the file behind a linked model (model caches are
made of links into a folder of blobs), or in a folder that the person names. Links are followed within these folders only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from graphc.errors import ModelError, UsageError


@dataclass(frozen=True)
class Folders:
    """Where external data may lie, in the order in which it is searched.

    Attributes:
        own: folders that follow from the model's path; empty for a model without one.
        named: folders that the person named with ``--external-data``.
    """

    own: tuple[Path, ...] = ()
    named: tuple[Path, ...] = ()

    @classmethod
    def of(cls, path: Path, named: Sequence[str] | None) -> Folders:
        """The folders for a model at ``path``."""
        own = [Path(os.path.realpath(path.parent)), Path(os.path.realpath(path)).parent]
        return cls(tuple(dict.fromkeys(own)), named_folders(named))


def named_folders(named: Sequence[str] | None) -> tuple[Path, ...]:
    """Resolve the folders of ``--external-data``.

    Raises:
        UsageError: one of them is no folder.
    """
    for folder in (names := [named] if isinstance(named, str) else list(named or ())):
        if not folder or "\0" in folder or not os.path.isdir(folder):
            raise UsageError(f"--external-data {folder!r}: there is no such folder")
    return tuple(Path(os.path.realpath(folder)) for folder in names)


def bind_external(model: ir.Model, where: str, folders: Folders) -> None:
    """Check all external data of a model (allowed, present, long enough); it is memory-mapped when it is read.

    Raises:
        ModelError: with the tensor, the location and what to do.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _bound(value.const_value, where, folders)
    for nodes in (model.graph.all_nodes(), *(f.all_nodes() for f in model.functions.values())):
        for node in nodes:
            for name, attr in list(node.attributes.items()):
                if attr.type == ir.AttributeType.TENSOR and isinstance(attr.value, ir.ExternalTensor):
                    node.attributes[name] = ir.AttrTensor(name, _bound(attr.value, where, folders))


def _bound(tensor: ir.ExternalTensor, where: str, folders: Folders) -> ir.ExternalTensor:
    """The tensor, bound to the one file that was checked."""
    location = os.fspath(tensor.location)
    name = f"external data {_short(location)} of tensor {_short(tensor.name or '')}"
    if not location or "\0" in location:
        raise ModelError(f"{where}: {name} is no file name")
    if not folders.own and not folders.named:
        raise ModelError(
            f"{where}: {name} has no folder to be found in; load the model from its path, or name the folder with"
            " --external-data DIR (external_data=[…] in Python)"
        )
    target = _find(location, name, where, folders)
    _check_range(tensor, name, where, target.stat().st_size)
    return ir.ExternalTensor(  # without a base: the file has been checked here, by the rules of this module
        str(target), tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name or ""
    )


def _find(location: str, name: str, where: str, folders: Folders) -> Path:
    """The regular file that ``location`` stands for, in the first folder that has it."""
    leaves = os.path.isabs(location) or Path(os.path.normpath(location)).parts[:1] == ("..",)
    found = None
    try:
        for base in (*folders.own, *folders.named):
            if os.path.lexists(base / location):
                found = Path(os.path.realpath(base / location))
                break
    except (OSError, ValueError):  # a name that is too long
        pass
    trusted = found is not None and _inside(found, folders.named)
    if (leaves and not trusted) or (found is not None and not trusted and not _inside(found, folders.own)):
        own = folders.own[0] if folders.own else "the model"
        raise ModelError(
            f"{where}: {name} lies outside the folder of the model, {own}, which is refused; copy it there, or, if you trust"
            " the model, name the folder with --external-data DIR (external_data=[…] in Python)"
        )
    if found is None or not os.path.exists(found):
        searched = ", ".join(map(str, (*folders.own, *folders.named)))
        raise ModelError(f"{where}: {name} is missing; put the file beside the model (searched: {searched})")
    if not found.is_file():
        raise ModelError(f"{where}: {name} is not a regular file")
    if found.stat().st_nlink > 1 and not trusted:
        raise ModelError(
            f"{where}: {name} is a file with several hard links, which is refused; make it a plain copy, or, if you trust the"
            f" model, name its folder: --external-data {found.parent} (external_data=[…] in Python)"
        )
    return found


def _inside(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _check_range(tensor: ir.ExternalTensor, name: str, where: str, held: int) -> None:
    offset, length = tensor.offset or 0, tensor.length
    if offset < 0 or (length is not None and length < tensor.nbytes):
        raise ModelError(
            f"{where}: {name} is declared with offset {offset} and {length} bytes; its shape needs {tensor.nbytes}"
        )
    if offset + tensor.nbytes > held:
        raise ModelError(
            f"{where}: {name} is too short: {offset + tensor.nbytes} bytes are needed, the file has {held}; copy it again"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}…")

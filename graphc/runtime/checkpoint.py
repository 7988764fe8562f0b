"""Checkpoints: every state array by its name in the graph, in one file.

``DIRECTORY/state.safetensors`` in the safetensors format (https://github.com/huggingface/safetensors: 8 bytes of header length,
a JSON header, the raw little-endian arrays), so other tools read it too. The file replaces the last one in a single rename:
there is always one whole checkpoint, and the one before it stays as ``previous.safetensors``. A digest over the whole file,
metadata included, guards it. Nothing in it depends on the number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import warnings
from collections.abc import Collection, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from graphc.atomic_files import open_regular, replace_regular, whole_file
from graphc.errors import GraphcError, UsageError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

FILE_NAME = "state.safetensors"
PREVIOUS = "previous.safetensors"
_LINK = f".{PREVIOUS}.tmp"
FORMAT = "2"
_NO_DIGEST = "0" * 64  # stands in the place of the digest while it is computed
_LARGEST_HEADER = 100_000_000  # the limit, in bytes, of the format's own readers

_CODES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}


class CheckpointError(GraphcError):
    """A checkpoint is missing, truncated or damaged."""


def state_sha256(state: Mapping[str, Array]) -> str:
    """SHA-256 in hexadecimal over the sorted names, each with dtype, shape and bytes: equal exactly for equal states."""
    digest = hashlib.sha256()
    for name in sorted(state):
        array = np.ascontiguousarray(state[name]).reshape(np.shape(state[name]))
        digest.update(json.dumps([name, array.dtype.name, list(array.shape)]).encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def save(directory: str | os.PathLike[str], state: Mapping[str, Array], metadata: Mapping[str, Any]) -> Path:
    """Write a checkpoint; one rank does this for all.

    Args:
        directory: made when missing; a checkpoint in it is replaced.
        state: arrays by their names in the graph.
        metadata: small JSON values (step, epoch, …).

    Raises:
        UsageError: an array of a dtype without a code in the format, or metadata that is not JSON.
        CheckpointError: the file cannot be written; the previous checkpoint is untouched.
    """
    arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in state.items()}
    header = _header(arrays, metadata)
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _link_previous(folder)
        with whole_file(folder / FILE_NAME) as file:
            file.write(header)
            for name in _order(arrays):
                file.write(_bytes(arrays[name]))
        if (folder / _LINK).exists():
            replace_regular(folder / _LINK, folder / PREVIOUS)
        _sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {str(folder)!r}: {error.strerror or error}") from error
    return folder / FILE_NAME


def _link_previous(folder: Path) -> None:
    """Give the present file a second name, which becomes the previous one when the new file is whole."""
    with contextlib.suppress(FileNotFoundError):
        (folder / _LINK).unlink()
    present = Path(os.path.realpath(folder / FILE_NAME))
    if not present.is_file():
        return
    with contextlib.suppress(OSError):  # a file system without links, or a link to another one
        os.link(present, folder / _LINK)


def load(directory: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read a checkpoint: new, writable arrays by name, and the metadata.

    If the file is damaged and the one before it is whole, that one is read, with a warning.

    Raises:
        CheckpointError: there is none, or it is truncated, damaged or no checkpoint of graphc.
    """
    folder = Path(directory)
    if folder.is_file():
        raise CheckpointError(f"{str(directory)!r} is a file; name the folder of the checkpoint")
    try:
        return _read(folder / FILE_NAME)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {str(directory)!r} (no file {FILE_NAME})") from None
    except CheckpointError as damage:
        try:
            found = _read(folder / PREVIOUS)
        except (OSError, CheckpointError):
            raise damage from None
        warnings.warn(f"{damage}; the run goes on from the one before it, {PREVIOUS}", RuntimeWarning, stacklevel=2)
        return found


def _read(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read and check one file; raises CheckpointError, or FileNotFoundError if there is none."""
    try:
        with open_regular(path) as file:
            header, entries, notes = _read_header(file, path)
            start, size = len(header), os.fstat(file.fileno()).st_size
            end = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            if size != end:
                raise _damaged(path, f"it has {size} bytes instead of {end}; it was not written to its end")
            said = notes.get("sha256", "")
            digest = hashlib.sha256(header.replace(said.encode(), _NO_DIGEST.encode(), 1))
            state: dict[str, Array] = {}
            for name, entry in entries.items():  # in the order of the file
                state[name] = np.empty(entry["shape"], _CODES[entry["dtype"]])
                if file.readinto(_bytes(state[name])) != state[name].nbytes:
                    raise _damaged(path, "it was not written to its end")
                digest.update(_bytes(state[name]))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {str(path)!r}: {error.strerror or error}") from error
    if digest.hexdigest() != said:
        raise _damaged(path, "its contents do not match its digest")
    return state, json.loads(notes["metadata"])


def metadata(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the metadata of a checkpoint alone.

    Raises:
        CheckpointError: there is none, or its header cannot be read.
    """
    path = Path(directory) / FILE_NAME
    try:
        with open_regular(path) as file:
            _, _, notes = _read_header(file, path)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {str(path)!r}: {error.strerror or error}") from error
    found: dict[str, Any] = json.loads(notes["metadata"])
    return found


def move(directory: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Move a checkpoint to another folder, where it replaces one; nothing happens if there is none.

    Raises:
        CheckpointError: the folder cannot be written to.
    """
    try:
        Path(target).mkdir(parents=True, exist_ok=True)
        os.replace(Path(directory) / FILE_NAME, Path(target) / FILE_NAME)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot move the checkpoint to {str(target)!r}: {error.strerror or error}") from error


def check_state_names(arrays: Mapping[str, Array], *, needed: Collection[str], known: Collection[str]) -> None:
    """Refuse a checkpoint of something else.

    Args:
        needed: the state that a program must find in it.
        known: all state of the program.

    Raises:
        UsageError: with a name that is missing, or one too many.
    """
    for names, verb, rest in (
        (sorted(set(needed) - arrays.keys()), "lacks", ""),
        (sorted(arrays.keys() - set(known)), "holds", ", for which this program has no state"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            why = "it was made with another model or optimizer, or other parameters trained"
            raise UsageError(f"the checkpoint {verb} {names[0]!r}{more}{rest}: {why}")


def _header(arrays: Mapping[str, Array], metadata: Mapping[str, Any]) -> bytes:
    try:
        notes = json.dumps(dict(metadata))
    except (TypeError, ValueError) as error:
        raise UsageError(f"the metadata of a checkpoint must be JSON: {error}") from None
    table: dict[str, Any] = {"__metadata__": {"format": "np", "graphc": FORMAT, "sha256": _NO_DIGEST, "metadata": notes}}
    offset = 0
    for name in _order(arrays):
        array = arrays[name]
        if array.dtype not in _CODE_OF:
            raise UsageError(f"cannot put {name!r} of dtype {array.dtype} into a checkpoint")
        table[name] = {
            "dtype": _CODE_OF[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays start at a multiple of 8
    header = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(header)
    for name in _order(arrays):
        digest.update(_bytes(arrays[name]))
    return header.replace(_NO_DIGEST.encode(), digest.hexdigest().encode(), 1)


def _order(arrays: Mapping[str, Array]) -> list[str]:
    """Widest elements first, so that every array is aligned to its element size."""
    return sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))


def _read_header(file: BufferedReader, path: Path) -> tuple[bytes, dict[str, Any], dict[str, str]]:
    """The header's bytes, the table of arrays and the metadata; arrays follow each other without gaps."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > _LARGEST_HEADER:
        raise _damaged(path, "it has no header")
    text = file.read(size)
    if len(text) < size:
        raise _damaged(path, "it ends inside its header")
    try:
        table = json.loads(text)
        notes = table.pop("__metadata__", {})
        if notes.get("graphc") != FORMAT:
            raise CheckpointError(f"{str(path)!r} is no checkpoint of this version of graphc")
        if not isinstance(notes["sha256"], str) or len(notes["sha256"]) != len(_NO_DIGEST):
            raise ValueError(notes["sha256"])
        json.loads(notes["metadata"])
        offset = 0
        for entry in table.values():
            begin, stop = entry["data_offsets"]
            needed = math.prod(entry["shape"]) * _CODES[entry["dtype"]].itemsize
            if begin != offset or stop - begin != needed or any(type(n) is not int or n < 0 for n in entry["shape"]):
                raise ValueError(entry)
            offset = stop
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(path, "its header cannot be read") from None
    return length + text, table, notes


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {str(path)!r} is damaged: {why}")


def _bytes(array: Array) -> memoryview:
    """The memory of a contiguous array, whatever its dtype."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

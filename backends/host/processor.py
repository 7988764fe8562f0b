"""The processor that machine code is made for: this one, or the level that ``GRAPHC_PROCESSOR`` names.

A level is a set of instructions that many processors have: code for it runs on all of them, with the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass

import llvmlite.binding as llvm

from graphc.errors import UsageError

_AVX2 = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")

LEVELS = {
    "x86-64-v4": (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": _AVX2,
}
"""Instructions of each level of x86-64 that code is made for ahead of time (psABI's names), the highest first."""

_LINUX = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class Processor:
    """What LLVM compiles for.

    Attributes:
        name, features: as LLVM spells them.
        lanes: float32 numbers in a vector; two registers where these hold four.
        level: whose code runs here, with vectors of as many lanes; None: none of :data:`LEVELS`, or not under Linux, for which
            code is made ahead of time.
        chosen: by the user, who may compile for another machine.
    """

    name: str
    features: str
    lanes: int
    level: str | None
    chosen: bool


@functools.cache
def processor() -> Processor:
    """The processor of this process.

    Raises:
        UsageError: ``GRAPHC_PROCESSOR`` names no level.
    """
    level = os.environ.get("GRAPHC_PROCESSOR")
    if level:
        if level not in LEVELS:
            raise UsageError(f"GRAPHC_PROCESSOR={level} is no level that graphc knows; there are {', '.join(LEVELS)}")
        lanes = _lanes("avx512f" in LEVELS[level])
        features = ",".join(f"+{feature}" for feature in LEVELS[level])
        return Processor(level, _whole(features, lanes), lanes, level if _LINUX else None, True)
    found = llvm.get_host_cpu_features()
    lanes = _lanes(bool(found.get("avx512f")))
    fitting = (name for name, needed in LEVELS.items() if all(map(found.get, needed)) and _lanes("avx512f" in needed) == lanes)
    level = next(fitting, None) if _LINUX else None
    return Processor(llvm.get_host_cpu_name(), _whole(found.flatten(), lanes), lanes, level, False)


def check_runs_here() -> None:
    """Check whether code for :func:`processor` runs on this machine.

    Raises:
        UsageError: ``GRAPHC_PROCESSOR`` names a level of instructions that this processor lacks.
    """
    wanted, features = processor(), llvm.get_host_cpu_features()
    missing = [name for name in LEVELS.get(wanted.name, ()) if not features.get(name)]
    if wanted.chosen and missing:
        raise UsageError(
            f"GRAPHC_PROCESSOR={wanted.name} needs what this processor lacks ({', '.join(missing)}); name a lower level"
        )


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32 (AMX, AVX512-BF16, Arm's BF16)."""
    features = llvm.get_host_cpu_features()
    return any(features.get(name) for name in ("amx-bf16", "avx512bf16", "bf16"))


def copies_to_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in vectors alone, for which operands are copied."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512bf16")) and not features.get("amx-bf16")


_TILE_DATA = 18
"""The number of the state that holds AMX's tiles; Linux gives it to processes that ask."""


@functools.cache
def has_matrix_tiles() -> bool:
    """Whether kernels may multiply bfloat16 on AMX's tiles here: the processor has them, and the system lets this process.

    Code for a level that ``GRAPHC_PROCESSOR`` names does without, since other processors of that level have none.
    """
    features, wanted = llvm.get_host_cpu_features(), processor()
    if wanted.chosen or wanted.level != "x86-64-v4" or not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    arch_prctl, request_permission = 158, 0x1023
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, _TILE_DATA) == 0)


def _whole(features: str, lanes: int) -> str:
    """With vectors as wide as the processor has them: LLVM takes half of AVX-512's by default.

    Sums of exponentials take 0.5 to 0.65 of the time then; products use whole vectors anyway, whatever the clock loses by it.
    """
    return f"{features},-prefer-256-bit" if lanes == _lanes(True) else features


def _lanes(wide: bool) -> int:
    return 16 if wide else 8

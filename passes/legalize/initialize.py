"""initialize: fill a model that has no trained weights with random ones.

    before   conv.weight: all zeros             bias: all zeros     bn.scale: all zeros
    after    conv.weight: N(0, √(2 / fan in))   bias: zeros         bn.scale: ones

The role of a parameter follows from the ops that use it. Each is drawn from its own generator, keyed by seed and name, so
the result does not depend on the order of parameters or on the presence of others.

He: K. He et al., "Delving deep into rectifiers", 2015. Glorot: X. Glorot, Y. Bengio, "Understanding the difficulty of
training deep feedforward neural networks", 2010.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from graphc.errors import UsageError, listed, near_names, nearest
from graphc.ir.declare import Role
from graphc.ir.facts import dtype_of, is_parameter, static_dims
from graphc.ir.updates import role_of, source_of
from graphc.pipeline import Context, graph_pass

METHODS = ("he", "glorot", "normal", "uniform", "zeros")

EMBEDDING_STD = 0.02
"""Standard deviation of embedding tables, and of every weight with method ``normal``."""

_ZERO, _ONE, _SLOPE, _EMBEDDING, _WEIGHT = "zero", "one", "slope", "embedding", "weight"

_ROLES: dict[tuple[str, int], str] = {
    ("BatchNormalization", 1): _ONE,
    ("BatchNormalization", 2): _ZERO,
    ("BatchNormalization", 3): _ZERO,
    ("BatchNormalization", 4): _ONE,
    ("BatchNormalizationTraining", 1): _ONE,
    ("BatchNormalizationTraining", 2): _ZERO,
    ("LayerNormalization", 1): _ONE,
    ("LayerNormalization", 2): _ZERO,
    ("InstanceNormalization", 1): _ONE,
    ("InstanceNormalization", 2): _ZERO,
    ("GroupNormalization", 1): _ONE,
    ("GroupNormalization", 2): _ZERO,
    ("RMSNormalization", 1): _ONE,
    ("Conv", 1): _WEIGHT,
    ("Conv", 2): _ZERO,
    ("ConvTranspose", 1): _WEIGHT,
    ("ConvTranspose", 2): _ZERO,
    ("Gemm", 2): _ZERO,
    ("LSTM", 3): _ZERO,
    ("GRU", 3): _ZERO,
    ("RNN", 3): _ZERO,
    ("PRelu", 1): _SLOPE,
    ("Gather", 0): _EMBEDDING,
}
"""(op, input) → role of the parameter; other roles follow from the shape and from multiplications."""

_PLAIN = frozenset({"Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Expand"})


@graph_pass("initialize", changes="form")
def initialize(
    model: ir.Model,
    ctx: Context,
    *,
    method: str = "he",
    seed: int = 0,
    only: Sequence[str] | None = None,
    overwrite: bool = False,
) -> bool:
    """Fill parameters with random numbers.

    Weights are drawn by ``method``; biases become 0, scales of normalisations 1, running means 0 and variances 1, slopes of
    PRelu 0.25, embedding tables N(0, 0.02).

    Args:
        method: ``he`` (normal, √(2/fan in)), ``glorot`` (uniform, ±√(6/(fan in + fan out))), ``normal`` (standard deviation
            0.02), ``uniform`` (±1/√(fan in)) or ``zeros``.
        seed: with the parameter's name, the key of its generator.
        only: glob patterns of the parameters to fill; default all.
        overwrite: also fill weights that look trained. By default only weights whose elements are all equal are filled. If all
            weights of the file are such, everything is filled, because trained biases and statistics imply trained weights.

    Raises:
        UsageError: an unknown method, or a pattern that matches no parameter.
    """
    if method not in METHODS:
        raise UsageError(f"unknown initialization {method!r}{nearest(method, METHODS)}; {listed('method', METHODS)}")
    roles = {name: _role(value) for name, value in model.graph.initializers.items() if is_parameter(value)}
    for pattern in only or ():
        if not fnmatch.filter(roles, pattern):
            raise UsageError(
                f"no parameter matches {pattern!r}{near_names(pattern, roles)}; {listed('parameter', roles, most=8)}"
            )
    constant = {
        name: _is_constant(model.graph.initializers[name]) for name, role in roles.items() if role in (_WEIGHT, _EMBEDDING)
    }
    untrained = bool(constant) and all(constant.values())
    counts: Counter[str] = Counter()
    for name, role in roles.items():
        if only and not any(fnmatch.fnmatchcase(name, pattern) for pattern in only):
            continue
        if not overwrite and not untrained and not constant.get(name, False):
            continue
        value = model.graph.initializers[name]
        array = _draw(value, role, method, seed)
        value.const_value = ir.tensor(array.astype(dtype_of(value).numpy(), copy=False), dtype=value.dtype, name=name)
        counts[role] += 1
    shown = ", ".join(f"{n} {role}" for role, n in sorted(counts.items())) or "nothing"
    ctx.note(f"initialize: {method}, seed {seed}: {shown} of {len(roles)} parameters")
    return bool(counts)


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_CHUNK = 1 << 21
"""Elements per generator; larger tensors are drawn in parallel, chunk by chunk."""


def _fill(shape: tuple[int, ...], seed: int, name: str, fill: Callable[[np.random.Generator, Array], None]) -> Array:
    """A float32 tensor filled by ``fill(generator, part)``, in which chunk k has the generator (seed, name, k)."""
    flat = np.empty(math.prod(shape), dtype=np.float32)
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()

    def chunk(start: int) -> None:
        philox = np.random.Philox(key=int.from_bytes(digest, "little"), counter=[0, 0, start // _CHUNK, 0])
        fill(np.random.Generator(philox), flat[start : start + _CHUNK])

    if flat.size <= _CHUNK:
        chunk(0)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(chunk, range(0, flat.size, _CHUNK)))
    return flat.reshape(shape)


def _normal(std: float) -> Callable[[np.random.Generator, Array], None]:
    def fill(random: np.random.Generator, part: Array) -> None:
        random.standard_normal(out=part, dtype=np.float32)
        part *= np.float32(std)

    return fill


def _uniform(bound: float) -> Callable[[np.random.Generator, Array], None]:
    def fill(random: np.random.Generator, part: Array) -> None:
        random.random(out=part, dtype=np.float32)
        part *= np.float32(2 * bound)
        part -= np.float32(bound)

    return fill


def _draw(value: ir.Value, role: str, method: str, seed: int) -> Array:
    shape, name = static_dims(value) or (), value.name or ""
    if role in (_ZERO, _ONE, _SLOPE):
        return np.full(shape, {_ZERO: 0.0, _ONE: 1.0, _SLOPE: 0.25}[role], dtype=np.float32)
    if method == "zeros":
        return np.zeros(shape, dtype=np.float32)
    if role == _EMBEDDING or method == "normal":
        return _fill(shape, seed, name, _normal(EMBEDDING_STD))
    fan_in, fan_out = fans(value)
    if method == "he":
        return _fill(shape, seed, name, _normal(math.sqrt(2.0 / fan_in)))
    return _fill(shape, seed, name, _uniform(math.sqrt(6.0 / (fan_in + fan_out)) if method == "glorot" else fan_in**-0.5))


def _is_constant(value: ir.Value) -> bool:
    """Whether a tensor has several elements and all are equal; compares a few first, because most weights differ there."""
    if value.const_value is None or value.const_value.size < 2:
        return False
    flat = np.asarray(value.const_value.numpy()).reshape(-1)
    parts = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    return bool((flat[:64] == flat[0]).all()) and all((part == flat[0]).all() for part in parts)


def _uses(value: ir.Value) -> list[tuple[ir.Node, int, list[int] | None]]:
    """Find the node that uses a parameter, through casts, reshapes and transposes: (node, input, permutation of its axes).

    The permutation is None if a reshape is on the way.
    """
    found: list[tuple[ir.Node, int, list[int] | None]] = []
    stack: list[tuple[ir.Value, list[int] | None]] = [(value, list(range(len(value.shape or ()))))]
    while stack:
        current, axes = stack.pop()
        for node, index in current.uses():
            if index == 0 and node.op_type == "Transpose" and axes is not None:
                perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(axes))[::-1]
                stack.append((node.outputs[0], [axes[k] for k in perm]))
            elif index == 0 and node.op_type in _PLAIN:
                stack.append((node.outputs[0], axes if node.op_type in ("Identity", "Cast") else None))
            else:
                found.append((node, index, axes))
    return found


def _role(value: ir.Value) -> str:
    uses = _uses(value)
    for node, index, _ in uses:
        if (node.op_type, index) in _ROLES:
            return _ROLES[node.op_type, index]
        if role_of(node, index) is Role.STATISTIC:
            return _ONE if source_of(node).index() == 2 else _ZERO
    if sum(d != 1 for d in value.shape or ()) >= 2 or any(node.op_type in ("MatMul", "Gemm") for node, _, _ in uses):
        return _WEIGHT
    return _ONE if any(node.op_type in ("Mul", "Div") for node, _, _ in uses) else _ZERO


def fans(value: ir.Value) -> tuple[int, int]:
    """(fan in, fan out) of a weight: inputs summed per output, and outputs reached per input.

    Taken from its use as a Conv (O × I/groups × window), Gemm or MatMul operand; else axis 0 counts outputs, by convention.
    """
    shape = static_dims(value) or ()
    for node, index, axes in _uses(value):
        seen = [shape[k] for k in axes] if axes is not None else None
        if seen is None or len(seen) < 2:
            continue
        if node.op_type == "Conv" and index == 1:
            return _positive(math.prod(seen[1:]), seen[0] * math.prod(seen[2:]))
        if node.op_type == "ConvTranspose" and index == 1:
            groups = node.attributes.get_int("group", 1)
            return _positive(seen[0] // groups * math.prod(seen[2:]), math.prod(seen[1:]))
        if node.op_type in ("LSTM", "GRU", "RNN"):
            return _positive(seen[-1], seen[-2])
        if node.op_type in ("MatMul", "Gemm") and index in (0, 1):
            rows, columns = seen[-2:]
            if node.attributes.get_int("transB" if index else "transA", 0):
                rows, columns = columns, rows
            return _positive(rows, columns) if index == 1 else _positive(columns, rows)
    return _positive(math.prod(shape[1:]), shape[0] * math.prod(shape[2:]))


def _positive(a: int, b: int) -> tuple[int, int]:
    return max(a, 1), max(b, 1)

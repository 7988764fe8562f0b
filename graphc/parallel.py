"""Turns the distribution options of ``compile`` into passes of the pipeline.

    strategy="zero:stage=2", accumulate=4, clip_norm=1.0     →     accumulate{steps=4},…,clip{norm=1.0},…,zero{stage=2}

A strategy is one pass over the graph in which every gradient has its AllReduce; ``mirrored`` leaves that graph unchanged.
"""

from __future__ import annotations

from typing import Any

from graphc.errors import UsageError, nearest
from graphc.mesh import Mesh
from graphc.options import CompileOptions, key_values
from graphc.pipe.clock import in_flight
from graphc.pipe.tables import PipeSchedule
from graphc.pipeline import PASSES, PassCall

STRATEGIES = ("mirrored", "zero", "central_storage", "parameter_server", "local_sgd", "adasum")
"""Strategies; each except the first is also the name of the pass that rewrites the mirrored graph."""

DETERMINISM = ("run", "any-world")
"""``run``: equal runs give equal bits (always true on the host); ``any-world``: also for any number of workers."""


NONFINITE = ("stop", "skip")
"""``stop``: the run ends with the last good state; ``skip``: the step changes nothing and training continues."""


def forward_steps(options: CompileOptions) -> list[PassCall]:
    """Passes between ``train_mode`` and the loss.

    Raises:
        UsageError: options that exclude each other.
    """
    if options.sync_batchnorm and _shards(options):
        raise UsageError(
            "sync_batchnorm needs the whole batch at once, deterministic='any-world' computes it in fixed shards;"
            " choose one of them"
        )
    return [PassCall("sync_batchnorm")] if options.sync_batchnorm else []


def tensor_steps(options: CompileOptions, mesh: Mesh) -> list[PassCall]:
    """The pass between the loss and the gradients that divides weights over the tensor axis."""
    shard = [options.shard] if isinstance(options.shard, str) else list(options.shard or ["auto"])
    return [PassCall("tensor_parallel", {"ranks": mesh.tensor, "shard": shard})] if mesh.tensor > 1 else []


def check_tensor(options: CompileOptions, mesh: Mesh | None) -> None:
    """Refuse what does not work with a tensor axis yet.

    Raises:
        UsageError: the option, and why; or shards without a tensor axis.
    """
    if mesh is None or mesh.tensor == 1:
        if options.shard:
            raise UsageError("shard= divides weights over the tensor axis, and the mesh has none; give mesh=Mesh(tensor=2)")
        return
    fp16 = (options.precision or "").startswith("fp16")
    given = {
        f"the axis pipe={mesh.pipe}": mesh.pipe > 1,
        f"strategy={options.strategy!r}": options.strategy not in ("mirrored", "zero", "zero:stage=1"),
        f"clip_norm={options.clip_norm}": options.clip_norm is not None,
        f"compress={options.compress!r}": options.compress is not None,
        f"recompute={options.recompute!r}": options.recompute not in (None, "none"),
        f"precision={options.precision!r}": fp16,
        f"nonfinite={options.nonfinite!r}": options.nonfinite == "skip",
        f"deterministic={options.deterministic!r}": bool(_shards(options)),
    }
    for text, there in given.items():
        if there:
            raise UsageError(f"the mesh axis tensor={mesh.tensor} does not work with {text} yet; leave one of the two out")


def master_steps(options: CompileOptions) -> list[PassCall]:
    """The pass between the optimizer and ``allreduce`` that separates float32 masters under mixed precision.

    Passes that sum or transform gradients need them in float32.
    """
    if options.strategy.partition(":")[0] not in ("zero", "central_storage"):
        return []
    return [PassCall("master_weights", {"low_gradients": options.accumulate == 1 and not _shards(options)})]


def stage_steps(options: CompileOptions, mesh: Mesh) -> list[PassCall]:
    """The pass before ``autodiff`` that assigns pipeline stages."""
    if mesh.pipe == 1:
        return []
    if options.place:
        return [PassCall("place", {"devices": mesh.pipe, "place": list(options.place)})]
    schedule = PipeSchedule.parse(options.schedule or "1f1b")
    row = schedule.table(mesh.pipe, options.accumulate)[0]
    given: dict[str, Any] = {
        "stages": schedule.stages_on(mesh.pipe),
        "schedule": str(schedule),
        "in_flight": in_flight(row, 0),
        "balance": options.balance,
    }
    given |= {"cut": list(options.cut)} if options.cut else {}
    given |= {"memory_mb": options.stage_memory_mb} if options.stage_memory_mb is not None else {}
    return [PassCall("pipe_stages", given)]


def check_mesh(options: CompileOptions, mesh: Mesh | None) -> None:
    """Refuse options that need an axis which the mesh has not, or exclude one that it has.

    Raises:
        UsageError: option, axis and reason.
    """
    if mesh is None or mesh.pipe == 1:
        for name in ("schedule", "cut", "stage_memory_mb", "place"):
            if getattr(options, name):
                raise UsageError(f"{name}={getattr(options, name)} needs a mesh with pipeline stages, such as Mesh(pipe=2)")
        return
    if options.place:
        for name in ("schedule", "cut", "stage_memory_mb"):
            if getattr(options, name):
                raise UsageError(
                    f"place={options.place} and {name}={getattr(options, name)} exclude each other: nodes are put on devices by"
                    " hand, or cut into stages of a schedule"
                )
        if options.accumulate > 1:
            raise UsageError(
                f"place={options.place} and accumulate={options.accumulate} exclude each other; leave accumulate out"
            )
    excluded = {
        "strategy": (options.strategy if options.strategy != "mirrored" else None, "the state is divided by stages"),
        "sync_batchnorm": (options.sync_batchnorm or None, "statistics are those of each micro-batch"),
        "compress": (options.compress, "gradients of a stage are reduced as they are"),
        "deterministic": (options.deterministic if _shards(options) else None, "a pipeline has micro-batches of its own"),
        "nonfinite": (options.nonfinite if options.nonfinite != "stop" else None, "a stage cannot skip a step by itself"),
        "precision": (options.precision if (options.precision or "").startswith("fp16") else None, "the loss scale is one"),
        "clip_norm": (options.clip_norm, "the norm of the gradient is over all stages"),
    }
    for name, (value, reason) in excluded.items():
        if value is not None:
            raise UsageError(f"mesh axis pipe={mesh.pipe} and {name}={value} exclude each other so far: {reason}")


def gradient_steps(options: CompileOptions, mesh: Mesh | None = None) -> list[PassCall]:
    """Passes between ``allreduce`` and ``bucket``."""
    steps: list[PassCall] = []
    shards = _shards(options)
    if options.accumulate < 1:
        raise UsageError(f"accumulate must be a whole number of at least 1, not {options.accumulate}")
    if shards:
        if options.accumulate > 1:
            raise UsageError("deterministic='any-world' sets the micro-batches itself; leave accumulate out")
        steps.append(PassCall("deterministic_shards", shards))
    elif options.accumulate > 1 or (mesh is not None and mesh.pipe > 1 and not options.place):  # a pipeline's micro-batches
        steps.append(PassCall("accumulate", {"steps": options.accumulate}))
    if options.clip_norm is not None or options.clip_value is not None:
        bounds = {"norm": options.clip_norm, "value": options.clip_value}
        steps.append(PassCall("clip", {k: v for k, v in bounds.items() if v is not None}))
    if options.compress is not None:
        method, _, rest = options.compress.partition(":")
        steps.append(PassCall("compress", PASSES["compress"].bind({"method": method, **key_values(rest)})))
    if options.nonfinite not in NONFINITE:
        raise UsageError(
            f"nonfinite={options.nonfinite!r}{nearest(options.nonfinite, NONFINITE)}; it is {' or '.join(NONFINITE)}"
        )
    if options.nonfinite == "skip":
        steps.append(PassCall("skip_nonfinite"))
    return steps


def strategy_steps(options: CompileOptions) -> list[PassCall]:
    """Passes between ``bucket`` and ``schedule``.

    Raises:
        UsageError: an unknown strategy or option.
    """
    name, _, rest = options.strategy.partition(":")
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {name!r}{nearest(name, STRATEGIES)}; known are {', '.join(STRATEGIES)}")
    _check_together(name, options)
    if name != "mirrored":
        return [PassCall(name, PASSES[name].bind(key_values(rest)))]
    if name != options.strategy:
        raise UsageError(f"strategy {name!r} has no options, not {options.strategy!r}")
    return []


_ALONE = "a worker pushes the gradients of each batch as it has them, without the other workers"
_SUMS = "it needs each gradient as one plain sum over the workers"

EXCLUDED: dict[tuple[str, str], str] = {
    **{(strategy, "compress"): _SUMS for strategy in ("zero", "central_storage", "local_sgd", "adasum")},
    **{(strategy, "deterministic"): _SUMS for strategy in ("zero", "central_storage", "local_sgd", "adasum")},
    **{("parameter_server", option): _ALONE for option in ("accumulate", "sync_batchnorm", "deterministic")},
    ("parameter_server", "compress"): f"{_ALONE}, for which there are bf16 and fp16",
}
"""Strategy and option that exclude each other → the reason."""


def _check_together(strategy: str, options: CompileOptions) -> None:
    """Refuse an option that excludes the strategy, in terms of both; the passes would name a node.

    Raises:
        UsageError: strategy, option and reason.
    """
    method = (options.compress or "").partition(":")[0]
    given = {
        "accumulate": options.accumulate if options.accumulate > 1 else None,
        "sync_batchnorm": options.sync_batchnorm or None,
        "deterministic": options.deterministic if _shards(options) else None,
        "compress": None if strategy == "parameter_server" and method in ("bf16", "fp16") else options.compress,
    }
    for option, value in given.items():
        reason = EXCLUDED.get((strategy, option))
        if reason is not None and value is not None:
            raise UsageError(
                f"strategy {strategy!r} and {option}={value} exclude each other: {reason}; leave {option} out, or choose"
                " another strategy"
            )


def servers(options: CompileOptions) -> int:
    """Processes besides the workers: parameter servers."""
    return sum(step.options.get("servers", 1) for step in strategy_steps(options) if step.name == "parameter_server")


def _shards(options: CompileOptions) -> dict[str, Any]:
    """Options of ``deterministic_shards``; empty unless results must be the same for any number of workers."""
    if options.deterministic is None:
        return {}
    name, _, rest = options.deterministic.partition(":")
    if name not in DETERMINISM:
        raise UsageError(f"deterministic={name!r}{nearest(name, DETERMINISM)}; it is {' or '.join(DETERMINISM)}")
    if name == "run":
        return {}
    return PASSES["deterministic_shards"].bind({"shards": "4", **key_values(rest)})

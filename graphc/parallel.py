"""Turns the distribution options of ``compile`` into passes of the pipeline.

    strategy="zero:stage=2", accumulate=4, clip_norm=1.0     →     accumulate{steps=4},…,clip{norm=1.0},…,zero{stage=2}

A strategy is one pass over the graph in which every gradient has its AllReduce; ``mirrored`` leaves that graph unchanged.
"""

from __future__ import annotations

from typing import Any

from graphc.errors import UsageError, nearest
from graphc.mesh import REPLICAS, Mesh
from graphc.options import CompileOptions, key_values
from graphc.pipe.clock import in_flight
from graphc.pipe.tables import PipeSchedule
from graphc.pipeline import PASSES, PassCall

STRATEGIES = ("mirrored", "zero", "central_storage", "parameter_server", "local_sgd", "adasum")
"""Strategies; each except the first is also the name of the pass that rewrites the mirrored graph."""

WITH_STAGES = ("mirrored", "zero", "zero:stage=1", "zero:stage=2", "zero:stage=3")
"""Strategies that work with a pipeline."""

DETERMINISM = ("run", "any-world")
"""``run``: equal runs give equal bits (always true on the host); ``any-world``: also for any number of workers."""


NONFINITE = ("stop", "skip")
"""``stop``: the run ends with the last good state; ``skip``: the step changes nothing and training continues."""


HOSTS = "hosts"
"""Stands for the number of workers of a node until the trainer learns it from the workers' machines."""

ALLREDUCES = ("flat", "hierarchical")
"""``flat``: one AllReduce over all replicas; ``hierarchical``: inside the nodes, between them, inside again."""


def workers_per_node(options: CompileOptions) -> int | str | None:
    """What the options say of nodes: the number of workers of one, :data:`HOSTS`, or None.

    Raises:
        UsageError: options that cannot be read, or contradict each other.
    """
    name, _, rest = (options.allreduce or "flat").partition(":")
    if name not in ALLREDUCES:
        raise UsageError(
            f"allreduce={options.allreduce!r}{nearest(name, ALLREDUCES)}; it is flat, hierarchical or hierarchical:per_node=N"
        )
    given = key_values(rest)
    unknown = sorted(set(given) - {"per_node"})
    if unknown or (rest and name == "flat"):
        raise UsageError(f"allreduce={options.allreduce!r}: {name} has no option {(unknown or ['per_node'])[0]!r}")
    strategy, _, rest = options.strategy.partition(":")
    shard = key_values(rest).get("shard_size") if strategy == "zero" else None
    found = {
        **({"allreduce": given.get("per_node", HOSTS)} if name == "hierarchical" else {}),
        **({"strategy": HOSTS if shard == "node" else shard} if shard is not None else {}),
    }
    for option, text in found.items():
        if text != HOSTS and (not text.isdecimal() or not int(text)):
            raise UsageError(
                f"{option}={getattr(options, option)!r}: {text!r} is no number of workers; it is a whole number of at least 1"
                + (", or 'node'" if option == "strategy" else "")
            )
    numbers = {text for text in found.values() if text != HOSTS}
    if len(numbers) > 1:
        raise UsageError(
            f"allreduce={options.allreduce!r} and strategy={options.strategy!r} name nodes of different sizes; name one"
        )
    return int(numbers.pop()) if numbers else HOSTS if found else None


def settle_nodes(options: CompileOptions, mesh: Mesh | None) -> Mesh | None:
    """The mesh with the nodes that the options ask for, where both are known before the run.

    Raises:
        UsageError: they do not fit.
    """
    per_node = workers_per_node(options)
    return mesh.split(per_node) if mesh is not None and isinstance(per_node, int) else mesh


def replica_group(options: CompileOptions, mesh: Mesh) -> str:
    """The group over which gradients are reduced."""
    return REPLICAS if mesh.node > 1 or workers_per_node(options) is not None else "data"


def reduction_steps(options: CompileOptions, mesh: Mesh) -> list[PassCall]:
    """The pass that puts reductions in front of the updates."""
    group = replica_group(options, mesh)
    return [PassCall("allreduce", {"group": group} if group != "data" else {})]


def _is_hierarchical(options: CompileOptions, mesh: Mesh) -> bool:
    """Whether gradients are reduced inside the nodes first: if asked for, or if the mesh has nodes."""
    return options.strategy == "mirrored" and replica_group(options, mesh) != "data" and options.allreduce != "flat"


def _check_nodes(options: CompileOptions, mesh: Mesh) -> None:
    """Refuse what does not work with nodes.

    Raises:
        UsageError: both options, and the reason.
    """
    asked = f"allreduce={options.allreduce}" if options.allreduce is not None else f"mesh axis node={mesh.node}"
    name = options.strategy.partition(":")[0]
    for_nodes = name in ("central_storage", "parameter_server") and replica_group(options, mesh) != "data"
    if for_nodes or (name in ("local_sgd", "adasum") and (options.allreduce or "flat") != "flat"):
        raise UsageError(
            f"{asked} and strategy={options.strategy} exclude each other: nodes are for 'mirrored' and 'zero'; leave one out"
        )
    if not _is_hierarchical(options, mesh):
        return
    for option, value in {
        "compress": options.compress if _has_residuals(options) else None,
        "deterministic": options.deterministic if _shards(options) else None,
    }.items():
        if value is not None:
            raise UsageError(
                f"{asked} and {option}={value} exclude each other: {_SUMS}; leave {option} out, or say allreduce=flat"
            )


def _has_residuals(options: CompileOptions) -> bool:
    """Whether compression keeps, on each worker, what it has not sent yet."""
    return (options.compress or "").partition(":")[0] in ("powersgd", "topk")


def forward_steps(options: CompileOptions, mesh: Mesh) -> list[PassCall]:
    """Passes between ``train_mode`` and the loss.

    Raises:
        UsageError: options that exclude each other.
    """
    if options.sync_batchnorm and _shards(options):
        raise UsageError(
            "sync_batchnorm needs the whole batch at once, deterministic='any-world' computes it in fixed shards;"
            " choose one of them"
        )
    group = replica_group(options, mesh)
    given = {"group": group} if group != "data" else {}
    return [PassCall("sync_batchnorm", given)] if options.sync_batchnorm else []


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
    given = {
        f"strategy={options.strategy!r}": _among_replicas(options) not in WITH_STAGES,
        f"compress={options.compress!r}": _has_residuals(options),
    }
    for text, there in given.items():
        if there:
            raise UsageError(f"the mesh axis tensor={mesh.tensor} does not work with {text} yet; leave one of the two out")


def _among_replicas(options: CompileOptions) -> str:
    """The strategy, whatever the number of replicas that divide the state."""
    name, _, rest = options.strategy.partition(":")
    kept = [part for part in rest.split(",") if part and not part.strip().startswith("shard_size")]
    return ":".join([name, *([",".join(kept)] if kept else [])])


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
        if _among_replicas(options) == "zero:stage=3":
            raise UsageError(
                f"place={options.place} and strategy={options.strategy} exclude each other: nodes put on devices by hand read"
                " whole parameters; take zero:stage=2, or stages of a schedule"
            )
    excluded = {
        "strategy": (
            options.strategy if _among_replicas(options) not in WITH_STAGES else None,
            "stages divide the parameters; 'mirrored' and 'zero' work with them",
        ),
        "compress": (options.compress if _has_residuals(options) else None, "a stage keeps no residuals"),
        "deterministic": (options.deterministic if _shards(options) else None, "a pipeline has micro-batches of its own"),
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
    if mesh is not None and mesh.tensor > 1:
        steps.append(PassCall("tensor_measures"))
    return steps


def strategy_steps(options: CompileOptions, mesh: Mesh) -> list[PassCall]:
    """Passes between ``bucket`` and ``schedule``.

    Raises:
        UsageError: an unknown strategy or option.
    """
    name, _, rest = options.strategy.partition(":")
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {name!r}{nearest(name, STRATEGIES)}; known are {', '.join(STRATEGIES)}")
    _check_together(name, options)
    _check_nodes(options, mesh)
    if name != "mirrored":
        given = {k: v for k, v in key_values(rest).items() if (name, k) != ("zero", "shard_size")}
        return [PassCall(name, PASSES[name].bind(given))]
    if name != options.strategy:
        raise UsageError(f"strategy {name!r} has no options, not {options.strategy!r}")
    return [PassCall("hierarchical")] if _is_hierarchical(options, mesh) else []


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
    steps = strategy_steps(options, Mesh())
    return sum(step.options.get("servers", 1) for step in steps if step.name == "parameter_server")


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

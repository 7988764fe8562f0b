"""Passes and the pipelines made of them.

A pass is a function ``(model, ctx, *, options…) -> changed``; its keyword arguments are its command-line options. A
pipeline has one text form everywhere: ``legalize,autodiff,optimizer{name=adam,lr=1e-3},bucket{mb=25}``.
"""

from __future__ import annotations

import inspect
import numbers
import re
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from graphc.atomic_files import whole_file
from graphc.errors import GraphcError, InternalError, ModelError, UsageError, listed, nearest
from graphc.ir.facts import describe
from graphc.ir.serialize import to_proto
from graphc.registry import Registry

PassFunction: TypeAlias = "Callable[..., bool]"

Changes: TypeAlias = Literal["function", "form", "training"]
"""What a pass changes: the function that the model computes, the form of the same function, or training alone: the loss,
gradients, updates, and how a step runs.
"""

PASSES: Registry[Pass] = Registry("pass", "graphc.passes")


@dataclass(slots=True)
class Context:
    """State that a pipeline passes from pass to pass, besides the model.

    Attributes:
        log: lines for the user about the work of passes (``"allreduce: 10 gradients"``).
        done: names of the finished passes, for ``requires``.
        values: results outside the graph (such as ``"check"`` reports); never needed to understand the model.
    """

    log: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def note(self, line: str) -> None:
        self.log.append(line)

    def warn(self, owner: str, text: str) -> None:
        """Note what the user should know before training; :func:`warnings_in` finds it.

        Args:
            owner: name of the pass.
        """
        self.note(f"{owner}{_WARNING}{text}")


_WARNING = ": warning: "


def warnings_in(log: Sequence[str]) -> list[str]:
    """The warnings in a log, without the names of the passes."""
    return [line.partition(_WARNING)[2] for line in log if _WARNING in line]


@dataclass(frozen=True, slots=True)
class Pass:
    """A registered pass.

    Attributes:
        options: keyword arguments by name.
        open: whether it accepts options beyond those and checks them itself.
        aliases: former names.
        changes: what it changes. What may change the function also runs for evaluation and export.
    """

    name: str
    function: PassFunction
    requires: tuple[str, ...]
    options: Mapping[str, inspect.Parameter]
    types: Mapping[str, Any]
    doc: str
    open: bool
    aliases: tuple[str, ...]
    changes: Changes

    def bind(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check option names and convert textual values to the declared types.

        Raises:
            UsageError: unknown option, or a value that does not convert.
        """
        bound: dict[str, Any] = {}
        for key, value in options.items():
            if key not in self.options and self.open:
                bound[key] = value
                continue
            if key not in self.options:
                raise UsageError(
                    f"pass {self.name!r} has no option {key!r}{nearest(key, self.options)}; {listed('option', self.options)}"
                )
            bound[key] = convert(self.name, key, value, self.types.get(key, str))
        for key, parameter in self.options.items():
            if parameter.default is inspect.Parameter.empty and key not in bound:
                raise UsageError(f"pass {self.name!r} needs the option {key!r}")
        return bound


def graph_pass(
    name: str, *, requires: Sequence[str] = (), aliases: Sequence[str] = (), changes: Changes = "function"
) -> Callable[[PassFunction], PassFunction]:
    """Register the decorated function as pass ``name``.

    Args:
        requires: passes that must run before.
        aliases: former names, which pipelines still accept.
        changes: ``function``: what the model computes, so that :func:`graphc.compile` runs the pass on the model before it
            copies it for training and evaluation; ``form``: the graph, not its results; ``training``: the loss, gradients or
            updates alone.

    Raises:
        UsageError: an unknown kind of change.
    """
    if changes not in typing.get_args(Changes):
        raise UsageError(f"pass {name!r}: changes={changes!r} is none of {', '.join(typing.get_args(Changes))}")

    def register(function: PassFunction) -> PassFunction:
        found = inspect.signature(function).parameters.values()
        parameters = {p.name: p for p in found if p.kind is inspect.Parameter.KEYWORD_ONLY}
        takes_others = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found)
        hints = typing.get_type_hints(function)
        doc = inspect.getdoc(function) or ""
        entry = Pass(name, function, tuple(requires), parameters, hints, doc, takes_others, tuple(aliases), changes)
        PASSES.register(name, entry, origin=function.__module__)
        for alias in aliases:
            PASSES.alias(alias, name)
        return function

    return register


@dataclass(frozen=True, slots=True)
class PassCall:
    """One pass of a pipeline with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = ",".join(f"{k}={_text(v)}" for k, v in self.options.items() if v is not None)
        return f"{self.name}{{{shown}}}" if shown else self.name


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "|".join(str(v) for v in value)
    return str(value)


def parse(text: str) -> list[PassCall]:
    """Parse the text form of a pipeline.

    Raises:
        UsageError: a syntax error or unknown pass, with the nearest match.
    """
    steps: list[PassCall] = []
    position = 0
    pattern = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\{([^{}]*)\})?\s*(,|$)")
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            raise UsageError(f"cannot read the pipeline at column {position + 1}: {text[position : position + 30]!r}")
        name, body, _ = match.groups()
        entry = PASSES[name]
        options: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in (body or "").split(","))):
            key, equals, value = item.partition("=")
            options[key.strip()] = value.strip() if equals else True
        entry.bind(options)
        steps.append(PassCall(entry.name, options))
        position = match.end()
    if not steps:
        raise UsageError("the pipeline is empty; 'graphc passes' lists the passes")
    return steps


def convert(owner: str, key: str, value: Any, kind: Any) -> Any:
    """Convert ``value`` to ``kind``: text is parsed as the option ``key`` of ``owner``, other values must have that type.

    Raises:
        UsageError: the value does not fit.
    """
    if not isinstance(value, str):
        if value is not None and not any(_fits(value, candidate) for candidate in _alternatives(kind)):
            raise UsageError(f"{owner}: {key}={value!r} is not {_in_words(kind)}")
        return value
    for candidate in _alternatives(kind):
        try:
            return _convert_text(value, candidate)
        except ValueError:
            continue
    raise UsageError(f"{owner}: {key}={value!r} is not {_in_words(kind)}")


def _in_words(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " or ".join(names.get(k, getattr(k, "__name__", str(k))) for k in _alternatives(kind))


def _fits(value: Any, kind: Any) -> bool:
    """Whether ``value`` fits the declared type ``kind``; only types of the text form are checked."""
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    return kind is not str


def _alternatives(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [k for k in typing.get_args(kind) if k is not type(None)]
    return [kind]


def _convert_text(value: str, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if kind is bool:
        if value.lower() in ("true", "1", "yes", "on"):
            return True
        if value.lower() in ("false", "0", "no", "off"):
            return False
        raise ValueError(value)
    if kind is int:
        return int(value)
    if kind is float:
        return float(value)
    if origin in (list, tuple) or (origin is not None and issubclass(origin, Sequence)):
        (item, *_) = typing.get_args(kind) or (str,)
        return [_convert_text(v, item) for v in value.split("|")] if value else []
    return value


def _verify_after(name: str, model: ir.Model, ctx: Context) -> None:
    try:
        PASSES["verify"].function(model, ctx)
    except GraphcError as error:
        error.args = (f"after the pass {name!r}: {error.args[0]}", *error.args[1:])
        raise


def _dump(model: ir.Model, folder: Path, name: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / name) as file:
            file.write(to_proto(model).SerializeToString(deterministic=True))
    except OSError as error:
        raise UsageError(f"cannot write {folder / name}: {error.strerror or error}") from None


def _unforeseen(entry: Pass, error: Exception) -> GraphcError:
    """The error for an exception that a pass did not foresee: names the pass, the node it was at, and whose pass it is."""
    node, trace = None, error.__traceback__
    while trace is not None:
        found = trace.tb_frame.f_locals.get("node")
        node = found if isinstance(found, ir.Node) else node
        trace = trace.tb_next
    where = "" if node is None else f" at {describe(node)}"
    what = " ".join(str(error).split()) or "no message"
    if isinstance(error, MemoryError):
        fault: GraphcError = ModelError(f"{entry.name}: out of memory{where}: {what}")
    else:
        module = entry.function.__module__
        own = module.partition(".")[0] == "graphc"
        whose = "this is a bug in graphc; report it with the model" if own else f"the pass belongs to {module}; report it there"
        fault = InternalError(f"{entry.name}: unexpected {type(error).__name__}{where}: {what}; {whose}")
    fault.located = True  # type: ignore[attr-defined]
    return fault


def run(
    model: ir.Model,
    steps: Sequence[PassCall] | str,
    ctx: Context | None = None,
    *,
    verify_each: bool = False,
    dump_dir: Path | None = None,
    after: Callable[[PassCall, ir.Model, float], None] | None = None,
) -> Context:
    """Run a pipeline on ``model`` in place.

    Args:
        verify_each: run the ``verify`` pass after every pass.
        dump_dir: save the model after the k-th pass of ``ctx`` as ``kk-name.onnx``.
        after: called as ``after(step, model, seconds)`` after every pass.

    Raises:
        UsageError: a pass whose prerequisite has not run.
        GraphcError: whatever a pass raises, with the name of the pass in front; InternalError for an exception that the
            pass did not foresee.
    """
    steps = parse(steps) if isinstance(steps, str) else steps
    ctx = ctx or Context()
    for step in steps:
        entry = PASSES[step.name]
        missing = [r for r in entry.requires if r not in ctx.done]
        if missing:
            raise UsageError(f"pass {step.name!r} needs {', '.join(missing)} before it")
        options = entry.bind(step.options)
        start = time.perf_counter()
        try:
            entry.function(model, ctx, **options)
        except GraphcError as error:
            if error.args and not getattr(error, "located", False):
                text = str(error.args[0])
                if not text.startswith(f"{step.name}: "):
                    error.args = (f"{step.name}: {text}", *error.args[1:])
                error.located = True  # type: ignore[attr-defined]
            raise
        except Exception as error:
            raise _unforeseen(entry, error) from error
        seconds = time.perf_counter() - start
        ctx.done.append(entry.name)
        if verify_each and step.name != "verify":
            _verify_after(step.name, model, ctx)
        if dump_dir is not None:
            _dump(model, dump_dir, f"{len(ctx.done) - 1:02d}-{entry.name}.onnx")
        if after is not None:
            after(step, model, seconds)
    return ctx

"""Custom ops: adds an operator of any domain to graphc.

    @graphc.custom_op("my.domain::Softsign2", inputs="x", outputs="y", attributes={"scale": 1.0})
    def softsign2(op, x, *, scale):
        \"\"\"y = scale·x / (1 + |x|)\"\"\"
        return op.Div(op.Mul(x, scale), op.Add(op.Abs(x), 1.0))

The decorated function is the op's decomposition: it emits simpler ops through a builder. With that alone the op runs on
every backend, in ``graphc run`` as in training, and is differentiated through its decomposition. A rule of
:func:`graphc.gradient.gradient` for ``"my.domain::Softsign2"`` takes precedence over the decomposition, and so does a kernel
of :func:`graphc.backend.kernel` on its backend. An op that only a kernel can compute is declared with
:func:`custom_primitive`.

A declaration takes effect when its module is imported. A package lets graphc import it, on the command line too, by an entry
point of group ``graphc.ops`` (``graphc.gradients`` for a module that holds rules).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.ir import DOMAIN, DOMAIN_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.declare import (
    CUSTOM,
    PLACEMENT,
    Decomposition,
    InferFunction,
    OpDeclaration,
    OpOptions,
    Spec,
    make_declaration,
    spec_of,
)


def custom_op(
    name: str,
    *,
    inputs: str,
    outputs: str,
    infer: InferFunction | None = None,
    override: bool = False,
    **options: Unpack[OpOptions],
) -> Callable[[Decomposition], Decomposition]:
    """Declare an op whose decomposition is the decorated function ``(op, *inputs, **attributes)``.

    Args:
        name: ``"domain::Op"``, as in the model file.
        inputs: names of the inputs in order: ``"x bias?"``; ``name?`` is optional, ``*name`` stands for any number.
        outputs: names of the outputs; the function returns one value for each.
        infer: ``(inputs, attributes) -> [(type, shape), …]``; by default inferred from the decomposition.
        override: replace a declaration of another module.
        options: ``attributes``, name → default (``graphc.ir.declare.REQUIRED`` for one without), and for the update of an
            optimizer ``next_value``, ``gradient`` and the like; see :class:`graphc.ir.declare.OpDeclaration`.

    Raises:
        UsageError: a name that is not ``domain::Op``, or that another module has declared.
    """

    def register(function: Decomposition) -> Decomposition:
        _register(
            name,
            make_declaration(
                name.rpartition("::")[2],
                inputs=inputs,
                outputs=outputs,
                infer=infer or _through_decomposition(name, function),
                doc=function.__doc__ or "",
                decompose=function,
                origin=function.__module__,
                **options,
            ),
            override,
        )
        return function

    return register


def custom_primitive(
    name: str,
    *,
    inputs: str,
    outputs: str,
    infer: InferFunction,
    doc: str,
    override: bool = False,
    **options: Unpack[OpOptions],
) -> OpDeclaration:
    """Declare an op without a decomposition: only a backend with a kernel for it runs it.

    Arguments and errors are those of :func:`custom_op`.
    """
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    origin = str(caller.f_globals["__name__"]) if caller else "?"
    op_type = name.rpartition("::")[2]
    declaration = make_declaration(
        op_type, inputs=inputs, outputs=outputs, infer=infer, doc=doc, decompose=None, origin=origin, **options
    )
    return _register(name, declaration, override)


def _register(name: str, declaration: OpDeclaration, override: bool) -> OpDeclaration:
    found = re.fullmatch(r"([\w.-]+)::(\w+)", name)
    if found is None or found[1] in ("ai.onnx", DOMAIN):
        raise UsageError(f"{name!r} is not a custom op name; write 'my.domain::Op', with a domain of your own")
    CUSTOM.register(name, declaration, origin=declaration.origin, override=override)
    return declaration


def _through_decomposition(name: str, function: Decomposition) -> InferFunction:
    """Infer types by emitting the decomposition into a graph of its own."""

    def infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> Sequence[Spec]:
        copies = [None if value is None else _copy(f"i{k}", value) for k, value in enumerate(inputs)]
        graph = ir.Graph(
            [value for value in copies if value is not None],
            [],
            nodes=[],
            opset_imports={"": OPSET, DOMAIN: DOMAIN_VERSION},
            name=name,
        )
        result = function(Builder(graph), *copies, **{k: v for k, v in attributes.items() if k not in PLACEMENT})
        return [spec_of(value) for value in (result if isinstance(result, tuple) else (result,))]

    return infer


def _copy(name: str, value: ir.Value) -> ir.Value:
    """A value of the same type and with the same known constant, because shapes may depend on it."""
    shape = ir.Shape(value.shape.dims) if value.shape is not None else None
    copy = ir.Value(name=name, type=value.type, shape=shape)
    producer = value.producer()
    if producer is not None and producer.op_type == "Constant" and producer.domain == "":
        copy.const_value = ir.convenience.get_const_tensor(value)
    elif not value.is_initializer():
        copy.const_value = value.const_value
    return copy


__all__ = ["custom_op", "custom_primitive"]

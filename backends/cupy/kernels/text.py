"""C text that kernels share: flat indices, loops over windows, loads and stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphc.backends.fusion import expressions
from graphc.ir.declare import declaration_of
from graphc.ir.facts import dtype_of, shape_of
from graphc.ir.ops.convolution import Window


def computed(value: ir.Value | None) -> str:
    """The C type that computes elements of ``value``."""
    return expressions.compute_type(dtype_of(value))


def load(value: ir.Value | None, name: str, place: str) -> str:
    """C text that loads an element of ``value``, whose pointer is ``name``."""
    return expressions.load(dtype_of(value), f"{name}[{place}]")


def store(value: ir.Value | None, name: str, place: str, result: str) -> str:
    """The statement that writes an element."""
    return expressions.store(dtype_of(value), f"{name}[{place}]", result)


def unflattened(source: str, shape: Sequence[int], names: Sequence[str]) -> str:
    """Statements that split the flat index ``source`` into one index per dimension, in row-major order."""
    lines, rest = [], source
    for k in reversed(range(len(shape))):
        if k == 0:
            lines.append(f"const INDEX {names[k]} = {rest};")
        else:
            lines.append(f"const INDEX {names[k]} = {rest} % {shape[k]}, {names[k]}_rest = {rest} / {shape[k]};")
            rest = f"{names[k]}_rest"
    return "\n".join(lines)


def flattened(names: Sequence[str], shape: Sequence[int]) -> str:
    """The flat index of a tuple of indices, in row-major order."""
    text = names[0] if names else "0"
    for name, size in zip(names[1:], shape[1:], strict=True):
        text = f"({text}) * {size} + {name}"
    return f"(INDEX)({text})"


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """The node's attributes as Python values, those of a ``graphc`` op with defaults."""
    declaration = declaration_of(node)
    if declaration is not None:
        return declaration.attribute_values(node)
    return {k: list(a.value) if isinstance(a.value, (list, tuple)) else a.value for k, a in node.attributes.items()}


def window_of(node: ir.Node, x: ir.Value | None, w: ir.Value | None = None) -> Window:
    """The window of a convolution or pooling over ``x``; without an attribute, ``w`` gives the kernel's sizes."""
    kernel = shape_of(w)[2:] if w is not None else None
    return Window.of(attributes_of(node), shape_of(x)[2:], kernel)


def over_taps(window: Window, size: Sequence[int], inside: str, *, at: str = "o", into: str = "i", tap: str = "t") -> str:
    """Loops over the taps ``t0, t1, …`` of the window at ``o0, o1, …`` that read an element ``i0, i1, …`` inside the tensor."""
    begin, _ = window.padding
    text = inside
    for k in reversed(range(len(window.kernel))):
        place = f"{at}{k} * {window.strides[k]} + {tap}{k} * {window.dilations[k]} - {begin[k]}"
        text = (
            f"for (int {tap}{k} = 0; {tap}{k} < {window.kernel[k]}; ++{tap}{k}) {{\n"
            f"const INDEX {into}{k} = {place};\nif ({into}{k} < 0 || {into}{k} >= {size[k]}) continue;\n{text}\n}}"
        )
    return text


def over_windows(window: Window, out: Sequence[int], inside: str, *, of: str = "i", at: str = "o", tap: str = "t") -> str:
    """Loops over the windows ``o0, o1, …`` that read the element ``i0, i1, …``, each by its tap ``t0, t1, …``."""
    begin, _ = window.padding
    text = inside
    for k in reversed(range(len(window.kernel))):
        stride, shift = window.strides[k], f"{of}{k} + {begin[k]} - {tap}{k} * {window.dilations[k]}"
        text = (
            f"for (int {tap}{k} = 0; {tap}{k} < {window.kernel[k]}; ++{tap}{k}) {{\n"
            f"const INDEX {at}{k}_far = {shift};\nif ({at}{k}_far < 0 || {at}{k}_far % {stride}) continue;\n"
            f"const INDEX {at}{k} = {at}{k}_far / {stride};\nif ({at}{k} >= {out[k]}) continue;\n{text}\n}}"
        )
    return text


def indices(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{k}" for k in range(count)]


def given(**values: ir.Value | None) -> Mapping[str, ir.Value]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}

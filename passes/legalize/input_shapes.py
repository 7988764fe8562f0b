"""Fixes dimensions of graph inputs before anything is inferred from them.

before   x: [n, 3, ?, ?]                      after --shape x=?,3,48,192     x: [n, 3, 48, 192]
before   x without a shape                    after --shape x=batch,10       x: [batch, 10]
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from graphc.errors import UsageError, nearest
from graphc.ir.facts import Dim, dims

_NAME = re.compile(r"[A-Za-z_]\w*")
_OPEN = "?"
"""A dimension that stays as the file says."""


def fix_input_shapes(graph: ir.Graph, texts: Sequence[str]) -> None:
    """Give inputs the dimensions of ``texts``, such as ``x=2;3;48;192``; one name of a dimension gets its size in every input.

    Raises:
        UsageError: no such input, another number of dimensions, a size below 1, or two sizes for one name.
    """
    inputs = {v.name or "": v for v in graph.inputs if not v.is_initializer()}
    sizes: dict[str, int] = {}
    for text in texts:
        name, equals, rest = text.rpartition("=")
        if not equals:
            raise UsageError(f"--shape {text!r} is not of the form NAME=2,3,48,192")
        if name not in inputs:
            raise UsageError(f"--shape: there is no input {name!r}{nearest(name, inputs)}; the inputs are {', '.join(inputs)}")
        value, wanted = inputs[name], [_dimension(text, part) for part in re.split("[,;]", rest)] if rest else []
        have = dims(value) or (None,) * len(wanted)
        if len(have) != len(wanted):
            raise UsageError(f"--shape {text}: the input {name!r} has {len(have)} dimensions, not {len(wanted)}")
        for old, new in zip(have, wanted, strict=True):
            if isinstance(old, str) and isinstance(new, int) and sizes.setdefault(old, new) != new:
                raise UsageError(f"--shape {text}: the dimension {old!r} has the size {sizes[old]} elsewhere")
        value.shape = ir.Shape([old if new == _OPEN else new for old, new in zip(have, wanted, strict=True)])
    for value in inputs.values():
        if value.shape is not None:
            value.shape = ir.Shape([sizes.get(d, d) if isinstance(d, str) else d for d in dims(value) or ()])


def _dimension(text: str, part: str) -> Dim:
    part = part.strip()
    if part.isdigit() and int(part) > 0:
        return int(part)
    if part == _OPEN or _NAME.fullmatch(part):
        return part
    raise UsageError(f"--shape {text}: {part!r} is neither a size of 1 or more, nor a name, nor '?' for as the file says")

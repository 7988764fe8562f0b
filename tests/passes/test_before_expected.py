"""Before/Expected tests of passes: every ``*.onnxtxt`` file beside this module is one or more cases.

A case reads

    // RUN: simplify                      the pipeline, as for ``graphc opt -p``
    // BEFORE
    <ir_version: 11, opset_import: ["" : 26]>
    g (float[2] x) => (float[2] y) { y = Identity (x) }
    // EXPECTED
    <ir_version: 11, opset_import: ["" : 26]>
    ...
    // ERROR: words of the message         instead of EXPECTED, when the pipeline must refuse the model

* Several cases stand in one file, each beginning with its ``// RUN:``; what follows a ``//`` otherwise is a remark.
* The two graphs are compared structurally (:func:`graphc.ir.equal.difference`): names of nodes and of intermediate values
  do not matter, order does. Metadata is written as ``#@ {json}`` (see :mod:`graphc.ir.text`), long tensors as ``{}``.
* The graphs are taken as legalised; a pass's ``requires`` count as done. Both are verified, but for what ``legalize`` and
  ``verify`` are given.
* Every built-in pass has a case.
* When a case fails, the message shows the first difference and the text that was produced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graphc.errors import GraphcError
from graphc.ir.equal import difference
from graphc.ir.text import from_text, to_text
from graphc.ir.verify import verify_model
from graphc.pipeline import PASSES, Context, parse, run

HERE = Path(__file__).parent
REMARK = re.compile(r"^//.*$", flags=re.MULTILINE)


class Case(NamedTuple):
    """One case of a file; ``expected`` is empty where there is an ``error``."""

    pipeline: str
    before: str
    expected: str
    error: str | None


def read_case(text: str) -> Case:
    pipeline, _, rest = text.partition("\n")
    error = re.search(r"^// ERROR:(.*)$", rest, flags=re.MULTILINE)
    before, _, expected = rest.partition("// BEFORE\n")[2].partition("// ERROR:" if error else "// EXPECTED\n")
    return Case(
        pipeline.strip(), REMARK.sub("", before), "" if error else REMARK.sub("", expected), error and error.group(1).strip()
    )


def cases() -> Iterator[Any]:
    for path in sorted(HERE.glob("*.onnxtxt")):
        parts = re.split(r"^// RUN:", path.read_text(), flags=re.MULTILINE)
        for k, part in enumerate(parts[1:]):
            yield pytest.param(read_case(part), id=f"{path.stem}-{k}")


CASES = list(cases())


@pytest.mark.parametrize("case", CASES)
def test_before_expected(case: Case) -> None:
    model, steps = from_text(case.before), parse(case.pipeline)
    if steps[0].name not in ("legalize", "verify"):
        verify_model(model)
    ctx = Context(done=sorted({name for step in steps for name in PASSES[step.name].requires}))
    if case.error is not None:
        with pytest.raises(GraphcError, match=re.escape(case.error)):
            run(model, case.pipeline, ctx)
        return
    run(model, case.pipeline, ctx)
    verify_model(model)
    wanted = from_text(case.expected)
    verify_model(wanted)
    found = difference(model, wanted)
    assert found is None, f"{found}\n\nproduced:\n{to_text(model)}"


def test_every_built_in_pass_has_a_case() -> None:
    shown = {PASSES[step.name].name for case in CASES if not case.values[0].error for step in parse(case.values[0].pipeline)}
    built_in = {entry.name for name, entry in PASSES.items() if PASSES.origin(name).startswith("graphc.passes.")}
    assert built_in - shown == {"verify"}, "verify makes nothing; it has a case that it refuses"

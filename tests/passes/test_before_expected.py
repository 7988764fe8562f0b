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
* The graphs are taken as legalised; a pass's ``requires`` count as done. Both are verified.
* When a case fails, the message shows the first difference and the text that was produced.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphc.errors import GraphcError
from graphc.ir.equal import difference
from graphc.ir.text import from_text, to_text
from graphc.ir.verify import verify_model
from graphc.pipeline import PASSES, Context, parse, run

HERE = Path(__file__).parent


def cases():
    for path in sorted(HERE.glob("*.onnxtxt")):
        parts = re.split(r"^// RUN:", path.read_text(), flags=re.MULTILINE)
        for k, part in enumerate(parts[1:]):
            yield pytest.param(part, id=f"{path.stem}-{k}")


def read_case(case):
    pipeline, _, rest = case.partition("\n")
    error = re.search(r"^// ERROR:(.*)$", rest, flags=re.MULTILINE)
    before, _, expected = rest.partition("// BEFORE\n")[2].partition("// ERROR:" if error else "// EXPECTED\n")
    remarks = re.compile(r"^//.*$", flags=re.MULTILINE)
    return pipeline.strip(), remarks.sub("", before), error.group(1).strip() if error else None, remarks.sub("", expected)


@pytest.mark.parametrize("case", list(cases()))
def test_before_expected(case):
    pipeline, before, error, expected = read_case(case)
    model = from_text(before)
    verify_model(model)
    ctx = Context(done=sorted({name for step in parse(pipeline) for name in PASSES[step.name].requires}))
    if error is not None:
        with pytest.raises(GraphcError, match=re.escape(error)):
            run(model, pipeline, ctx)
        return
    run(model, pipeline, ctx)
    verify_model(model)
    wanted = from_text(expected)
    verify_model(wanted)
    found = difference(model, wanted)
    assert found is None, f"{found}\n\nproduced:\n{to_text(model)}"


def test_there_are_cases():
    assert len(list(cases())) > 10

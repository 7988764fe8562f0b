"""Requests that the loss pass refuses, and the losses as Python and the command line name them."""

from __future__ import annotations

from typing import Any

import pytest

from graphc import losses
from graphc.errors import GraphcError, ModelError, UsageError
from graphc.passes.loss import loss
from graphc.pipeline import Context
from tests.passes.test_loss import graph_of, scores

# Bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "softmax_crossentropy"}, "did you mean 'softmax_cross_entropy'"),
        ({"kind": "mse", "delta": 1.0}, "'mse' has no option 'delta'"),
        ({"logits": "y"}, "no value 'y'"),
        ({"axis": 2}, "axis=2 does not exist"),
        ({"reduction": "average"}, "mean or sum"),
        ({"label_smoothing": 1.5}, "between 0 and 1"),
        ({"class_weight": [1.0, 2.0]}, "there are 5 classes"),
        ({"class_weight": "balance"}, "'balance' is no initializer"),
        ({"label_kind": "classes"}, "did you mean 'class'"),
        ({"kind": "mse", "label": "wide"}, "must have one shape"),
        ({"label": "wide"}, "floating point"),
        ({"label": "indices"}, "does not fit logits"),
        ({"kind": "huber", "delta": 0.0}, "above 0"),
        ({"kind": "output"}, "no floating-point scalar"),
        ({"kind": "model"}, "needs path"),
        ({"kind": "model", "path": "nowhere.onnx"}, "does not exist"),
        ({"label_kind": "probabilities", "ignore_index": 1}, "needs class indices"),
    ],
)
def test_bad_requests_say_what_is_wrong(options: dict[str, Any], message: str) -> None:
    model = scores("4,5", ", double[4,1] wide, int64[3] indices")
    if options.get("label") == "wide" and "kind" not in options:
        options = {**options, "label_kind": "class"}
    with pytest.raises(UsageError, match=message):
        loss(model, Context(), **options)


def test_softmax_over_another_axis_than_asked_for() -> None:
    model = graph_of("double[N,3,5] x) => (double[N,3,5] z", "z = Softmax<axis=2>(x)")
    with pytest.raises(UsageError, match=r"over axis 2 .* but the loss is over axis 1"):
        loss(model, Context(), axis=1)


def test_a_broken_loss_model_is_reported(tmp_path: Any) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07 not onnx")
    with pytest.raises(ModelError, match="cannot be read"):
        loss(scores("N,5"), Context(), kind="model", path=str(tmp_path / "broken.onnx"))


# The outside ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "softmax_cross_entropy:logits=L,label=Y,ignore_index=-100",
            losses.SoftmaxCrossEntropy(logits="L", label="Y", ignore_index=-100),
        ),
        ("softmax_cross_entropy:class_weight=1|2.5", losses.SoftmaxCrossEntropy(class_weight=[1.0, 2.5])),
        ("softmax_cross_entropy:class_weight=balance", losses.SoftmaxCrossEntropy(class_weight="balance")),
        ("nll", losses.NLL()),
        ("bce_with_logits:metrics", losses.BCEWithLogits(metrics=True)),
        ("mse:reduction=sum", losses.MSE(reduction="sum")),
        ("l1:prediction=p", losses.L1(prediction="p")),
        ("huber:delta=0.5", losses.Huber(delta=0.5)),
        ("output:name=score", losses.Output(name="score")),
        ("model:path=loss.onnx", losses.Model("loss.onnx")),
    ],
)
def test_command_line_form(text: str, expected: losses.Loss) -> None:
    assert losses.parse(text) == expected
    assert expected.step().options["kind"] == text.partition(":")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softmax", "did you mean 'softmax_cross_entropy'"),
        ("mse:lable=y", "did you mean 'label'"),
        ("huber:delta=wide", "delta='wide' is not float"),
        ("huber:delta", "delta"),
        ("mse:label=a,label=b", "given twice"),
        ("model", "path=FILE"),
    ],
)
def test_command_line_errors(text: str, message: str) -> None:
    with pytest.raises(GraphcError, match=message):
        losses.parse(text)

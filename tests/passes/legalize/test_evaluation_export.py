"""A default export loses BatchNormalization and Dropout; the advised one keeps them."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import graphc
from graphc import frontends
from graphc.errors import UsageError, nearest
from graphc.passes.legalize.evaluation_export import EXPORT_LINE
from graphc.pipeline import Context, PassCall, run, warnings_in
from tests.tiers import params


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3))


def warned(model: object, word: str = "BatchNormalization") -> list[str]:
    working, ctx = frontends.load(model).clone(), Context()
    run(working, [PassCall("legalize")], ctx)
    return [line for line in warnings_in(ctx.log) if word in line]


def test_a_folded_batchnorm_is_warned_of_with_the_line_that_keeps_it() -> None:
    x, buffer = torch.randn(2, 1, 4, 4), io.BytesIO()
    torch.onnx.export(network().eval(), (x,), buffer, dynamo=False)  # type: ignore[arg-type]
    (line,) = warned(onnx.load_from_string(buffer.getvalue()))
    assert "1 of 1 convolutions" in line
    assert "Dropout" in line
    assert EXPORT_LINE in line


@pytest.mark.full
def test_the_advised_export_keeps_batchnorm_and_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, args = network(), (torch.randn(2, 1, 4, 4),)
    exec(EXPORT_LINE, {"torch": torch, "model": model, "args": args})  # the line as the user would paste it
    assert not warned("model.onnx")
    program = graphc.compile("model.onnx", loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    ops = {node.op_type for node in program.model.graph}
    assert {"BatchNormalizationTraining", "DropoutMask"} <= ops
    trained = {name for name, _ in model.named_parameters()}
    assert {node.inputs[0].name for node in program.model.graph if node.op_type == "SGD"} == trained


class Dropping(nn.Module):
    """Dropout inside a Sequential of a list, or in layers that have it by default."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        shared = nn.ReLU() if kind == "shared" else None
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(4, 4),
                shared or nn.ReLU(),
                nn.Dropout(0.5) if kind == "sequential" else nn.Tanh(),
                nn.Linear(4, 4),
                shared or nn.ReLU(),
                nn.Linear(4, 4),
            )
            for _ in range(2)
        )
        if kind == "layer":
            self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.full
@pytest.mark.parametrize("dynamo", params([True, False], large=[False]))
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sequential", "2 modules left no node in the file (first: 'blocks.0"),
        ("layer", "TransformerEncoderLayer has Dropout by default"),
        ("none", None),
        pytest.param("shared", None, marks=pytest.mark.large),
    ],
)
def test_a_lost_dropout_is_warned_of_where_the_file_tells(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], dynamo: bool, kind: str, said: str | None
) -> None:
    if kind == "layer" and not dynamo:
        pytest.skip("the older exporter does not record classes, so its files do not tell")
    args, path = (torch.randn(2, 3, 4),), tmp_path / "m.onnx"
    torch.onnx.export(Dropping(kind).eval(), args, path, dynamo=dynamo)  # type: ignore[arg-type]
    found = [line for line in warned(path, "Dropout") if EXPORT_LINE in line]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    torch.onnx.export(Dropping(kind).train(), args, path, dynamo=True, optimize=False)  # type: ignore[arg-type]
    assert not warned(path, "Dropout")


@pytest.mark.full
def test_freezing_everything_is_told_by_name() -> None:
    with pytest.raises(UsageError, match=r"freeze='\*' covers all 6 parameters on the path to the loss"):
        graphc.compile(
            network(),
            loss=graphc.losses.MSE(),
            optimizer=graphc.optim.SGD(lr=0.1),
            freeze=["*"],
            example_inputs=(torch.randn(2, 1, 4, 4),),
        )


@pytest.mark.full
@pytest.mark.parametrize("option", ["freeze", "train"])
def test_a_pattern_that_matches_nothing_lists_near_names(option: str) -> None:
    with pytest.raises(UsageError, match=r"no parameter matches 'O\.weigth'; near: '\d\.weight'"):
        graphc.compile(
            network(),
            loss=graphc.losses.MSE(),
            optimizer=graphc.optim.SGD(lr=0.1),
            example_inputs=(torch.randn(2, 1, 4, 4),),
            **{option: ["O.weigth"]},
        )


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("legalise", ["legalize", "rebatch"], "legalize"),
        ("softmax", ["softmax_cross_entropy", "nll"], "softmax_cross_entropy"),
        ("encoder", ["decode_labels", "x"], None),
        ("cat.onnx", ["dog.onnx", "net.onnx"], None),
        ("modle.onnx", ["model.onnx"], "model.onnx"),
        ("mse", ["loss"], None),
    ],
)
def test_only_close_names_are_suggested(word: str, known: list[str], meant: str | None) -> None:
    assert nearest(word, known) == (f"; did you mean {meant!r}?" if meant else "")

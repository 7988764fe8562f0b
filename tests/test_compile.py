"""The arguments of ``graphc.compile``: where they come from, and what happens to wrong ones."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import pytest
import typer.main

import graphc
from graphc.backend import BACKENDS
from graphc.cli import _app
from graphc.cli.training.job import Job, from_json, to_json
from graphc.errors import MissingExtraError, UsageError
from graphc.ir.declare import is_update
from graphc.ir.updates import trains
from graphc.options import CompileOptions
from graphc.pipeline import PassCall, parse
from tests.cli.models import MLP
from tests.cli.models import parse as parsed

LOSS, OPTIMIZER = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
OPTIONS = [field.name for field in dataclasses.fields(CompileOptions)]


def test_every_option_is_a_keyword_of_compile_and_of_both_commands() -> None:
    parameters = inspect.signature(graphc.compile).parameters
    assert parameters.keys() >= {"model", "loss", "optimizer", "mesh", "backend", "passes", *OPTIONS}
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in parameters if name != "model")
    assert parameters["bucket_mb"].default == 25.0
    commands = typer.main.get_command(_app()).commands  # type: ignore[attr-defined]
    for command in ("train", "compile"):
        assert {parameter.name for parameter in commands[command].params} >= set(OPTIONS)


def test_a_job_is_the_same_after_a_round_trip_through_its_file() -> None:
    compilation = CompileOptions(freeze=["conv*"], batch="8", seed=3, strategy="zero:stage=2", clip_norm=1.0)
    job = Job(
        model="m.onnx",
        data="d.npz",
        loss="mse",
        optimizer="sgd",
        batch_size=16,
        workers=2,
        compilation=compilation,
        form=graphc.cli.terminal.output.Format.json,
    )
    again = from_json(to_json(job))
    assert again == job
    assert again.form is job.form


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cuppy", "unknown backend 'cuppy'; did you mean 'cupy'"),
        ("cupy:tf32=maybe", "tf32=maybe is neither true nor false"),
        ("cupy:tf23=true", "no option 'tf23'; did you mean 'tf32'"),
        ("numpy:fast", "no option 'fast'; it has none"),
    ],
)
def test_a_wrong_backend_ends_before_any_pass(backend: str, message: str, exported: Callable[[str], str]) -> None:
    ran: list[PassCall] = []
    with pytest.raises(UsageError, match=message):
        graphc.compile(
            exported("mlp"),
            loss=LOSS,
            optimizer=OPTIMIZER,
            backend=backend,
            after=lambda step, model, seconds: ran.append(step),
        )
    assert ran == []


def test_a_program_may_be_for_a_backend_that_cannot_run_here(
    exported: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS._missing, "elsewhere", MissingExtraError("run: pip install elsewhere"))
    program = graphc.compile(exported("mlp"), loss=LOSS, optimizer=OPTIMIZER, backend="elsewhere:fast=true")
    assert program.backend == "elsewhere:fast=true"
    with pytest.raises(MissingExtraError, match="pip install elsewhere"):
        graphc.Trainer(program)


def test_recompile_changes_what_it_is_told_and_nothing_else(exported: Callable[[str], str]) -> None:
    program = graphc.compile(exported("mlp"), loss=LOSS, optimizer=OPTIMIZER, freeze="*bias", bucket_mb=1.0, clip_norm=2.0)
    again = program.recompile(accumulate=2)
    changed = [step for step in parse(again.pipeline) if step.name == "accumulate"]
    assert [str(step) for step in changed] == ["accumulate{steps=2}"]
    assert again.pipeline.replace("accumulate{steps=2},", "") == program.pipeline
    own = graphc.compile(exported("mlp"), loss=LOSS, optimizer=OPTIMIZER, passes=program.pipeline)
    with pytest.raises(UsageError, match="pipeline of its own"):
        own.recompile(accumulate=2)


def test_a_program_prints_as_three_lines() -> None:
    program = graphc.compile(parsed(MLP), loss=LOSS, optimizer=OPTIMIZER)
    first, takes, reports = str(program).split("\n")
    assert "trains 4 parameters" in first
    assert "x:float[N,4], label:int64[N]" in takes
    assert "loss" in reports


def test_losses_and_optimizers_offer_only_what_is_theirs() -> None:
    for module in (graphc.losses, graphc.optim):
        assert all(getattr(module, name).__module__ == module.__name__ for name in dir(module) if not name.isupper())
        assert "PassCall" not in dir(module)
    assert {"SGD", "Adam", "Schedule", "parse"} <= set(dir(graphc.optim))
    assert {"MSE", "SoftmaxCrossEntropy", "Model", "parse"} <= set(dir(graphc.losses))


def test_a_trainer_has_a_signature_of_types_and_refuses_what_is_no_program() -> None:
    parameters = inspect.signature(graphc.Trainer).parameters
    assert parameters["program"].annotation is graphc.Program
    assert parameters["threads"].annotation == int | None
    with pytest.raises(UsageError, match="is not a compiled program; pass the result of"):
        graphc.Trainer("m.onnx")  # type: ignore[arg-type]


def test_who_names_what_trains_anyway_is_told_how_to_train_it_alone(recwarn: pytest.WarningsRecorder) -> None:
    model = parsed(MLP)
    names = [tensor.name for tensor in model.graph.initializer]
    with pytest.warns(UserWarning, match=rf"train='{names[-1]}' changes nothing.*other parameter.*freeze=\['\*'\]"):
        graphc.compile(model, loss=LOSS, optimizer=OPTIMIZER, train=[names[-1]])
    recwarn.clear()
    alone = graphc.compile(model, loss=LOSS, optimizer=OPTIMIZER, train=[names[-1]], freeze=["*"])
    graphc.compile(model, loss=LOSS, optimizer=OPTIMIZER, train=["*"])
    assert not recwarn.list
    assert [node.inputs[0].name for node in alone.model.graph if is_update(node) and trains(node)] == [names[-1]]

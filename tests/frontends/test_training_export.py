"""Training graphs of standard ops: plain onnxruntime takes the step that graphc's trainer takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import graphc
from graphc.bench.specs import SPECS
from graphc.cli import main
from graphc.errors import UnsupportedOpError
from graphc.frontends.training_export import NEXT, standard_model, training_info
from graphc.ir.names import LEARNING_RATE
from tests.frontends.zoo import LARGE, SMALL, path_of
from tests.tiers import params

MOMENTUM = graphc.optim.SGD(lr=1e-4, momentum=0.9)
ADAM = graphc.optim.Adam(lr=1e-3)

Arrays = dict[str, np.ndarray]


def session(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 2
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run_plain(proto: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """All outputs of a model, by name."""
    runner = session(proto)
    wanted = {v.name for v in runner.get_inputs()} | {v.name for v in runner.get_overridable_initializers()}
    names = [v.name for v in runner.get_outputs()]
    return dict(zip(names, runner.run(None, {k: v for k, v in feeds.items() if k in wanted}), strict=True))


def assert_standard(proto: onnx.ModelProto) -> None:
    onnx.checker.check_model(proto, full_check=True)
    pending = [proto.graph]
    while pending:
        graph = pending.pop()
        assert {n.domain for n in graph.node} <= {""}
        pending.extend(a.g for n in graph.node for a in n.attribute if a.HasField("g"))


def trainer_step(program: graphc.Program, feeds: Arrays, *, kernels: bool) -> tuple[float, Arrays]:
    """Loss of one step of the trainer and its state after it; ``kernels=False`` leaves graphc's own kernels out."""
    if not kernels:
        program = replace(program, arguments=replace(program.arguments, backend="onnxruntime:fuse=false"))
    with graphc.Trainer(program, threads=2) as trainer:
        if not kernels:
            trainer.backend.prefers_native = lambda node: False  # type: ignore[method-assign]
        loss = trainer.step(feeds)["loss"]
        return loss, {name: trainer.state.arrays[name].copy() for name in trainer.state.updated}


def norm(arrays: Arrays) -> float:
    return float(np.sqrt(sum(np.square(a, dtype=np.float64).sum() for a in arrays.values())))


def compare(program: graphc.Program, feeds: Arrays) -> None:
    """The exported graph against the trainer: value by value without graphc's own kernels, as a whole with them.

    Kernels round differently, so now and then a ReLU or a maximum of the forward pass decides otherwise: the gradient of that
    one unit is then another, in graphc as between any two convolution libraries. What kernels do apart from that is held to
    where the model is smooth (below).
    """
    proto = ir.to_proto(standard_model(program.model))
    assert_standard(proto)
    got = run_plain(proto, feeds)
    loss, state = trainer_step(program, feeds, kernels=False)
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert {name.removesuffix(NEXT) for name in got if name.endswith(NEXT)} == set(state)
    assert_alike(got, state)
    before = {name: program.model.graph.initializers[name].const_value.numpy() for name in state}
    assert any((value != before[name]).any() for name, value in state.items())
    loss, fast = trainer_step(program, feeds, kernels=True)
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    weights = {n: v for n, v in fast.items() if n in program.inference.graph.initializers}
    assert norm({n: got[n + NEXT] - v for n, v in weights.items()}) <= 1e-5 * norm(weights)


def assert_alike(got: Arrays, state: Arrays, floor: float = 1e-6) -> None:
    """Every element within 1e-5, in units of the largest of its tensor, or of ``floor`` where that is smaller."""
    for name, value in state.items():
        scale = max(float(np.abs(value).max()), floor)
        np.testing.assert_allclose(got[name + NEXT], value, rtol=0, atol=1e-5 * scale, err_msg=name)


def smooth(path: str | Path) -> onnx.ModelProto:
    """The model with Elu for Relu and averages for maxima: rounding decides nothing any more."""
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "Relu":
            node.op_type = "Elu"
        elif node.op_type == "MaxPool":
            node.op_type = "AveragePool"
            kept = [a for a in node.attribute if a.name in ("kernel_shape", "strides", "pads", "auto_pad", "ceil_mode")]
            del node.attribute[:]
            node.attribute.extend(kept)
    return model


def compare_kernels(program: graphc.Program, feeds: Arrays) -> None:
    """The trainer with its own kernels against the exported graph of a smooth model: weights one by one, the step as a whole.

    Some gradients are 0 but for rounding, as of a bias in front of a batch normalisation, and have no scale of their own: they
    are held to 1e-7, float32's resolution of the activations (of order 1) to which such a bias is added.
    """
    got = run_plain(ir.to_proto(standard_model(program.model)), feeds)
    loss, state = trainer_step(program, feeds, kernels=True)
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert_alike(got, {n: v for n, v in state.items() if n in program.inference.graph.initializers}, floor=1e-2)
    moved = {n: v.astype(np.float64) - program.model.graph.initializers[n].const_value.numpy() for n, v in state.items()}
    assert norm({n: got[n + NEXT] - v for n, v in state.items()}) <= 1e-5 * norm(moved)


def zoo_feeds(program: graphc.Program, batch: int = 2) -> Arrays:
    rng = np.random.default_rng(0)
    feeds: Arrays = {}
    for value in program.model.graph.inputs:
        shape = tuple(d if isinstance(d, int) else batch for d in value.shape)
        is_label = value.name == "label"
        feeds[value.name] = rng.integers(0, 1000, shape) if is_label else 0.1 * rng.standard_normal(shape, dtype=np.float32)
    return feeds


def zoo_program(path: Path | onnx.ModelProto, batch: int | str, optimizer: Any = MOMENTUM) -> graphc.Program:
    return graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=optimizer, batch=batch, initialize="he")


@pytest.mark.full
@pytest.mark.parametrize("name", params((*SMALL, *LARGE), large={*SMALL, *LARGE} - {"squeezenet"}))
def test_zoo_models_step_alike_in_plain_onnxruntime(name: str) -> None:
    program = zoo_program(path_of(name), 2)
    compare(program, zoo_feeds(program))


@pytest.mark.large
@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "resnet50"])
def test_kernels_step_alike_on_smooth_zoo_models(name: str) -> None:
    """Grouped, strided and residual convolutions, with batch normalisation and without."""
    program = zoo_program(smooth(path_of(name)), 2)
    compare_kernels(program, zoo_feeds(program))


@pytest.mark.full
@pytest.mark.parametrize("name", params(["shufflenet", "inception_v1", "squeezenet"], large=["shufflenet", "inception_v1"]))
def test_a_symbolic_batch_stays_symbolic(name: str) -> None:
    """Grouped convolutions, concatenation, every kind of pooling; one file for any batch."""
    program = zoo_program(path_of(name), "N")
    proto = ir.to_proto(standard_model(program.model))
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    for batch in (1, 3):
        feeds = zoo_feeds(program, batch)
        loss, _ = trainer_step(program, feeds, kernels=False)
        assert run_plain(proto, feeds)["loss"] == pytest.approx(loss, rel=1e-5)


def exported_program(name: str, exported: Callable[[str], str], optimizer: Any) -> tuple[graphc.Program, Arrays]:
    program = graphc.compile(exported(name), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=optimizer)
    x, y = SPECS[name].batch(3)
    return program, {"input": x, "label": y}


OPTIMIZERS = {"momentum": MOMENTUM, "adam": ADAM}
CASES = [(m, o) for m in ("mlp", "lenet", "transformer-small", "resnet18-small") for o in OPTIMIZERS]
QUICK = {("mlp", "adam"), ("lenet", "momentum")}
OTHERS = {("resnet18-small", "adam"), ("transformer-small", "momentum")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "optimizer"),
    params(
        CASES, full=[c for c in CASES if c not in QUICK], large=[("resnet18-small", "adam"), ("transformer-small", "momentum")]
    ),
)
def test_exported_models_step_alike_in_plain_onnxruntime(name: str, optimizer: str, exported: Callable[[str], str]) -> None:
    program, feeds = exported_program(name, exported, OPTIMIZERS[optimizer])
    compare(program, feeds)


@pytest.mark.full
@pytest.mark.parametrize("name", params(["mlp", "lenet", "transformer-small", "resnet18-small"], large=["transformer-small"]))
def test_kernels_step_alike_on_smooth_exported_models(name: str, exported: Callable[[str], str]) -> None:
    program = graphc.compile(smooth(exported(name)), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=MOMENTUM)
    x, y = SPECS[name].batch(3)
    compare_kernels(program, {"input": x, "label": y})


@pytest.mark.full
@pytest.mark.large
@pytest.mark.parametrize("name", ["squeezenet", "resnet50", "transformer"])
def test_large_exported_models_step_alike_in_plain_onnxruntime(name: str, exported: Callable[[str], str]) -> None:
    program, feeds = exported_program(name, exported, MOMENTUM)
    compare(program, feeds)


def test_state_can_be_fed_back(exported: Callable[[str], str]) -> None:
    """Three steps by a caller that knows no more than the names."""
    program, feeds = exported_program("lenet", exported, ADAM)
    proto = ir.to_proto(standard_model(program.model))
    state: Arrays = {LEARNING_RATE: np.array(0.002, np.float32)}
    losses = []
    for _ in range(3):
        got = run_plain(proto, {**feeds, **state})
        losses.append(float(got["loss"]))
        state.update({name.removesuffix(NEXT): value for name, value in got.items() if name.endswith(NEXT)})
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.learning_rate = 0.002
        expected = [trainer.step(feeds)["loss"] for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[0] > losses[2]


# Training information -------------------------------------------------------------------------------------------------


class Interpreter:
    """ONNX's definition of a model with training information, in words: onnx.proto, message TrainingInfoProto."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        (self.info,) = model.training_info
        self.variables: Arrays = {}
        self.reset()

    def combined(self) -> onnx.ModelProto:
        """The graph that one step executes: inference graph and algorithm, list by list."""
        both = onnx.ModelProto()
        both.CopyFrom(self.model)
        del both.training_info[:]
        for field in ("input", "initializer", "output", "node", "value_info"):
            getattr(both.graph, field).extend(getattr(self.info.algorithm, field))
        return both

    def reset(self) -> None:
        """Variables as their initializers have them, then as ``initialization`` makes them."""
        held = {t.name: t for t in [*self.model.graph.initializer, *self.info.algorithm.initializer]}
        assert len({b.key for b in self.info.update_binding}) == len(self.info.update_binding)
        self.variables = {b.key: onnx.numpy_helper.to_array(held[b.key]) for b in self.info.update_binding}
        start = onnx.ModelProto(ir_version=self.model.ir_version, graph=self.info.initialization)
        start.opset_import.extend(self.model.opset_import)
        onnx.checker.check_model(start, full_check=True)
        made = run_plain(start, {})
        self.variables.update({b.key: made[b.value] for b in self.info.initialization_binding})

    def with_variables(self, model: onnx.ModelProto) -> onnx.ModelProto:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        for tensor in copy.graph.initializer:
            if tensor.name in self.variables:
                tensor.CopyFrom(onnx.numpy_helper.from_array(self.variables[tensor.name], tensor.name))
        return copy

    def step(self, feeds: Arrays) -> Arrays:
        got = run_plain(self.with_variables(self.combined()), feeds)
        self.variables.update({b.key: got[b.value] for b in self.info.update_binding})
        return got

    def infer(self, feeds: Arrays) -> Arrays:
        alone = self.with_variables(self.model)
        del alone.training_info[:]
        return run_plain(alone, feeds)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", params(["lenet", "resnet18-small", "transformer-small"], large=["resnet18-small", "transformer-small"])
)
def test_training_information_trains(name: str, exported: Callable[[str], str], tmp_path: Path) -> None:
    program, feeds = exported_program(name, exported, MOMENTUM)
    proto = training_info(program)
    onnx.checker.check_model(proto, full_check=True)
    runner = Interpreter(onnx.ModelProto.FromString(proto.SerializeToString()))
    assert_standard(runner.combined())
    label = {"label"} & {v.name for v in proto.graph.input}
    assert not label, "the inference graph takes no label"
    before = runner.infer(feeds)
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.backend.prefers_native = lambda node: False  # type: ignore[method-assign]
        for _ in range(2):
            expected = trainer.step(feeds)["loss"]
            assert runner.step(feeds)["loss"] == pytest.approx(expected, rel=1e-5)
        assert runner.variables.keys() == set(trainer.state.updated)
        for key, value in runner.variables.items():
            scale = max(np.abs(value).max(), 1e-6)
            np.testing.assert_allclose(value, trainer.state.arrays[key], rtol=0, atol=1e-5 * scale, err_msg=key)
        trainer.export(tmp_path / "trained.onnx")
    trained = run_plain(onnx.load(tmp_path / "trained.onnx"), feeds)
    for key, value in runner.infer(feeds).items():
        np.testing.assert_allclose(value, trained[key], rtol=1e-4, atol=1e-5)
        assert np.abs(value - before[key]).max() > 1e-4
    moved = dict(runner.variables)
    runner.reset()
    assert any(np.abs(moved[b.key]).max() > 0 for b in runner.info.initialization_binding)
    for binding in runner.info.initialization_binding:
        assert not runner.variables[binding.key].any()


@pytest.mark.full
def test_a_running_average_that_starts_elsewhere_is_reset_to_there(exported: Callable[[str], str]) -> None:
    """Weights and running statistics lie in the inference graph, whose initializers say where they start."""
    program, _ = exported_program("resnet18-small", exported, MOMENTUM)
    proto = training_info(program)
    own = {t.name for t in proto.training_info[0].algorithm.initializer}
    theirs = {t.name for t in proto.graph.initializer}
    assert not own & theirs
    assert {b.key for b in proto.training_info[0].initialization_binding} <= own
    assert "features.1.running_mean" in theirs


# Command line and bad input -------------------------------------------------------------------------------------------


def compile_file(*arguments: str) -> int:
    return main(["compile", *arguments, "--loss", "softmax_cross_entropy", "--optimizer", "adam"])


def test_the_command_writes_both_kinds(
    exported: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.onnx"
    assert compile_file(exported("lenet"), "-o", str(out), "--standard", "--format", "json") == 0
    proto = onnx.load(out)
    assert_standard(proto)
    assert json.loads(capsys.readouterr().out)["standard_nodes"] == len(proto.graph.node)
    assert compile_file(exported("lenet"), "-o", str(out), "--training-info", "--format", "json") == 0
    proto = onnx.load(out)
    assert json.loads(capsys.readouterr().out)["standard_nodes"] == len(proto.training_info[0].algorithm.node)
    assert [v.name for v in proto.graph.input] == ["input"]
    assert len(run_plain(proto, {"input": SPECS["lenet"].batch(2)[0]})) == 1


def test_an_op_that_needs_static_sizes_is_named(tmp_path: Path) -> None:
    """A grouped convolution over a symbolic number of channels has no weight gradient in standard ops."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[batch, channels, 6] x) => (float loss) {
            y = Conv <group: int = 2> (x, w)  loss = ReduceSum <keepdims: int = 0> (y) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 2, 3), np.float32), "w"))
    program = graphc.compile(model, loss=graphc.losses.Output(), optimizer=graphc.optim.SGD(lr=0.1))
    with pytest.raises(UnsupportedOpError, match=r"graphc\.ConvGradWeight[\s\S]*x\['batch', 'channels', 6\].*--batch N"):
        standard_model(program.model)

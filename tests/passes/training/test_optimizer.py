"""The optimizer pass against ``torch.optim``: 20 steps of every option, in float64 and float32."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import graphc
from graphc import optim
from graphc.errors import GraphcError, UsageError
from graphc.ir.builder import Builder
from graphc.ir.declare import OPS
from graphc.ir.facts import state_updates
from graphc.ir.infer import propagate
from graphc.ir.names import LEARNING_RATE, STEP
from graphc.passes.legalize.decompose import decompose
from graphc.passes.training.autodiff import autodiff
from graphc.passes.training.loss import loss
from graphc.passes.training.optimizer import optimizer
from graphc.pipeline import Context

Array = np.ndarray[Any, Any]

STEPS = 20


def linear(dtype: str = "double", batch: str = "N") -> ir.Model:
    """z = x·w + b with parameters w (3, 2) and b (2,)."""
    text = f"""<ir_version: 11, opset_import: ["" : 26]> g ({dtype}[{batch},3] x) => ({dtype}[{batch},2] z)
        <{dtype}[3,2] w = {{0.5, -1.0, 0.25, 2.0, -0.75, 1.5}}, {dtype}[2] b = {{0.1, -0.2}}>
        {{ m = MatMul(x, w) z = Add(m, b) }}"""
    model = ir.from_onnx_text(text)
    for k, node in enumerate(model.graph):
        node.name = f"node{k}"
    propagate(model.graph)
    return model


def trained(dtype: str = "double", *, loss_options: Mapping[str, Any] | None = None, **options: Any) -> ir.Model:
    """The model with a loss, gradients and the optimizer of ``options``."""
    model = linear(dtype)
    loss(model, Context(), **(loss_options or {"kind": "mse"}))
    autodiff(model, Context())
    optimizer(model, Context(), **options)
    return model


class Stepper:
    """Runs the decomposed training graph in onnxruntime, its state fed back from step to step."""

    def __init__(self, model: ir.Model) -> None:
        updates = [(state.name, following) for _, state, following in state_updates(model.graph)]
        model.graph.outputs.extend(following for _, following in updates)
        self.names = [str(name) for name, _ in updates]
        decompose(model, Context())
        proto = ir.to_proto(model)
        onnx.checker.check_model(proto, full_check=True)
        initial = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
        self.state = {name: initial[name] for name in self.names}
        for name, array in self.state.items():
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, array.shape))
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = 1
        self.session = ort.InferenceSession(proto.SerializeToString(), settings, providers=["CPUExecutionProvider"])

    def step(self, feeds: Mapping[str, Array]) -> float:
        reported, *following = self.session.run(None, {**feeds, **self.state})
        self.state = dict(zip(self.names, following, strict=True))
        return float(reported)


def batches(dtype: str, seed: int = 0) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    kind = np.float64 if dtype == "double" else np.float32
    return [{"x": rng.normal(size=(5, 3)).astype(kind), "label": rng.normal(size=(5, 2)).astype(kind)} for _ in range(STEPS)]


def in_torch(factory: Any, dtype: str, feeds: list[dict[str, Array]], reduction: str = "mean") -> tuple[list[float], Any, Any]:
    """Train the same model with PyTorch; returns losses, w, b."""
    kind = torch.float64 if dtype == "double" else torch.float32
    w = torch.tensor([[0.5, -1.0], [0.25, 2.0], [-0.75, 1.5]], dtype=kind, requires_grad=True)
    b = torch.tensor([0.1, -0.2], dtype=kind, requires_grad=True)
    rule = factory([w, b])
    values = []
    for feed in feeds:
        rule.zero_grad()
        value = torch.nn.functional.mse_loss(torch.tensor(feed["x"]) @ w + b, torch.tensor(feed["label"]), reduction=reduction)
        value.backward()
        rule.step()
        values.append(float(value.detach()))
    return values, w.detach().numpy(), b.detach().numpy()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "weight_decay": 0.01}),
    ("sgd", {"lr": 0.05, "momentum": 0.9}),
    ("sgd", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    ("sgd", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("sgd", {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 1e-3}),
    ("sgd", {"lr": 0.05, "momentum": 0.8, "dampening": 0.1, "weight_decay": 1e-3}),
    ("adam", {}),
    ("adam", {"lr": 0.01, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6}),
    ("adam", {"lr": 0.01, "weight_decay": 0.02}),
    ("adamw", {}),
    ("adamw", {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.0}),
    ("adagrad", {}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.01, "eps": 1e-8, "initial_accumulator_value": 0.1, "weight_decay": 0.01}),
    ("rmsprop", {}),
    ("rmsprop", {"lr": 1e-3, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.01}),
    ("rmsprop", {"lr": 1e-3, "momentum": 0.9}),
    ("rmsprop", {"lr": 1e-3, "centered": True}),
    ("rmsprop", {"lr": 1e-3, "centered": True, "momentum": 0.5, "weight_decay": 0.01}),
]

CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


def torch_factory(name: str, options: Mapping[str, Any], dtype: str = "double") -> Any:
    """The learning rate of parameters of float32 is float32."""
    given = dict(options)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    factory = getattr(torch.optim, CLASSES[name])
    given.setdefault("lr", inspect.signature(factory).parameters["lr"].default)
    if dtype == "float":
        given["lr"] = float(np.float32(given["lr"]))
    return lambda parameters: factory(parameters, **given)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["double", "float"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda o: "+".join(o) if isinstance(o, dict) else o)
def test_twenty_steps_follow_pytorch(name: str, options: dict[str, Any], dtype: str) -> None:
    feeds = batches(dtype)
    stepper = Stepper(trained(dtype, name=name, **options))
    got = [stepper.step(feed) for feed in feeds]
    want, w, b = in_torch(torch_factory(name, options, dtype), dtype, feeds)
    relative = 1e-10 if dtype == "double" else 2e-6
    absolute = 1e-12 if dtype == "double" else 1e-6
    np.testing.assert_allclose(got, want, rtol=relative)
    np.testing.assert_allclose(stepper.state["w"], w, rtol=relative, atol=absolute)
    np.testing.assert_allclose(stepper.state["b"], b, rtol=relative, atol=absolute)
    assert stepper.state[STEP] == STEPS


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_default_pipeline_takes_every_optimizer_with_its_defaults(name: str) -> None:
    text = """<ir_version: 10, opset_import: ["": 22]> g (float[N,3] input) => (float[N,2] logits)
      <float[3,2] w = {1, 2, 3, 4, 5, 6}> { logits = MatMul(input, w) }"""
    model = onnx.parser.parse_model(text)
    program = graphc.compile(model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.parse(name))
    assert CLASSES[name] in {node.op_type for node in program.model.graph}


def test_a_summed_loss_has_no_divisor() -> None:
    feeds = batches("double")
    stepper = Stepper(trained(loss_options={"kind": "mse", "reduction": "sum"}, name="sgd", lr=0.01))
    got = [stepper.step(feed) for feed in feeds]
    want, w, _ = in_torch(torch_factory("sgd", {"lr": 0.01}), "double", feeds, reduction="sum")
    np.testing.assert_allclose(got, want, rtol=1e-10)
    np.testing.assert_allclose(stepper.state["w"], w, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["double", "float"])
def test_the_learning_rate_is_state_that_a_schedule_can_write(dtype: str) -> None:
    """Of the parameters' type: a rate of 0.1 in float32 is off by 1e-8, which training in float64 would show."""
    model = trained(dtype, name="adam", lr=0.1)
    rate = model.graph.initializers[LEARNING_RATE]
    assert rate.const_value is not None
    assert rate.const_value.numpy() == (0.1 if dtype == "double" else np.float32(0.1))
    assert rate.dtype == (ir.DataType.DOUBLE if dtype == "double" else ir.DataType.FLOAT)


def test_state_is_named_after_its_parameter_in_file_order() -> None:
    model = trained(name="rmsprop", centered=True, momentum=0.9)
    states = [(state.name, following.name) for _, state, following in state_updates(model.graph)]
    expected = [STEP]
    for parameter in ("w", "b"):
        expected += [parameter, *(f"{parameter}::{s}" for s in ("square_avg", "grad_avg", "momentum_buffer"))]
    assert states == [(name, f"{name}::next") for name in expected]


def test_a_saved_and_reloaded_graph_takes_the_same_steps(tmp_path: Any) -> None:
    feeds = batches("double")
    ir.save(trained(name="adam", beta2=0.9995, eps=1e-7), tmp_path / "m.onnx")
    direct, reloaded = Stepper(trained(name="adam", beta2=0.9995, eps=1e-7)), Stepper(ir.load(tmp_path / "m.onnx"))
    for feed in feeds:
        assert direct.step(feed) == reloaded.step(feed)
    np.testing.assert_array_equal(direct.state["w"], reloaded.state["w"])


def test_every_update_declares_what_ranks_must_sum() -> None:
    """Two halves of a batch, their gradients and weights summed as ``reduces`` says, give the step of the whole batch."""
    feed = batches("double")[0]
    shares = [{k: v[:4] for k, v in feed.items()}, {k: v[4:] for k, v in feed.items()}]
    model = trained(name="adam", lr=0.1)
    node = next(n for n in model.graph if n.op_type == "Adam")
    declaration = OPS["Adam"]
    summed = {declaration.inputs[k].name for k in declaration.reduces}
    assert summed == {"grad", "divisor"}
    grad, divisor = node.inputs[1], node.inputs[6]
    assert grad is not None
    assert divisor is not None
    model.graph.outputs.extend([grad, divisor])
    update = Stepper(trained(name="adam", lr=0.1))
    parts = Stepper(model)
    width = len(parts.names)
    totals = [parts.session.run(None, {**share, **parts.state})[1 : -width or None] for share in shares]
    mean_gradient = sum(t[0] for t in totals) / sum(t[1] for t in totals)
    update.step(feed)
    whole = update.session.run(None, {**feed, **parts.state})
    leaf = torch.tensor([[0.5, -1.0], [0.25, 2.0], [-0.75, 1.5]], dtype=torch.float64, requires_grad=True)
    leaf.grad = torch.tensor(mean_gradient)
    torch.optim.Adam([leaf], lr=0.1).step()
    np.testing.assert_allclose(whole[1 + update.names.index("w")], leaf.detach().numpy(), rtol=1e-10)


def test_running_average_and_increment() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 26}, name="g")
    values = [ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2])) for n in ("running", "batch")]
    values.append(ir.Value(name="samples", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([])))
    count = ir.Value(name="count", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.inputs.extend([*values, count])
    op = Builder(graph)
    graph.outputs.extend([op.graphc.RunningAverage(*values, momentum=0.75), op.graphc.Increment(count)])
    model = ir.Model(graph, ir_version=11)
    decompose(model, Context())
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"running": np.array([4.0, 0.0], np.float32), "batch": np.array([0.0, 24.0], np.float32)}
    feeds |= {"samples": np.array(3, np.float32), "count": np.array(41)}
    running, following = session.run(None, feeds)
    np.testing.assert_array_equal(running, [3.0, 2.0])
    assert following == 42


# Bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adem"}, "did you mean 'adam'"),
        ({"name": "adam", "momentum": 0.9}, "'adam' has no option 'momentum'"),
        ({"name": "sgd", "lr": -1.0}, "lr=-1.0 is out of range"),
        ({"name": "adam", "beta2": 1.0}, "below 1"),
        ({"name": "sgd", "lr": float("nan")}, "out of range"),
        ({"name": "sgd", "nesterov": True}, "nesterov needs a momentum"),
        ({"name": "sgd", "nesterov": True, "momentum": 0.9, "dampening": 0.1}, "no dampening"),
    ],
)
def test_bad_options_say_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trained(**options)


def test_without_gradients_or_with_a_second_optimizer() -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        optimizer(linear(), Context())
    model = trained(name="sgd")
    with pytest.raises(UsageError, match="'w' is updated already"):
        optimizer(model, Context())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adam:lr=1e-3", optim.Adam(lr=1e-3)),
        ("sgd:lr=0.1,momentum=0.9,nesterov", optim.SGD(lr=0.1, momentum=0.9, nesterov=True)),
        ("adamw", optim.AdamW()),
        ("adagrad:lr_decay=0.1", optim.Adagrad(lr_decay=0.1)),
        ("rmsprop:centered=true,alpha=0.9", optim.RMSprop(centered=True, alpha=0.9)),
    ],
)
def test_command_line_form(text: str, expected: optim.Optimizer) -> None:
    assert optim.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adma", "did you mean 'adam'"),
        ("adam:momentum=0.9", "no option 'momentum'"),
        ("sgd:lr=fast", "lr='fast' is not a number"),
        ("sgd:lr", "lr"),
        ("rmsprop:alfa=0.9", "did you mean 'alpha'"),
    ],
)
def test_command_line_errors(text: str, message: str) -> None:
    with pytest.raises(GraphcError, match=message):
        optim.parse(text)


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_those_of_pytorch(name: str) -> None:
    ours = optim.OPTIMIZERS[name]()
    theirs = inspect.signature(getattr(torch.optim, CLASSES[name])).parameters
    options = dict(ours.step().options)
    assert options.pop("name") == name
    if "beta1" in options:
        assert (options.pop("beta1"), options.pop("beta2")) == theirs["betas"].default
    assert options == {key: theirs[key].default for key in options}
    explicit, implied = trained(**ours.step().options), trained(name=name)
    for a, b in zip(explicit.graph, implied.graph, strict=True):
        assert {k: v.value for k, v in a.attributes.items() if k != "value"} == {
            k: v.value for k, v in b.attributes.items() if k != "value"
        }


def test_the_zeros_that_moments_start_from_take_no_memory() -> None:
    weight = np.ones((1024, 64), np.float32)
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["m"]), onnx.helper.make_node("ReduceSum", ["m"], ["z"], keepdims=0)]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", [8, 1024]), ("z", []))
    ]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], [onnx.numpy_helper.from_array(weight, "w")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    program = graphc.compile(model, loss=graphc.losses.Output("z"), optimizer=optim.AdamW(lr=1e-3))
    moments = [value for name, value in program.model.graph.initializers.items() if name.startswith("w::exp_avg")]
    assert len(moments) == 2
    for value in moments:
        array = value.const_value.numpy()
        assert array.shape == weight.shape
        assert not array.any()
        whole = array if array.base is None else array.base
        assert whole.nbytes <= 8, "one number stands for all"

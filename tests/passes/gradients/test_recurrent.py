"""RNN, GRU and LSTM: the Scan against onnxruntime's kernels, gradients against differences and against PyTorch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import graphc
from graphc.backend import make_backend
from graphc.errors import ModelError, UnsupportedOpError
from graphc.ir.builder import Builder
from graphc.ir.decomposition import replace_nodes
from graphc.ir.ops.recurrent import RECURRENT, recurrence
from graphc.ir.ops.recurrent_training import training_form
from graphc.ir.text import from_text
from graphc.ir.verify import verify_model
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.plan.specialise import prepare
from graphc.training.inference import run_model
from tests.gradient_check import Array, Run, check_gradient, gradients, new_model, normal, on_onnxruntime, reference

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
TIME, BATCH, INPUT, HIDDEN = 4, 3, 2, 3
RAGGED = {"lengths": [4, 2, 1], "bias": False, "initial": False}
WAYS = ("forward", "reverse", "bidirectional")

CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"direction": way}) for kind in GATES for way in WAYS),
    *((kind, {"direction": way, **RAGGED}) for kind in GATES for way in WAYS),
    *((kind, {"clip": 0.3}) for kind in GATES),
    ("LSTM", {"peepholes": True, "direction": "bidirectional", "lengths": [2, 4, 3]}),
    ("LSTM", {"peepholes": True, "clip": 0.2}),
    ("LSTM", {"input_forget": 1}),
    ("LSTM", {"activations": ["Sigmoid", "Elu", "Softsign"]}),
    (
        "LSTM",
        {
            "activations": ["HardSigmoid", "ScaledTanh", "Affine"],
            "activation_alpha": [0.3, 0.9, 1.2],
            "activation_beta": [0.4, 0.8, 0.1],
        },
    ),
    ("GRU", {"linear_before_reset": 1, "direction": "bidirectional"}),
    ("GRU", {"linear_before_reset": 1, "bias": False}),
    ("GRU", {"activations": ["HardSigmoid", "LeakyRelu"], "activation_alpha": [0.3, 0.2], "activation_beta": [0.4]}),
    ("RNN", {"activations": ["Tanh", "Softplus"], "direction": "bidirectional"}),
    ("RNN", {"activations": ["Relu"]}),
    ("RNN", {"activations": ["ThresholdedRelu"], "activation_alpha": [0.1]}),
]
BATCH_FIRST: list[tuple[str, dict[str, Any]]] = [
    (kind, {"layout": 1, "direction": "bidirectional", "lengths": [4, 2, 1]}) for kind in GATES
]


def label(case: tuple[str, dict[str, Any]]) -> str:
    return f"{case[0]}({','.join(f'{k}={v}' for k, v in case[1].items())})"


def layer(
    kind: str,
    *,
    dtype: Any = np.float64,
    direction: str = "forward",
    bias: bool = True,
    lengths: list[int] | None = None,
    initial: bool = True,
    peepholes: bool = False,
    layout: int = 0,
    symbolic: int = 0,
    time: int = TIME,
    **attributes: Any,
) -> tuple[ir.Model, dict[str, Array]]:
    """A model of one recurrent node, and feeds for its inputs."""
    count, gates = 2 if direction == "bidirectional" else 1, GATES[kind]
    state = (BATCH, count, HIDDEN) if layout else (count, BATCH, HIDDEN)
    shapes = {
        "x": (BATCH, time, INPUT) if layout else (time, BATCH, INPUT),
        "w": (count, gates * HIDDEN, INPUT),
        "r": (count, gates * HIDDEN, HIDDEN),
        **({"b": (count, 2 * gates * HIDDEN)} if bias else {}),
        **({"h": state} if initial else {}),
        **({"c": state} if initial and kind == "LSTM" else {}),
        **({"p": (count, 3 * HIDDEN)} if peepholes else {}),
    }
    feeds = {name: (normal(*shape, seed=k).value * 0.6).astype(dtype) for k, (name, shape) in enumerate(shapes.items())}
    model, values = new_model(feeds)
    v = {value.name: value for value in values}
    if symbolic:
        v["x"].shape = ir.Shape(["batch", "time", INPUT] if layout else ["time", "batch", INPUT])
        for name in ("h", "c"):
            if name in v:
                v[name].shape = ir.Shape(["batch", count, HIDDEN] if layout else [count, "batch", HIDDEN])
    op = Builder(model.graph)
    sizes = op.const(np.array(lengths, dtype=np.int32)) if lengths else None
    inputs = [v["x"], v["w"], v["r"], v.get("b"), sizes, v.get("h")]
    if kind == "LSTM":
        inputs += [v.get("c"), v.get("p")]
    attributes = {"direction": direction, "hidden_size": HIDDEN, **({"layout": layout} if layout else {}), **attributes}
    made = op.emit(kind, inputs, attributes, outputs=3 if kind == "LSTM" else 2, name=kind)
    model.graph.outputs.extend(made)
    return model, feeds


def expanded(model: ir.Model) -> ir.Model:
    copy = ir.from_proto(ir.to_proto(model))
    replace_nodes(Builder(copy.graph), copy.graph, dict.fromkeys(RECURRENT, recurrence))
    return copy


def as_scan(model: ir.Model) -> Run:
    """In float64 by way of the Scan: ``onnx.reference`` leaves out lengths, activations and clipping."""
    return reference(expanded(model))


STEPS = [(kind, {"lengths": [1, 0, 1], "bias": False, "initial": False, "time": 1}) for kind in GATES]


@pytest.mark.parametrize("case", [*CASES, *STEPS], ids=label)
def test_inference_computes_what_onnxruntime_does(case: tuple[str, dict[str, Any]]) -> None:
    model, feeds = layer(case[0], dtype=np.float32, **case[1])
    plain = not {"clip", "peepholes", "input_forget"} & case[1].keys() and case[1].get("activations", ["Relu"]) == ["Relu"]
    assert plain == (prepared(model, feeds) == "RecurrentTraining")
    found = run_model(model, feeds, "onnxruntime", threads=1)
    for name, array in on_onnxruntime(model)(feeds).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def prepared(model: ir.Model, feeds: dict[str, Array]) -> str:
    """Which op computes the layer in a plan of the CPU backend."""
    ready = prepare(model, {name: array.shape for name, array in feeds.items()}, make_backend("onnxruntime", threads=1))
    return next(node.op_type for node in ready.graph if node.op_type in (*GATES, "RecurrentTraining"))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=label)
def test_the_scan_computes_what_onnxruntime_does(case: tuple[str, dict[str, Any]]) -> None:
    model, feeds = layer(case[0], dtype=np.float32, **case[1])
    expected = on_onnxruntime(model)(feeds)
    for run in (on_onnxruntime(expanded(model)), as_scan(model)):
        for name, array in run(feeds).items():
            np.testing.assert_allclose(array, expected[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("case", "symbolic"),
    [  # a third of the static ones in the quick tier; the symbolic ones are harder, so that they are the ones in `make test`
        pytest.param(
            case, symbolic, id=f"{label(case)}-{'symbolic' if symbolic else 'static'}",
            marks=pytest.mark.large if k % 3 else pytest.mark.full if symbolic else (),
        )
        for k, case in enumerate(CASES + BATCH_FIRST)
        for symbolic in (0, 1)
    ],
)  # fmt: skip
def test_gradients_agree_with_differences(case: tuple[str, dict[str, Any]], symbolic: int) -> None:
    model, feeds = layer(case[0], symbolic=symbolic, **case[1])
    found = check_gradient(model, feeds, compile_with=as_scan)
    assert set(found) == set(feeds), "every float input has a gradient"
    verify_model(model)


PLAIN = [
    case
    for case in CASES
    if not set(case[1]) & {"clip", "peepholes", "input_forget"} and case[1].get("activations", ["Relu"]) == ["Relu"]
]
"""Layers with a training form."""


@pytest.mark.full
@pytest.mark.parametrize("symbolic", [pytest.param(0, marks=pytest.mark.large), 1], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", PLAIN, ids=label)
def test_a_layer_that_keeps_its_gates_computes_the_same(case: tuple[str, dict[str, Any]], symbolic: int) -> None:
    model, feeds = layer(case[0], symbolic=symbolic, **case[1])
    expected = as_scan(model)(feeds)
    replace_nodes(Builder(model.graph), model.graph, dict.fromkeys(RECURRENT, kept))
    for name, array in reference(model)(feeds).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-12, err_msg=name)
    assert set(check_gradient(model, feeds)) == set(feeds), "every float input has a gradient"
    verify_model(model)


def kept(op: Builder, node: ir.Node) -> tuple[ir.Value, ...]:
    made = training_form(op, node)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("start", "kept_states"),
    [
        ("z = Constant <value = float {0.0}> () e = Expand (z, size) h = Slice (e, from, to, from)", 0),
        ("h = ConstantOfShape (size)", 0),
        ("h = ConstantOfShape <value = float[1] {0.5}> (size)", 2),
        ("h = Expand (learned, size)", 2),
    ],
)
def test_states_that_begin_at_zero_are_left_out(start: str, kept_states: int) -> None:
    text = f"""<ir_version: 11, opset_import: ["" : 26]>
    main (float[4,3,2] x) => (float[4,1,3,3] y)
      <float[1,12,2] w = {{}}, float[1,12,3] r = {{}}, float[1] learned = {{0.0}}, int64[3] size = {{1,3,3}},
       int64[1] from = {{0}}, int64[1] to = {{1}}>
    {{
       {start}
       y, last, cell = LSTM <hidden_size = 3> (x, w, r, , , h, h)
    }}"""
    model = from_text(text)
    node = next(n for n in model.graph if n.op_type == "LSTM")
    op = Builder(model.graph)
    op.before = node
    made = kept(op, node)[0].producer()
    assert made is not None
    assert sum(v is not None for v in made.inputs[4:]) == kept_states


@pytest.mark.parametrize("case", [case for case in CASES if case not in PLAIN], ids=label)
def test_other_layers_stay(case: tuple[str, dict[str, Any]]) -> None:
    model, _ = layer(case[0], **case[1])
    node = next(n for n in model.graph if n.op_type == case[0])
    assert training_form(Builder(model.graph), node) is None


def test_gradient_of_a_gradient_of_a_layer_that_keeps_its_gates() -> None:
    model, feeds = layer("LSTM", direction="bidirectional", lengths=[4, 2, 1])
    graph = model.graph
    replace_nodes(Builder(graph), graph, dict.fromkeys(RECURRENT, kept))
    x = graph.inputs[0]
    graph.outputs[:] = [differentiate(graph, list(graph.outputs), [x])[x]]
    check_gradient(model, feeds, ["x", "r"], tolerance=2e-6)


@pytest.mark.parametrize("case", [CASES[k] for k in (2, 5, 8, 17, 21)], ids=label)
def test_gradients_run_on_onnxruntime(case: tuple[str, dict[str, Any]]) -> None:
    model, feeds = layer(case[0], dtype=np.float32, **case[1])
    check_gradient(model, feeds, compile_with=on_onnxruntime, tolerance=5e-3, step=1e-2)
    assert any(node.op_type == case[0] for node in model.graph), "the forward node stays"


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", GATES)
def test_gradients_match_pytorch(kind: str, bidirectional: bool) -> None:
    options = {"linear_before_reset": 1} if kind == "GRU" else {}
    way = "bidirectional" if bidirectional else "forward"
    model, feeds = layer(kind, dtype=np.float32, direction=way, **options)
    graph = model.graph
    found = gradients(model, feeds, [graph.outputs[0]], list(graph.inputs), compile_with=on_onnxruntime)
    ours = {v.name: array for v, array in zip(graph.inputs, found, strict=True)}

    module = getattr(torch.nn, kind)(INPUT, HIDDEN, bidirectional=bidirectional)
    order = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 2, 3, 1]}[kind]  # PyTorch's gates in ONNX's: i o f c, z r h

    def torch_order(array: Array) -> Array:
        return np.concatenate([np.split(array, GATES[kind])[k] for k in order])

    with torch.no_grad():
        for d in range(2 if bidirectional else 1):
            end = "_l0_reverse" if d else "_l0"
            for name, array in (("weight_ih", feeds["w"][d]), ("weight_hh", feeds["r"][d])):
                getattr(module, name + end).copy_(torch.from_numpy(torch_order(array)))
            for name, array in zip(("bias_ih", "bias_hh"), np.split(feeds["b"][d], 2), strict=True):
                getattr(module, name + end).copy_(torch.from_numpy(torch_order(array)))
    t = {n: torch.tensor(feeds[n], requires_grad=True) for n in ("x", "h", "c") if n in feeds}
    y, _ = module(t["x"], (t["h"], t["c"]) if kind == "LSTM" else t["h"])
    y.sum().backward()
    for name, tensor in t.items():
        np.testing.assert_allclose(ours[name], tensor.grad.numpy(), rtol=2e-4, atol=1e-5, err_msg=name)  # type: ignore[union-attr]
    for d in range(2 if bidirectional else 1):
        end = "_l0_reverse" if d else "_l0"
        pairs = {"weight_ih": ours["w"][d], "weight_hh": ours["r"][d]}
        pairs |= dict(zip(("bias_ih", "bias_hh"), np.split(ours["b"][d], 2), strict=True))
        for name, array in pairs.items():
            theirs = getattr(module, name + end).grad.numpy()
            np.testing.assert_allclose(torch_order(array), theirs, rtol=2e-4, atol=1e-5, err_msg=name + end)


class Layer(torch.nn.Module):
    """A recurrent layer and a product with its last output."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layers = getattr(torch.nn, kind)(5, 7, **options)
        self.head = torch.nn.Linear(14 if options.get("bidirectional") else 7, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(x)[0][-1])


@pytest.mark.parametrize("backend", ["numpy", "onnxruntime"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"num_layers": 2}),
        ("LSTM", {"bidirectional": True, "bias": False}),
        ("GRU", {"bias": False}),
        ("GRU", {"bidirectional": True}),
    ],
)
def test_an_exported_layer_reads_its_weights_as_they_are(kind: str, options: dict[str, Any], backend: str) -> None:
    torch.manual_seed(3)
    module, x, label = Layer(kind, **options), torch.randn(6, 4, 5), torch.randint(0, 3, (4,))
    program = graphc.compile(
        module,
        example_inputs=(x,),
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.SGD(lr=0.5),
        backend=backend,
    )
    layers = [node for node in program.model.graph if node.op_type == "RecurrentTraining"]
    assert layers
    for node in layers:
        assert node.attributes.get_string("order") == "pytorch"
    cut = [node.inputs[0].name or "" for node in program.model.graph if node.op_type == "Slice" and node.inputs[0] is not None]
    assert not [name for name in cut if "weight" in name or "bias_" in name], "no weight is cut into its gates"
    trainer = graphc.Trainer(program)
    feeds = {program.model.graph.inputs[0].name or "": x.numpy(), "label": label.numpy()}
    ours = [trainer.step(feeds)["loss"] for _ in range(3)]
    values = trainer.trained_values()
    trainer.close()
    optimizer, theirs = torch.optim.SGD(module.parameters(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x), label)
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(values[name], parameter.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def cut(*places: str) -> str:
    """Slices of the gates of an LSTM."""
    return " ".join(f"{gate} = Slice ({place}, axis)" for gate, place in zip("iofc", places, strict=True))


@pytest.mark.parametrize(
    ("cuts", "order"),
    [
        (cut("k, at0, at3", "k, at9, at12", "k, at3, at6", "k, at6, at9"), "pytorch"),
        ("i, f, c, o = Split <num_outputs = 4> (k)", "pytorch"),
        ("i, o, f, c = Split <num_outputs = 4> (k)", "onnx"),
        ("f, i, c, o = Split <num_outputs = 4> (k)", "onnx"),
        ("i, f, c, o = Split (k, uneven)", "onnx"),
        (cut("k, at0, at3", "k, at9, at12", "k, at3, at6", "k, at3, at6"), "onnx"),
        (cut("k, at0, at3", "k, at9, at12", "other, at3, at6", "k, at6, at9"), "onnx"),
    ],
)
def test_the_order_of_gates_is_that_of_the_cuts(cuts: str, order: str) -> None:
    model = from_text(f"""<ir_version: 11, opset_import: ["" : 26]>
    main (float[4,3,3] x) => (float[4,1,3,3] y)
      <float[12,3] k = {{}}, float[12,3] other = {{}}, int64[1] axis = {{0}},
       int64[1] at0 = {{0}}, int64[1] at3 = {{3}}, int64[1] at6 = {{6}},
       int64[1] at9 = {{9}}, int64[1] at12 = {{12}}, int64[4] uneven = {{3,2,4,3}}>
    {{
       {cuts}
       joined = Concat <axis = 0> (i, o, f, c) w = Unsqueeze (joined, axis)
       y = LSTM <hidden_size = 3> (x, w, w)
    }}""")
    node = next(n for n in model.graph if n.op_type == "LSTM")
    op = Builder(model.graph)
    op.before = node
    made = kept(op, node)[0].producer()
    assert made is not None
    assert made.attributes.get_string("order") == order


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ('cell = "lstmm"', "cell is one of lstm, gru, gru_reset_after, tanh, relu, not 'lstmm'"),
        ('cell = "lstm", order = "keras"', "the order of the gates of 'lstm' is one of onnx, pytorch, not 'keras'"),
        ('cell = "gru", order = "pytorch"', "the order of the gates of 'gru' is one of onnx, not 'pytorch'"),
    ],
)
def test_a_cell_or_an_order_that_is_not_known_is_named(attributes: str, message: str) -> None:
    text = f"""<ir_version: 11, opset_import: ["" : 26, "graphc" : 1]>
    main (float[4,3,8] x) => (float[4,1,3,2] y) <float[1,8,2] r = {{}}> {{ y = graphc.RecurrentTraining <{attributes}> (x, r) }}
    """
    with pytest.raises(ModelError, match=re.escape(message)):
        from_text(text)


def test_outputs_that_are_left_out() -> None:
    feeds = layer("LSTM")[1]
    model, values = new_model(feeds)
    v = {value.name: value for value in values}
    op = Builder(model.graph)
    made = op.emit("LSTM", [v["x"], v["w"], v["r"], v["b"]], {"hidden_size": HIDDEN}, outputs=["", "", "cell"])
    model.graph.outputs.append(made[2])
    found = check_gradient(model, feeds, ["x", "w", "r", "b"], compile_with=as_scan)
    assert set(found) == {"x", "w", "r", "b"}


@pytest.mark.full
def test_gradient_of_a_gradient() -> None:
    model, feeds = layer("GRU", direction="bidirectional", linear_before_reset=1)
    graph = model.graph
    x = graph.inputs[0]
    graph.outputs[:] = [differentiate(graph, list(graph.outputs), [x])[x]]
    check_gradient(model, feeds, ["x", "w", "r"], compile_with=as_scan, tolerance=2e-6)


def test_an_unknown_activation_is_named() -> None:
    model, _ = layer("RNN")
    node = next(n for n in model.graph if n.op_type == "RNN")
    node.attributes["activations"] = ir.AttrStrings("activations", ["Sine"])
    with pytest.raises(UnsupportedOpError, match=r"RNN.*the activation 'sine'; known are affine, elu"):
        recurrence(Builder(model.graph), node)

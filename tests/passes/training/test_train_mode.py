"""train_mode and inference_mode against PyTorch; what is rewritten into what stands in ``train_mode.onnxtxt``."""

from __future__ import annotations

import io

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from graphc.ir.ops.random import philox_uniform
from graphc.ir.text import from_text
from graphc.ir.verify import verify_model
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.passes.legalize.decompose import decompose_graph
from graphc.pipeline import Context, run

HEAD = '<ir_version: 11, opset_import: ["" : 26]>\n'


def train(model, pipeline="train_mode"):
    run(model, pipeline, Context(done=["legalize"]))
    verify_model(model)
    return model


def execute(model, feeds, *, state=None):
    """Run on onnxruntime with next values as further outputs; returns everything by name, next values by state name."""
    graph = model.graph
    following = {n.inputs[0].name: n.outputs[0] for n in graph if n.op_type == "RunningAverage"}
    names = [v.name for v in graph.outputs] + list(following)
    graph.outputs.extend(following.values())
    for name, value in (state or {}).items():
        graph.initializers[name].const_value = ir.tensor(np.asarray(value), name=name)
    decompose_graph(graph, lambda node: False)
    proto = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(None, feeds), strict=True))


def batchnorm_text(momentum=0.9):
    return (
        HEAD
        + f"""g (float[N,3,4,5] x) => (float[N,3,4,5] y)
      <float[3] scale = {{0.5, 1.5, -2}}, float[3] bias = {{0.1, 0, -3}},
       float[3] mean = {{0.3, 0.2, 0.1}}, float[3] var = {{1, 2, 3}}>
    {{ y = BatchNormalization <epsilon: float = 0.001, momentum: float = {momentum}> (x, scale, bias, mean, var) }}"""
    )


def torch_batchnorm(momentum):
    module = torch.nn.BatchNorm2d(3, eps=0.001, momentum=1 - momentum)
    module.load_state_dict(
        {
            "weight": torch.tensor([0.5, 1.5, -2]),
            "bias": torch.tensor([0.1, 0, -3]),
            "running_mean": torch.tensor([0.3, 0.2, 0.1]),
            "running_var": torch.tensor([1.0, 2, 3]),
            "num_batches_tracked": torch.tensor(0),
        }
    )
    return module


@pytest.mark.parametrize("momentum", [0.9, 0.5])
def test_batchnorm_follows_pytorch(momentum):
    x = np.random.default_rng(0).standard_normal((6, 3, 4, 5)).astype(np.float32) * 2 + 1
    got = execute(train(from_text(batchnorm_text(momentum))), {"x": x})
    module = torch_batchnorm(momentum)
    want = module(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(got["y"], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["mean"], module.running_mean.numpy(), rtol=1e-5)
    # ONNX averages the biased variance: PyTorch's step is n / (n - 1) times as far from zero.
    n = x.size / 3
    torch_step = module.running_var.numpy() - momentum * np.array([1, 2, 3])
    np.testing.assert_allclose(got["var"], momentum * np.array([1, 2, 3]) + torch_step * (n - 1) / n, rtol=1e-5)


def test_two_uses_of_one_layer_update_its_statistics_in_turn():
    text = (
        HEAD
        + """g (float[8,3] x) => (float[8,3] y)
      <float[3] scale = {1, 2, 3}, float[3] bias = {0, 0, 0}, float[3] mean = {0.3, 0.2, 0.1}, float[3] var = {1, 2, 3}>
    { a = BatchNormalization <momentum: float = 0.75> (x, scale, bias, mean, var)
      b = Exp (a)
      y = BatchNormalization <momentum: float = 0.75> (b, scale, bias, mean, var) }"""
    )
    model = train(from_text(text))
    assert sum(n.op_type == "RunningAverage" for n in model.graph) == 2
    x = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32)
    got = execute(model, {"x": x})
    module = torch.nn.BatchNorm1d(3, momentum=0.25)
    module.weight.data, module.running_mean = torch.tensor([1.0, 2, 3]), torch.tensor([0.3, 0.2, 0.1])
    module(torch.exp(module(torch.from_numpy(x))))
    np.testing.assert_allclose(got["mean"], module.running_mean.numpy(), rtol=1e-5)


def test_options_switch_each_part_off():
    text = batchnorm_text().replace("(x, scale", "(d, scale").replace("{ y =", "{ d = Dropout (x)\n y =")
    kinds = lambda m: {n.op_type for n in m.graph}  # noqa: E731
    assert "BatchNormalization" in kinds(train(from_text(text), "train_mode{batchnorm=false}"))
    assert "Dropout" in kinds(train(from_text(text), "train_mode{dropout=false}"))
    assert not {"BatchNormalization", "Dropout"} & kinds(train(from_text(text)))
    assert "BatchNormalization" in kinds(train(from_text(text), "train_mode{freeze=nothing|scale}".replace("nothing|", "")))


DROPOUT = (
    HEAD
    + """g (float[N,5,7] x) => (float[N,5,7] y, bool[N,5,7] kept)
    { r = Constant <value: tensor = float {0.4}> ()   ["block/drop"] y, kept = Dropout (x, r) }"""
)


def test_dropout_keeps_what_philox_keeps_and_scales_it():
    x = np.random.default_rng(0).standard_normal((6, 5, 7)).astype(np.float32)
    got = execute(train(from_text(DROPOUT)), {"x": x}, state={"graphc.step": 12, "graphc.seed": 34, "graphc.sample_offset": 2})
    kept = philox_uniform((6, 5, 7), seed=34, step=12, sample_offset=2, tag="block/drop") >= 0.4
    np.testing.assert_array_equal(got["kept"], kept)
    np.testing.assert_allclose(got["y"], np.where(kept, x / 0.6, 0), rtol=1e-6)


def test_two_workers_drop_what_one_worker_drops():
    x = np.random.default_rng(0).standard_normal((7, 5, 7)).astype(np.float32)
    whole = execute(train(from_text(DROPOUT)), {"x": x})["y"]
    shares = [
        execute(train(from_text(DROPOUT)), {"x": x[a:b]}, state={"graphc.sample_offset": a})["y"] for a, b in ((0, 4), (4, 7))
    ]
    np.testing.assert_array_equal(np.concatenate(shares), whole)


@pytest.mark.parametrize("rows", ["N", "4"], ids=["symbolic", "static"])
def test_rows_that_are_heads_of_samples_follow_their_sample(rows):
    """Attention as PyTorch exports it has batch · heads rows."""
    text = (
        HEAD
        + f"""g (float[{rows},6] x) => (y)
        {{ s = Constant <value: tensor = int64[2] {{-1, 2}}> ()  h = Reshape (x, s)  ["d"] y = Dropout (h) }}"""
    )
    x = np.ones((8, 6), np.float32)
    whole = execute(train(from_text(text.replace("[4,", "[8,"))), {"x": x})["y"]
    shares = [execute(train(from_text(text)), {"x": x[a : a + 4]}, state={"graphc.sample_offset": a})["y"] for a in (0, 4)]
    np.testing.assert_array_equal(np.concatenate(shares), whole)


@pytest.mark.full
def test_two_dropouts_and_two_steps_draw_differently():
    text = HEAD + 'g (float[64,8] x) => (y) { ["a"] h = Dropout (x)  ["b"] y = Dropout (h) }'
    x = np.ones((64, 8), np.float32)
    first = execute(train(from_text(text)), {"x": x})["y"]
    assert abs(np.mean(first != 0) - 0.25) < 0.08
    later = execute(train(from_text(text)), {"x": x}, state={"graphc.step": 1})["y"]
    assert np.mean(first != later) > 0.2


def test_the_gradient_of_dropout_uses_the_same_mask():
    model = train(from_text(DROPOUT))
    graph = model.graph
    x, y = graph.inputs[0], graph.outputs[0]
    graph.outputs.append(differentiate(graph, [y], [x])[x])
    got = execute(model, {"x": np.ones((3, 5, 7), np.float32)})
    np.testing.assert_allclose(list(got.values())[2], got["y"])


def test_a_ratio_computed_at_run_time_is_left_alone_and_said():
    model = from_text(HEAD + "g (float[4] x, float r) => (float[4] y) { y = Dropout (x, r) }")
    ctx = Context(done=["legalize"])
    run(model, "train_mode", ctx)
    assert [n.op_type for n in model.graph] == ["Dropout"]
    assert any("keeps its inference behaviour" in line for line in ctx.log)


@pytest.mark.filterwarnings("ignore")
def test_a_file_exported_in_training_mode_evaluates_like_pytorch():
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Dropout(0.3))
    module(torch.randn(16, 2, 6, 6) * 3)
    x = torch.randn(4, 2, 6, 6)
    module.train()
    stream = io.BytesIO()
    torch.onnx.export(
        module,
        (x,),
        stream,
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=["x"],
        output_names=["y"],
    )
    proto = onnx.load_from_string(stream.getvalue())
    assert any(a.name == "training_mode" for n in proto.graph.node for a in n.attribute)
    evaluated = ir.from_proto(proto)
    run(evaluated, "legalize,inference_mode,verify")
    module.eval()
    with torch.no_grad():
        want = module(x).numpy()
    np.testing.assert_allclose(execute(evaluated, {"x": x.numpy()})["y"], want, rtol=1e-4, atol=1e-5)
    trained = ir.from_proto(proto)
    run(trained, "legalize,train_mode,verify")
    kinds = [n.op_type for n in trained.graph]
    assert "DropoutMask" in kinds
    assert kinds.count("RunningAverage") == 2


def test_what_is_inside_a_body_is_left_alone_and_said():
    model = from_text(
        HEAD
        + """g (float[4] x, bool c) => (float[4] y) {
        y = If <then_branch = t () => (float[4] a) { [drop] a = Dropout (x) },
                else_branch = e () => (float[4] b) { b = Identity (x) }> (c) }"""
    )
    ctx = Context(done=["legalize"])
    run(model, "train_mode", ctx)
    assert any("drop keeps its inference behaviour, for it is inside the If" in line for line in ctx.log)
    ctx = Context(done=["legalize"])
    run(model, "train_mode{dropout=false}", ctx)
    assert not any("keeps its inference behaviour" in line for line in ctx.log)

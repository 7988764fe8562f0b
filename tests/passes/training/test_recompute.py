"""recompute: less memory, the same bits; the cut is the least one; the report measures plans."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import graphc
from graphc import frontends
from graphc.cli import main
from graphc.errors import UsageError
from graphc.frontends.training_export import standard_model
from graphc.ir.builder import Builder
from graphc.ir.names import LOSS_TOTAL
from graphc.ir.state import add_initializer
from graphc.passes.training.recompute_cut import EXPENSIVE, Joint
from graphc.pipeline import Context, run
from graphc.report.memory import feed_shapes, has_recomputation, memory_of, without_recomputation
from tests.tiers import params

pytestmark = pytest.mark.full

BATCH = 32


DEPTH, WIDTH = 16, 64


def deep_mlp() -> onnx.ModelProto:
    """Layers with Gelu and Dropout; written by hand, for PyTorch takes seconds to export."""
    rng = np.random.default_rng(0)
    weights = {f"w{k}": rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) * 0.15 for k in range(DEPTH)}
    weights |= {f"b{k}": np.zeros(WIDTH, np.float32) for k in range(DEPTH)}
    weights |= {"w": rng.standard_normal((WIDTH, 10), dtype=np.float32) * 0.1, "b": np.zeros(10, np.float32)}
    body = "".join(
        f"h{k} = Gemm({f'd{k - 1}' if k else 'input'}, w{k}, b{k})  g{k} = Gelu(h{k})  d{k} = Dropout(g{k}, ratio)\n"
        for k in range(DEPTH)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[batch,{WIDTH}] input) => (float[batch,10] logits) {{
            ratio = Constant<value_float: float = 0.1>()
            {body} logits = Gemm(d{DEPTH - 1}, w, b)
        }}"""
    )
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


class Cnn(nn.Module):
    """Convolutions with BatchNorm, one pooling, Dropout.

    No convolution in front of a norm has a bias: its gradient is nothing but rounding, which Adam turns into whole steps.
    """

    def __init__(self, depth: int = 6, width: int = 8) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for k in range(depth):
            conv = nn.Conv2d(width, width, 3, padding=1, bias=k == depth - 1)
            blocks += [nn.BatchNorm2d(width), nn.ReLU(), conv]
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            *blocks,
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(width * 36, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A transformer encoder with Dropout, in every other layer of the attention's probabilities too."""

    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        for each in list(self.encoder.layers)[::2]:
            each.self_attn.dropout = 0.0
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module] | None, tuple[int, ...]]] = {
    "mlp": (None, (WIDTH,)),
    "cnn": (Cnn, (3, 12, 12)),
    "transformer": (Encoder, (24,)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("recompute")

    def get(name: str) -> str:
        path = folder / f"{name}.onnx"
        make, _ = MODELS[name]
        if make is None:
            onnx.save(deep_mlp(), path)
        elif not path.exists():
            torch.manual_seed(0)
            example = torch.from_numpy(batch(name, 2)["input"])
            exported = frontends.export(make().train(), (example,), input_names=["input"], output_names=["logits"])
            frontends.save(exported, path)
        return str(path)

    return get


def batch(name: str, count: int = BATCH, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (count, *MODELS[name][1])
    x = rng.integers(0, 50, shape) if name == "transformer" else rng.standard_normal(shape, dtype=np.float32)
    return {"input": x, "label": rng.integers(0, 10, count)}


def compiled(path: str, recompute: str | None, backend: str = "onnxruntime", **options: str) -> graphc.compiler.Program:
    return graphc.compile(
        path,
        loss=graphc.losses.SoftmaxCrossEntropy(),
        optimizer=graphc.optim.Adam(lr=1e-3),
        recompute=recompute,
        backend=backend,
        **options,
    )


def trained(program: graphc.compiler.Program, name: str, steps: int = 3) -> tuple[list[float], dict[str, np.ndarray], int]:
    """Losses, state and arena of a few steps."""
    with graphc.Trainer(program, threads=1, seed=7) as trainer:
        losses = [trainer.step(batch(name, seed=step))["loss"] for step in range(steps)]
        (executor,) = trainer.plans.training.values()
        return losses, trainer.state.snapshot(), executor.plan.buffers["arena"]


APART = "onnxruntime:fuse=false"
FACTORS = {("mlp", "cheap"): 2.3, ("mlp", "all"): 3.8, ("cnn", "cheap"): 1.3, ("cnn", "all"): 1.99}
FACTORS |= {("transformer", "cheap"): 1.5, ("transformer", "all"): 3.2}
"""By what the arena shrinks at least. It holds what passes from step to step; the Gelu of the mlp is a step of its own."""


@pytest.mark.parametrize(("name", "mode"), params(FACTORS, large=[("transformer", "cheap"), ("transformer", "all")]))
def test_the_same_bits_from_less_memory(name: str, mode: str, model: Callable[[str], str]) -> None:
    losses, state, arena = trained(compiled(model(name), None, APART), name)
    again = trained(compiled(model(name), f"{mode},batch={BATCH}", APART), name)
    assert again[0] == losses
    for key, value in state.items():
        np.testing.assert_array_equal(again[1][key], value, err_msg=key)
    assert arena / again[2] >= FACTORS[name, mode], (arena, again[2])


@pytest.mark.parametrize("name", params(MODELS, large=["transformer"]))
def test_fused_kernels_need_no_more_memory_and_round_as_closely(name: str, model: Callable[[str], str]) -> None:
    losses, state, arena = trained(compiled(model(name), None), name)
    again = trained(compiled(model(name), f"all,batch={BATCH}"), name)
    np.testing.assert_allclose(again[0], losses, rtol=1e-6)
    for key, value in state.items():
        np.testing.assert_allclose(again[1][key], value, rtol=1e-5, atol=1e-6, err_msg=key)
    assert arena / again[2] >= FACTORS[name, "all"], (arena, again[2])


def test_the_same_bits_on_the_reference_backend(model: Callable[[str], str]) -> None:
    """Of matrix products; where numpy adds along strides, its order depends on whether a value has been copied to a buffer."""
    plain, again = (trained(compiled(model("mlp"), mode, "numpy"), "mlp", 1) for mode in (None, "all"))
    assert plain[0] == again[0]
    for key, value in plain[1].items():
        np.testing.assert_array_equal(again[1][key], value, err_msg=key)


@pytest.mark.parametrize("precision", params(["bf16", "fp16"], large=["fp16"]))
def test_the_same_bits_in_mixed_precision(precision: str, model: Callable[[str], str]) -> None:
    plain, again = (trained(compiled(model("mlp"), mode, precision=precision), "mlp") for mode in (None, f"all,batch={BATCH}"))
    assert plain[0] == again[0]
    for key, value in plain[1].items():
        np.testing.assert_array_equal(again[1][key], value, err_msg=key)
    assert again[2] < plain[2] / 2


def test_cheap_repeats_no_product_and_all_does(model: Callable[[str], str]) -> None:
    def products(mode: str | None) -> int:
        return sum(node.op_type in EXPENSIVE for node in compiled(model("mlp"), mode).model.graph)

    assert products("cheap") == products(None)
    assert products("all") > products(None)


def test_a_saved_graph_still_recomputes(model: Callable[[str], str], tmp_path: Path) -> None:
    program = compiled(model("mlp"), f"all,batch={BATCH}")
    frontends.save(program.model, tmp_path / "training.onnx")
    loaded = frontends.load(tmp_path / "training.onnx")
    shapes = feed_shapes(loaded, BATCH)
    assert memory_of(loaded, shapes) == memory_of(program.model, shapes)


def test_what_runs_again_comes_right_before_its_first_reader(model: Callable[[str], str]) -> None:
    graph = compiled(model("cnn"), "cheap").model.graph
    nodes = list(graph)
    marks = [k for k, node in enumerate(nodes) if node.op_type == "Recompute"]
    assert marks
    for mark in marks:
        behind = itertools.dropwhile(lambda n: (n.name or "").startswith("recompute/"), nodes[mark + 1 :])
        reader = next(behind)
        region = nodes[mark : nodes.index(reader)]
        assert any(v is not None and v.producer() in region for v in reader.inputs), reader


def test_taking_it_out_restores_the_plain_plan(model: Callable[[str], str]) -> None:
    plain, again = compiled(model("mlp"), None).model, compiled(model("mlp"), f"all,batch={BATCH}").model
    shapes = feed_shapes(plain, BATCH)
    restored = without_recomputation(again)
    assert not has_recomputation(restored)
    assert memory_of(restored, shapes) == memory_of(plain, shapes)
    with pytest.raises(UsageError, match="compile it with --recompute"):
        without_recomputation(plain)


def test_a_standard_file_computes_everything_once(model: Callable[[str], str]) -> None:
    plain, again = (standard_model(compiled(model("cnn"), mode).model) for mode in (None, "cheap"))
    counts = [sum(n.op_type in ("Relu", "Conv", "Sqrt") for n in m.graph) for m in (plain, again)]
    assert counts[0] == counts[1]


# Budgets ---------------------------------------------------------------------------------------------------------------


def test_a_budget_takes_the_least_work_that_keeps_to_it(model: Callable[[str], str]) -> None:
    def nodes(recompute: str) -> tuple[int, float]:
        program = compiled(model("mlp"), recompute)
        copies = sum(node.name is not None and node.name.startswith("recompute/") for node in program.model.graph)
        return copies, memory_of(program.model, feed_shapes(program.model, BATCH)).activations / 1e6

    (roomy, _), (middle, used), (tight, least) = (nodes(f"budget_mb={b},batch={BATCH}") for b in (10, 0.3, 0.12))
    assert roomy == 0
    assert min(middle, tight) > 0
    assert used <= 0.3
    assert least <= 0.12 * 1.1  # the pass estimates; a plan's arena has gaps
    assert used > least


def test_a_budget_out_of_reach_says_what_is_possible(model: Callable[[str], str]) -> None:
    program = compiled(model("mlp"), f"budget_mb=0.001,batch={BATCH}")
    assert any("0.001 MB are not enough" in line for line in program.log)


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ("al", "mode='al'; did you mean 'all'"),
        ("budget_mb=3", "give batch="),
        ("budget_mb=0,batch=4", "budget_mb=0.0 must be above 0"),
        ("cheap,batch=0", "batch=0 must be at least 1"),
        ("cheap,bach=4", "no option 'bach'; did you mean 'batch'"),
    ],
)
def test_wrong_options_are_named(recompute: str, message: str, model: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match=message):
        compiled(model("mlp"), recompute)


# The cut ---------------------------------------------------------------------------------------------------------------


def random_graph(seed: int) -> ir.Model:
    """A few elementwise nodes over values of different sizes, reduced to a loss, with its gradient."""
    rng = np.random.default_rng(seed)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": graphc.ir.OPSET}, name="random")
    sizes = [4, 8, 16]
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    graph.inputs.append(x)
    op = Builder(graph)
    values = [op.Mul(x, add_initializer(graph, f"w{k}", rng.standard_normal(s, dtype=np.float32))) for k, s in enumerate(sizes)]
    for _ in range(int(rng.integers(2, 5))):
        a = values[int(rng.integers(len(values)))]
        kind = rng.choice(["Tanh", "Sigmoid", "Exp", "Mul"])
        values.append(op.emit(str(kind), [a, a] if kind == "Mul" else [a])[0])
    total = op.Sum(*[op.ReduceSum(v, keepdims=0) for v in values[-3:]])
    total.metadata_props[LOSS_TOTAL] = "1"
    loss = op.Identity(total, _outputs=["loss"])
    graph.outputs.append(loss)
    model = ir.Model(graph, ir_version=graphc.ir.IR_VERSION)
    run(model, "autodiff,simplify", Context(done=["legalize"]))
    return model


@pytest.mark.parametrize("seed", range(12))
def test_the_cut_is_the_least_of_all_choices(seed: int) -> None:
    """Against every subset of the forward values from which the rest of what is needed can be computed."""
    joint = Joint(random_graph(seed).graph, 1)
    rng = np.random.default_rng(seed)
    barred = {node for node in joint.forward if rng.random() < 0.4}
    values = list(joint.made)
    assert 2 <= len(values) <= 13

    def enough(kept: set[ir.Value]) -> bool:
        known = set(kept)
        for node in joint.forward:
            if node not in barred and all(v in known for v in joint.operands(node)):
                known.update(node.outputs)
        return all(v in known for v in joint.needed)

    sizes = {v: joint.nbytes(v) for v in values}
    choices = itertools.chain.from_iterable(itertools.combinations(values, k) for k in range(len(values) + 1))
    least = min(sum(sizes[v] for v in kept) for kept in choices if enough(set(kept)))
    found = joint.cut(barred, ())
    assert enough(found)
    assert sum(sizes[v] for v in found) == least


@pytest.mark.parametrize("mode", [None, "cheap", "all"])
def test_the_estimate_is_close_to_the_arena(mode: str | None, model: Callable[[str], str]) -> None:
    program = compiled(model("mlp"), f"{mode or 'budget_mb=1000'},batch={BATCH}")
    line = next(line for line in program.log if line.startswith("recompute"))
    estimate = float(line.split(" to ")[1].split(" MB")[0])
    arena = memory_of(program.model, feed_shapes(program.model, BATCH)).activations / 1e6
    assert arena <= 1.1 * estimate
    assert arena >= 0.6 * estimate


# The report ------------------------------------------------------------------------------------------------------------


def test_inspect_reports_memory_before_and_after(
    model: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "training.onnx"
    arguments = ["compile", model("mlp"), "-o", str(out), "--loss", "softmax_cross_entropy", "--optimizer", "adam"]
    assert main([*arguments, "--recompute", f"all,batch={BATCH}"]) == 0
    capfd.readouterr()
    assert main(["inspect", str(out), "--memory", "--batch", str(BATCH), "--format", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    elements = DEPTH * (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10
    for column in ("before", "after"):
        assert 4 * elements <= found[column]["parameters"] <= 4 * elements + 64 * 50
        assert found[column]["gradients"] == found[column]["parameters"]
        assert found[column]["optimizer"] == 2 * found[column]["parameters"]
        assert found[column]["feeds"] == BATCH * (64 * 4 + 8)
        assert found[column]["total"] == sum(v for k, v in found[column].items() if k != "total")
    assert found["before"]["activations"] > 3.8 * found["after"]["activations"]
    assert main(["inspect", str(out), "--memory", "--batch", str(BATCH)]) == 0
    text = capfd.readouterr().out
    assert "before" in text
    assert "activations" in text


def test_inspect_measures_a_plain_model(model: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", model("mlp"), "--memory", "--batch", "4", "--format", "json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["gradients"] == found["optimizer"] == 0
    assert found["feeds"] == 4 * 64 * 4

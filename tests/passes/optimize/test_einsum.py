"""Einsums as products: the numbers and gradients of PyTorch, whatever the order of labels and whatever is known of sizes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from graphc.backend import make_backend
from graphc.pipeline import Context, PassCall, run
from graphc.plan.specialise import prepare
from graphc.training.inference import run_model
from tests.passes.optimize.beside_torch import ops_trained

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6, "h": 2, "x": 3, "y": 2}

EQUATIONS = [
    "bcd,bed->bce",  # scores
    "bchd,behd->bhce",
    "bhce,behd->bchd",
    "bcd,de->bce",  # layers, with one axis or two of weights
    "bcd,dhe->bche",
    "bche,hed->bcd",
    "bcd,ed->bec",
    "ad,bcd->bac",  # weights on the left
    "ach,chd->ahd",  # the batch last
    "abcd,abed->cabe",
    "abxcd,abed->abxce",  # two axes of rows beside a batch
    "abcd,abxyd->abcxy",
    "ac,ac->a",
    "ac,c->a",
    "c,cd->d",
    "c,c->",
    "a,b->ba",
    "abc,ab->abc",
    "abcd,aed->be",  # sums of one operand alone
    "acd,acd->",
    "abc->cab",
    "abc->b",
    "abc->",
    "a,ab,bcd->dc",
    "ab,bc,cd,de->ae",
    "...cd,...ed->...ce",
    "...c,cd->...d",
    "ab,bc",
    "bcd,dd->bcd",  # diagonals
    "cdc,dd->cd",
    "bcccd,cd->bd",
    "cc->",
    "cc->c",
]


def model_of(equation: str, symbols: str = "") -> tuple[ir.Model, dict[str, np.ndarray], str]:
    """A model of one Einsum, its feeds and the equation without ellipses; labels in ``symbols`` have no size in the file."""
    plain = equation.replace("...", "xy")
    terms = plain.split("->")[0].split(",")
    generator = np.random.default_rng(0)
    feeds = {f"in{k}": generator.standard_normal([SIZES[c] for c in term]).astype(np.float32) for k, term in enumerate(terms)}
    inputs = [
        onnx.helper.make_tensor_value_info(f"in{k}", onnx.TensorProto.FLOAT, [c if c in symbols else SIZES[c] for c in term])
        for k, term in enumerate(terms)
    ]
    node = onnx.helper.make_node("Einsum", list(feeds), ["out"], equation=equation)
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], "g", inputs, [out])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10)
    model = ir.from_proto(proto)
    run(model, [PassCall("legalize")])
    return model, feeds, plain


def left(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.op_type == "Einsum"]


@pytest.mark.parametrize("symbols", ["", "b", "bcd"])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_the_numbers_are_those_of_pytorch(equation: str, symbols: str) -> None:
    model, feeds, plain = model_of(equation, symbols)
    run(model, [PassCall("einsum"), PassCall("verify")], Context(done=["legalize"]))
    if not symbols:
        assert not left(model)
    expected = torch.einsum(plain, *(torch.from_numpy(v) for v in feeds.values()))
    np.testing.assert_allclose(run_model(model, feeds)["out"], expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", ["bchd,behd->bhce", "bcd,dhe->bche", "bche,hed->bcd", "bcd,ed->bec", "...c,cd->...d"])
def test_an_open_batch_and_length_need_no_einsum(equation: str) -> None:
    model, _, _ = model_of(equation, "bcxy")
    run(model, [PassCall("einsum")], Context(done=["legalize"]))
    assert not left(model)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize(
    "equation", ["bchd,behd->bhce", "bche,behd->bchd", "xycd,xyed->xyce", "bcxd,byd->bcxy", "bcd,bed,bxe->bcx"]
)
def test_a_batch_of_another_name_in_each_operand_needs_no_einsum(equation: str, repeated: bool) -> None:
    """Exporters lose that the batches of two views are one: the file calls one 4 * batch, the other by a name of its own."""
    terms, result = equation.split("->")[0].split(","), equation.split("->")[1]
    shared = {c for c in result if all(c in term for term in terms)}
    generator, values, feeds = np.random.default_rng(0), [], {}
    for k, term in enumerate(terms):
        sizes = [1 if k and repeated and c in shared else SIZES[c] for c in term]
        feeds[f"in{k}"] = generator.standard_normal(sizes).astype(np.float32)
        shape = [f"{c}{k}" if c in shared else size for c, size in zip(term, sizes, strict=True)]
        values.append(ir.val(f"in{k}", ir.DataType.FLOAT, shape))
    node = ir.node("Einsum", values, attributes={"equation": equation})
    node.outputs[0].name, node.outputs[0].dtype = "out", ir.DataType.FLOAT
    model = ir.Model(ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 21}, name="g"), ir_version=10)
    run(model, [PassCall("legalize"), PassCall("einsum"), PassCall("verify")])
    assert not left(model)
    expected = torch.einsum(equation, *(torch.from_numpy(v) for v in feeds.values()))
    np.testing.assert_allclose(run_model(model, feeds)["out"], expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("aab,b->a", [("n", "n", 3), (3,)]),  # a diagonal of no known length
        ("ab,bc->ac", [(2, 1), (3, 4)]),  # a size of one that is repeated
        ("ab,bc->ac", [(2, 0), (0, 4)]),
    ],
)
def test_what_is_no_product_stays_and_is_noted(equation: str, shapes: list[tuple[int | str, ...]]) -> None:
    values = [ir.val(f"in{k}", ir.DataType.FLOAT, shape) for k, shape in enumerate(shapes)]
    node = ir.node("Einsum", values, attributes={"equation": equation})
    node.outputs[0].name, node.name = "out", "the-sum"
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 21}, name="g")
    ctx = Context(done=["legalize"])
    run(ir.Model(graph, ir_version=10), [PassCall("einsum")], ctx)
    assert [n.op_type for n in graph] == ["Einsum"]
    assert any("the-sum" in note for note in ctx.log)


class Attention(nn.Module):
    """Heads as einsums write them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(8, 2, 4) / 3) for _ in range(3))
        self.o = nn.Parameter(torch.randn(2, 4, 5) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("btm,mhd->bthd", x, w) for w in (self.q, self.k, self.v))
        p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) / 2, -1)
        return torch.einsum("bqhd,hdo->bqo", torch.einsum("bhqk,bkhd->bqhd", p, v), self.o).mean(1)


@pytest.mark.full
def test_sizes_that_a_plan_knows_need_no_einsum() -> None:
    """``graphc`` cannot tell that "rows" and "others" are one number until it gets arrays of that size."""
    sizes = [["rows", 5, 3], ["others", 5, 4]]
    inputs = [onnx.helper.make_tensor_value_info(f"in{k}", onnx.TensorProto.FLOAT, size) for k, size in enumerate(sizes)]
    node = onnx.helper.make_node("Einsum", ["in0", "in1"], ["out"], equation="jbi,jbd->ibd")
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [3, 5, 4])
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "g", inputs, [out]), ir_version=10)
    model = ir.from_proto(proto)
    run(model, [PassCall("legalize"), PassCall("einsum")])
    assert left(model)
    backend = make_backend("onnxruntime", threads=1)
    try:
        assert not left(prepare(model, {"in0": (7, 5, 3), "in1": (7, 5, 4)}, backend))
    finally:
        backend.close()


def test_an_attention_of_einsums_is_fused_and_trains_as_in_pytorch() -> None:
    torch.manual_seed(0)
    module, x, label = Attention(), torch.randn(6, 7, 8), torch.randint(0, 5, (6,))
    ops = ops_trained(module, x, label)
    assert ops.count("ScaledDotProductAttention") == 1
    assert "Einsum" not in ops

"""attention: what PyTorch exports is found with the layout it has, and computes what PyTorch computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import graphc
from graphc import frontends
from graphc.errors import UsageError
from graphc.ir.names import GRADIENT_OF
from graphc.ir.ops.random import philox_uniform
from graphc.pipeline import Context, PassCall, run
from graphc.training.inference import run_model

pytestmark = pytest.mark.full

BATCH, LENGTH, WIDTH, HEADS = 2, 6, 8, 2
SIZE = WIDTH // HEADS


class Forms(nn.Module):
    """A chain of attentions, each written in a way of its own; ``seen`` is (batch, length), 1 where a token counts."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))
        self.single = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.narrow = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.mix = nn.Conv1d(WIDTH, 3, 1)
        self.register_buffer("windows", torch.tensor([[[0.0, 0], [0, 0]], [[0, -100], [-100, 0]], [[0, 0.5], [-100, 0]]]))
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("past", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = batch, length, HEADS, SIZE
        # GPT: a packed projection cut in three, scores masked by choosing, scale behind the product.
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.packed[0](x).split(WIDTH, 2))
        scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(SIZE))
        p = scores.masked_fill(self.past == 0, -torch.inf).softmax(-1)
        x = x + (p @ v).transpose(1, 2).contiguous().view(batch, length, WIDTH)
        # BERT: three projections, scale by division, numbers added to the scores.
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in self.single)
        mask = (1 - seen[:, None, None, :]) * -10000.0
        p = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(SIZE) + mask, -1)
        x = x + (p @ v).permute(0, 2, 1, 3).reshape(batch, length, WIDTH)
        # Vision transformers: parts in front, a bias that trains.
        q, k, v = self.packed[1](x).reshape(batch, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + (((q * SIZE**-0.5) @ k.transpose(-2, -1) + self.bias).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        # Keys in front: the softmax runs over the last axis but one, and the product ends transposed.
        q, k, v = (y.view(shape).permute(0, 2, 3, 1) for y in self.packed[2](x).chunk(3, -1))
        x = x + (v @ (k.transpose(2, 3) @ q).softmax(2)).permute(0, 3, 1, 2).reshape(x.shape)
        # PyTorch's own op: booleans, and groups of queries that share keys.
        visible = (seen > 0)[:, None, None, :] & (self.past > 0)
        q, k, v = self.packed[3](x).view(batch, length, 3, HEADS, SIZE).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible)
        x = x + y.transpose(1, 2).reshape(x.shape)
        q = self.narrow[0](x).view(batch, length, 2 * HEADS, SIZE).transpose(1, 2)
        k, v = (layer(x).view(shape).transpose(1, 2) for layer in self.narrow[1:])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
        # Windows of an image, as samples of the batch: each has a mask of its own, beside a bias that trains.
        q, k, v = self.packed[0](x).reshape(3 * batch, 2, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * SIZE**-0.5) @ k.transpose(-2, -1) + self.bias[None, :, :2, :2]
        scores = (scores.view(batch, 3, HEADS, 2, 2) + self.windows[None, :, None]).view(-1, HEADS, 2, 2)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        # Images: elements of a head are channels, in front of the positions.
        q, k, v = (layer(x).transpose(1, 2).reshape(batch, HEADS, SIZE, length) for layer in self.single)
        z = F.scaled_dot_product_attention(*(w.transpose(2, 3) for w in (q, k, v))).transpose(2, 3)
        z = z.reshape(batch, WIDTH, length)
        return x.square().mean() + y.square().mean() + (self.mix(z) ** 3).mean()


FORMS = [
    ("bt0hd,bt1hd,bt2hd->bthd", 1, False),
    ("bthd,bthd,bthd->bthd", 0, True),
    ("bt0hd,bt1hd,bt2hd->bthd", 0, True),
    ("bt0hd,bt1hd,bt2hd->bthd", 0, False),
    ("bt0hd,bt1hd,bt2hd->bthd", 0, True),
    ("bthd,bthd,bthd->bhtd", 1, False),
    ("bt0hd,bt1hd,bt2hd->bthd", 0, True),
    ("bthd,bthd,bthd->bhtd", 0, False),
]
"""Layout, causal, masked; d is last, for kernels read the elements of a head as a row."""


class Layers(nn.Module):
    """PyTorch's layers: an encoder over itself, then attention to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.cross(self.encoder(x), other, other, need_weights=False)[0].square().mean()  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Scores times what no number is, and masks before the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(5))
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.sharpness = nn.Parameter(torch.rand(()) + 0.5)
        self.of_keys = nn.Linear(WIDTH, 1)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        each = []
        for layer in self.packed:
            q, k, v = layer(x).reshape(batch, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
            each.append((F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
        # Swin's second version: a temperature for each head, then a bias that trains.
        q, k, v = each[0]
        y = (((q @ k.transpose(-2, -1)) * self.temperature + self.bias).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        # One temperature, and a factor for each query.
        q, k, v = each[1]
        scores = q @ k.transpose(-2, -1) * self.sharpness.exp() / (1 + x.square().mean(-1))[:, None, :, None]
        y = y + (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        # A factor for each key, on scores whose axes were moved.
        q, k, v = each[2]
        scores = (k @ q.transpose(-2, -1)).transpose(-2, -1) * self.of_keys(x)[:, None, :, 0, None].transpose(-2, -1)
        y = y + (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        # Time series: hidden before the scale, by a mask made for the whole batch; then numbers that train before it.
        q, k, v = each[3]
        future = torch.triu(torch.ones(batch, 1, length, length, dtype=torch.bool), diagonal=1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(future, -torch.inf)
        y = y + ((0.3 * scores).softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        q, k, v = each[4]
        scores = (q @ k.transpose(-2, -1) + self.bias + (1 - seen[:, None, None, :]) * -1e9) / math.sqrt(SIZE)
        y = y + (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return y.square().mean()


def fused(model: ir.Model) -> list[tuple[str, int, bool]]:
    """Layout, causal and masked of each fused attention."""
    nodes = [n for n in model.graph if n.op_type == "ScaledDotProductAttention"]
    return [
        (n.attributes["layout"].as_string(), n.attributes["causal"].as_int(), (*n.inputs, None)[3] is not None) for n in nodes
    ]


def differentiated(model: ir.Model, saves: str, ctx: Context | None = None) -> tuple[ir.Model, Context]:
    """The model with fused attention, then with the gradients of its parameters as outputs."""
    ctx = run(model, [*([] if ctx else [PassCall("legalize")]), PassCall("attention", {"saves": saves})], ctx)
    found = model.clone()
    names = [n for n, v in model.graph.initializers.items() if v.dtype == ir.DataType.FLOAT and v.shape]
    run(model, [PassCall("autodiff", {"of": [model.graph.outputs[0].name], "wrt": names})], ctx)
    made = {v.metadata_props[GRADIENT_OF]: v for n in model.graph for v in n.outputs if GRADIENT_OF in v.metadata_props}
    for name in names:
        made[name].name = f"d/{name}"
        model.graph.outputs.append(made[name])
    return found, ctx


def check_against_torch(module: nn.Module, feeds: dict[str, np.ndarray], saves: str) -> ir.Model:
    tensors = [torch.from_numpy(a) for a in feeds.values()]
    model = frontends.export(module, tuple(tensors), input_names=list(feeds), output_names=["loss"])
    found, _ = differentiated(model, saves)
    compare(module, tensors, run_model(model, feeds))
    return found


def compare(module: nn.Module, tensors: list[torch.Tensor], outputs: Mapping[str, np.ndarray]) -> None:
    """The loss and the gradients of parameters are those of PyTorch."""
    loss = module(*tensors)
    loss.backward()
    np.testing.assert_allclose(outputs["loss"], loss.detach().numpy(), rtol=1e-5)
    checked = 0
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        if f"d/{name}" in outputs and scale > 1e-6:
            np.testing.assert_allclose(outputs[f"d/{name}"], parameter.grad.numpy(), rtol=0, atol=1e-5 * scale, err_msg=name)
            checked += 1
    assert checked >= len(list(module.parameters())) / 2  # the bias of a key has no gradient, so it is left out


@pytest.mark.parametrize("saves", ["probabilities", pytest.param("logsumexp", marks=pytest.mark.large)])
def test_every_way_to_write_it_is_found_and_trains_as_in_pytorch(saves: str) -> None:
    torch.manual_seed(0)
    seen = np.ones((BATCH, LENGTH), np.float32)
    seen[1, 4:] = 0
    x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH), dtype=np.float32)
    assert fused(check_against_torch(Forms(), {"x": x, "seen": seen}, saves)) == FORMS


def test_factors_of_scores_move_to_queries_or_keys() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    seen = np.ones((BATCH, LENGTH), np.float32)
    seen[1, 4:] = 0
    feeds = {"x": rng.standard_normal((BATCH, LENGTH, WIDTH), dtype=np.float32), "seen": seen}
    found = fused(check_against_torch(Scaled(), feeds, "auto"))
    assert [(causal, masked) for _, causal, masked in found] == [(0, True), (0, False), (0, False), (1, False), (0, True)]


def test_layers_of_pytorch_are_read_from_their_packed_projections() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, LENGTH, WIDTH), dtype=np.float32)
    other = rng.standard_normal((BATCH, 4, WIDTH), dtype=np.float32)
    found = check_against_torch(Layers(), {"x": x, "other": other}, "auto")
    assert fused(found) == [("tb0hd,tb1hd,tb2hd->tbhd", 0, False), ("tbhd,tb0hd,tb1hd->tbhd", 0, False)]
    left = [n.op_type for n in found.graph]
    assert "Softmax" not in left
    assert "Gather" not in left


class Dropped(nn.Module):
    """GPT's and BERT's attention with a dropout of the probabilities; ``drops`` is replaced by what multiplies with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.drops = nn.ModuleList([nn.Dropout(0.3), nn.Dropout(0.5)])
        self.register_buffer("past", torch.tril(torch.ones(LENGTH, LENGTH)))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        for packed, drop, causal in zip(self.packed, self.drops, (True, False), strict=True):
            shape = x.shape[0], LENGTH, HEADS, SIZE
            q, k, v = (y.view(shape).transpose(1, 2) for y in packed(x).split(WIDTH, 2))
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(SIZE)
            if causal:
                scores = scores.masked_fill(self.past == 0, -torch.inf)
            else:
                scores = scores + (1 - seen[:, None, None, :]) * -10000.0
            x = x + (drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(x.shape)
        return x.square().mean()


class Times(nn.Module):
    """A dropout whose mask is known."""

    def __init__(self, mask: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("mask", torch.from_numpy(mask))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


@pytest.mark.parametrize(
    ("dynamic", "saves"), [(False, "logsumexp"), pytest.param(True, "probabilities", marks=pytest.mark.large)]
)
def test_dropped_probabilities_train_as_in_pytorch_with_the_same_masks(dynamic: bool, saves: str) -> None:
    torch.manual_seed(0)
    module = Dropped()
    seen = np.ones((BATCH, LENGTH), np.float32)
    seen[1, 4:] = 0
    feeds = {"x": np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH), dtype=np.float32), "seen": seen}
    tensors = [torch.from_numpy(a) for a in feeds.values()]
    model = frontends.export(module, tuple(tensors), input_names=["x", "seen"], output_names=["loss"], dynamic_batch=dynamic)
    ctx = run(model, [PassCall("legalize"), PassCall("train_mode")])
    found, _ = differentiated(model, saves, ctx)
    assert fused(found) == [("bt0hd,bt1hd,bt2hd->bthd", 1, False), ("bt0hd,bt1hd,bt2hd->bthd", 0, True)]
    drawn = [n for n in found.graph if n.op_type == "DropoutMask"]
    for k, (node, ratio) in enumerate(zip(drawn, (0.3, 0.5), strict=True)):
        u = philox_uniform((BATCH, HEADS, LENGTH, LENGTH), seed=0, step=0, tag=node.attributes["tag"].as_string())
        module.drops[k] = Times(np.where(u < ratio, 0, 1 / (1 - ratio)).astype(np.float32))
    compare(module, tensors, run_model(model, feeds))


def by_hand(body: str, inputs: str = "float[2,2,6,4] q, float[2,2,6,4] k, float[2,2,6,4] v", outputs: str = "y") -> ir.Model:
    results = ", ".join(f"float[2,2,6,{6 if name == 'p' else 4}] {name}" for name in outputs.split())
    text = f"""<ir_version: 10, opset_import: ["": 23]> g ({inputs}) => ({results}) {{
        c = Constant<value_float: float = 0.5>() ratio = Constant<value_float: float = 0.5>()
        yes = Constant<value = bool {{1}}>()
        kt = Transpose<perm = [0, 1, 3, 2]>(k) {body} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    run(model, [PassCall("legalize"), PassCall("train_mode"), PassCall("attention")])
    return model


LEFT_ALONE: dict[str, Callable[[], ir.Model]] = {
    "the probabilities are dropped twice": lambda: by_hand(
        "s = MatMul(q, kt) p = Softmax<axis = -1>(s) d = Dropout(p, ratio, yes) e = Dropout(d, ratio, yes) y = MatMul(e, v)"
    ),
    "the queries of a mask stand last": lambda: by_hand(
        "s = MatMul(q, kt) p = Softmax(s) t = Transpose<perm = [0, 1, 3, 2]>(p) d = Dropout(t, ratio, yes)"
        "u = Transpose<perm = [0, 1, 3, 2]>(d) y = MatMul(u, v)"
    ),
    "the probabilities are a result": lambda: by_hand("s = MatMul(q, kt) p = Softmax(s) y = MatMul(p, v)", outputs="y p"),
    "the scores are used twice": lambda: by_hand("s = MatMul(q, kt) p = Softmax(s) r = Add(p, s) y = MatMul(r, v)"),
    "the softmax runs over the queries": lambda: by_hand("s = MatMul(q, kt) p = Softmax<axis = 2>(s) y = MatMul(p, v)"),
    "the mask is multiplied with what may be zero": lambda: by_hand(
        "s = MatMul(q, kt) m = Add(s, b) t = Mul(m, f) p = Softmax(t) y = MatMul(p, v)",
        "float[2,2,6,4] q, float[2,2,6,4] k, float[2,2,6,4] v, float[6,6] b, float[2,1,1] f",
    ),
    "a factor differs between queries and between keys": lambda: by_hand(
        "s = MatMul(q, kt) t = Mul(s, b) p = Softmax(t) y = MatMul(p, v)",
        "float[2,2,6,4] q, float[2,2,6,4] k, float[2,2,6,4] v, float[6,6] b",
    ),
    "heads that share keys have factors of their own": lambda: by_hand(
        "s = MatMul(q, kt) t = Mul(s, f) p = Softmax(t) y = MatMul(p, v)",
        "float[2,2,6,4] q, float[2,1,6,4] k, float[2,1,6,4] v, float[2,1,6] f",
    ),
    "there is no product in front": lambda: by_hand(
        "p = Softmax(b) y = MatMul(p, v)", "float[2,2,6,4] k, float[2,2,6,4] v, float[2,2,6,6] b"
    ),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_what_only_looks_like_it_is_left_alone(why: str) -> None:
    assert fused(LEFT_ALONE[why]()) == []


def test_the_standard_op_becomes_the_fused_one() -> None:
    model = by_hand("y = Attention<is_causal = 1>(q, k, v)")
    assert fused(model) == [("bhtd,bhtd,bhtd->bhtd", 1, False)]
    feeds = {n: np.random.default_rng(k).standard_normal((2, 2, 6, 4)).astype("f") for k, n in enumerate("qkv")}
    wanted = F.scaled_dot_product_attention(*(torch.from_numpy(feeds[n]) for n in "qkv"), is_causal=True)
    for backend in ("onnxruntime", "numpy"):
        np.testing.assert_allclose(run_model(model, feeds, backend)["y"], wanted.numpy(), rtol=0, atol=1e-5)
    assert fused(by_hand("y = Attention<softcap = 2.0>(q, k, v)")) == []


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    model = by_hand(
        "s = MatMul(q, kt) m = Add(s, b) p = Softmax(m) y = MatMul(p, v)",
        "float[2,2,6,4] q, float[2,2,6,4] k, float[2,2,6,4] v, float[6,6] b",
    )
    assert fused(model) == [("bhtd,bhtd,bhtd->bhtd", 0, True)]
    feeds = {n: np.random.default_rng(k).standard_normal((2, 2, 6, 4)).astype("f") for k, n in enumerate("qkv")}
    mask = np.zeros((6, 6), np.float32)
    mask[2] = -np.inf
    mask[3, 1:] = -np.inf
    for backend in ("onnxruntime", "numpy"):
        y = run_model(model, {**feeds, "b": mask}, backend)["y"]
        np.testing.assert_array_equal(y[:, :, 2], 0)
        np.testing.assert_allclose(y[:, :, 3], feeds["v"][:, :, 0], rtol=0, atol=1e-6)
        assert np.isfinite(y).all()


def test_an_unknown_choice_is_named() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 23]> g (float[2] x) => (float[2] y) { y = Relu(x) }')
    )
    with pytest.raises(UsageError, match="logsumexp"):
        run(model, [PassCall("legalize"), PassCall("attention", {"saves": "logsumexq"})])


def test_half_precision_trains_near_autocast() -> None:
    """The fused op runs in bfloat16 with a softmax in float32; its first losses are those of the unfused graph."""
    model = frontends.export(
        nn.Sequential(nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(96, 3)),
        (torch.zeros(4, 6, 16),),
        input_names=["input"],
        output_names=["logits"],
    )
    rng = np.random.default_rng(0)
    feeds = {"input": rng.standard_normal((4, 6, 16), dtype=np.float32), "label": np.array([0, 2, 1, 1])}
    loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
    low = graphc.compile(model, loss=loss, optimizer=optimizer, precision="bf16")
    (node,) = (n for n in low.model.graph if n.op_type == "ScaledDotProductAttention")
    assert node.inputs[0] is not None
    assert node.inputs[0].dtype == ir.DataType.BFLOAT16
    exact = graphc.compile(model, loss=loss, optimizer=optimizer)
    losses = []
    for program in (low, exact):
        with graphc.Trainer(program, threads=1) as trainer:
            losses.append([float(trainer.step(feeds)["loss"]) for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2)
    assert losses[0] != losses[1]

"""Modules whose sequences have another length in each batch."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphc
from graphc import frontends, losses
from graphc.backends.host import machine_code
from graphc.errors import ModelError, UsageError
from graphc.training import plan_cache

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

DRAWN = np.random.default_rng(5)
LENGTHS = (12, 5, 16, 5, 9, 12, 7)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(20, 16), nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, tokens: Any, padded: Any) -> Any:
        x = self.embedding(tokens) + self.place(torch.arange(tokens.shape[1]))
        kept = (~padded)[..., None].float()
        return self.out((self.layers(x, src_key_padding_mask=padded) * kept).sum(1) / kept.sum(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 16), nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def forward(self, tokens: Any, padded: Any) -> Any:
        x, _ = self.layer(self.embedding(tokens) * (~padded)[..., None])
        return self.out(x.amax(1))


class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=d, dilation=d) for d in (1, 2))

    def forward(self, tokens: Any, padded: Any) -> Any:
        x = (self.embedding(tokens) * (~padded)[..., None]).mT
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.out(x.mean(2))


AXES = {"tokens": {1: "sequence"}, "padded": {1: "sequence"}}


def batch(length: int, size: int = 4) -> dict[str, Any]:
    tokens, label = DRAWN.integers(0, 20, (size, length)), DRAWN.integers(0, 3, size)
    padded = np.arange(length) >= DRAWN.integers(2, length + 1, (size, 1))
    return {"tokens": tokens, "padded": padded, "label": label}


def program_of(module: nn.Module, **options: Any) -> graphc.Program:
    made = batch(8)
    inputs = tuple(torch.from_numpy(made[name]) for name in ("tokens", "padded"))
    loss, optimizer = losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
    return graphc.compile(module, example_inputs=inputs, loss=loss, optimizer=optimizer, **{"dynamic_axes": AXES, **options})


@pytest.mark.parametrize("kind", [Attention, Recurrent, Dilated])
def test_each_length_trains_as_in_pytorch(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind().train()
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    with graphc.Trainer(program_of(module), threads=1) as trainer:
        for length in LENGTHS:
            feeds = batch(length)
            scores = reference(torch.from_numpy(feeds["tokens"]), torch.from_numpy(feeds["padded"]))
            loss = nn.functional.cross_entropy(scores, torch.from_numpy(feeds["label"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert trainer.step(feeds)["loss"] == pytest.approx(loss.item(), rel=1e-5)
        trainer.load_into(module)
    for (name, found), wanted in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_plans_for_all_lengths_compute_in_one_memory() -> None:
    """Twenty lengths need no twenty arenas; evaluation shares them too."""
    with graphc.Trainer(program_of(Attention()), threads=1) as trainer:
        for length in range(6, 26):
            trainer.step(batch(length))
            trainer.evaluate([batch(length)])
        plans = [*trainer.plans.training.values(), *trainer.plans.evaluation.values()]
        arenas = [plan.places.buffers["arena"] for plan in plans if plan.plan.buffers.get("arena")]
    taken: dict[int, int] = {}
    for arena in arenas:
        start = arena.__array_interface__["data"][0]
        taken[start] = max(taken.get(start, 0), arena.nbytes)
    assert len(arenas) == 40
    assert sum(taken.values()) < 4 * max(taken.values())


def test_the_plan_that_was_used_least_recently_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST", 2)
    torch.manual_seed(0)
    program = program_of(Dilated())
    feeds = [batch(length) for length in (5, 6, 5, 7, 5, 6, 7)]
    with graphc.Trainer(program, threads=1) as trainer:
        found, kept = [], []
        for fed in feeds:
            found.append(trainer.step(fed)["loss"])
            kept.append([plan.inputs["tokens"].shape[1] for plan in trainer.plans.training.values()])
    assert kept == [[5], [5, 6], [6, 5], [5, 7], [7, 5], [5, 6], [6, 7]]
    monkeypatch.setattr(plan_cache, "MOST", 100)
    with graphc.Trainer(program, threads=1) as trainer:
        assert found == [trainer.step(fed)["loss"] for fed in feeds]


class Strided(nn.Module):
    """A network of sounds, which sums along the axis of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(2, 8, 5, 2, 2), nn.GroupNorm(2, 8), nn.Conv1d(8, 8, 5, 2, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, sound: Any) -> Any:
        x = torch.relu(self.second(nn.functional.silu(self.norm(self.first(sound)))))
        return self.out(torch.cat([x.mean(2)[:, :4], (torch.softmax(x, 2) * x).sum(2)[:, 4:]], 1))


def sounds(length: int, label: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"sound": DRAWN.standard_normal((len(label), 2, length)).astype(np.float32), "label": label}


def strided_program(module: nn.Module) -> graphc.Program:
    loss, optimizer = losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
    with pytest.warns(UserWarning, match="captured for sizes of 8 and more along dynamic_axes"):
        return graphc.compile(
            module, example_inputs=(torch.rand(4, 2, 64),), dynamic_axes={"sound": {2: "time"}}, loss=loss, optimizer=optimizer
        )


def test_a_module_with_strides_trains_on_any_length() -> None:
    """Its convolutions leave a length of 1 of short inputs, of which torch.export says so."""
    torch.manual_seed(0)
    module = Strided().train()
    reference, label = copy.deepcopy(module), np.array([0, 1, 2, 1])
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    with graphc.Trainer(strided_program(module), threads=1) as trainer:
        for length in (64, 50, 777, 9, 2048, 51):
            feeds = sounds(length, label)
            loss = nn.functional.cross_entropy(reference(torch.from_numpy(feeds["sound"])), torch.from_numpy(label))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert trainer.step(feeds)["loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("processor", ["", "x86-64-v3"])
def test_a_length_has_the_same_bits_whichever_came_before(processor: str, tmp_path: Path) -> None:
    """The kernels of the first length are made for it alone, and those of later ones read their sizes from a table."""
    lengths = (64, 65, 66, 1000, 3, 9, 700, 300, 513, 5000, 20_011, 128, 17, 40)
    with pytest.warns(UserWarning, match="captured for sizes of 8 and more"):
        model = frontends.export(Strided(), (torch.rand(4, 2, 64),), dynamic_axes={"sound": {2: "time"}})
    ir.save(model, tmp_path / "strided.onnx")
    label = np.array([0, 1, 2, 1, 0, 2, 0, 1])
    np.savez(tmp_path / "sounds.npz", label=label, **{str(n): sounds(n, label)["sound"] for n in lengths})
    environment = {**os.environ, **({"GRAPHC_PROCESSOR": processor} if processor else {})}
    found = [
        subprocess.run(
            [sys.executable, "-c", LOSSES, str(tmp_path), order], env=environment, check=True, capture_output=True, text=True
        ).stdout
        for order in ("first", "later")
    ]
    assert found[0] == found[1]
    assert len(found[0].split()) == 2 * len(lengths)


LOSSES = """
import sys
import numpy as np
import graphc
from graphc.training import plan_cache

folder, order = sys.argv[1:]
plan_cache.FEW = 1000 if order == "first" else 1
held = dict(np.load(f"{folder}/sounds.npz"))
label = held.pop("label")
loss, optimizer = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
program = graphc.compile(f"{folder}/strided.onnx", loss=loss, optimizer=optimizer)
with graphc.Trainer(program, threads=2) as trainer:
    for _ in range(2):
        for sound in held.values():
            print(float(trainer.step({"sound": sound, "label": label})["loss"]).hex())
"""


def test_later_lengths_need_no_new_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    submit = machine_code.MachineCode.submit
    monkeypatch.setattr(machine_code.MachineCode, "submit", lambda *a: made.append(a[1]) or submit(*a))  # type: ignore[func-returns-value]
    with graphc.Trainer(program_of(Dilated()), threads=1) as trainer:
        for length in (310, 312, 315):
            trainer.step(batch(length, 8))
        made.clear()
        for length in (311, 313, 317, 319):
            trainer.step(batch(length, 8))
    assert not made


def test_axes_may_be_listed() -> None:
    inputs = (torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.bool))
    model = frontends.export(Dilated(), inputs, dynamic_axes={"tokens": [-1], "padded": {-1: "tokens_1"}})
    assert [list(map(str, v.shape or ())) for v in model.graph.inputs] == [["batch", "tokens_1"]] * 2


@pytest.mark.parametrize(
    ("axes", "length", "match"),
    [
        ({"token": [1]}, 8, "dynamic_axes names token; the inputs are tokens, padded"),
        ({"tokens": [2]}, 8, "names axis 2 of 'tokens', which has 2 axes"),
        ({"tokens": {1: "a b"}}, 8, "calls axis 1 of 'tokens' 'a b', which is no name"),
        ({"tokens": [1], "padded": [1]}, 1, "axis 1 of 'tokens' is to have any size.* is 1: give an example with 2 or more"),
    ],
)
def test_wrong_axes_are_refused(axes: Any, length: int, match: str) -> None:
    inputs = (torch.zeros(4, length, dtype=torch.int64), torch.zeros(4, length, dtype=torch.bool))
    with pytest.raises(UsageError, match=match):
        frontends.export(Dilated(), inputs, dynamic_axes=axes)


class OfOneLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(24, 2)

    def forward(self, x: Any) -> Any:
        return self.out(x.flatten(1))


def test_a_module_of_one_length_is_not_exported_for_others() -> None:
    with pytest.raises(ModelError, match="may take the size of an axis in dynamic_axes for a number"):
        frontends.export(OfOneLength(), (torch.rand(2, 8, 3),), dynamic_axes={"x": {1: "sequence"}})


def test_files_say_themselves_which_axes_are_free() -> None:
    with pytest.raises(UsageError, match="dynamic_axes are for a torch"):
        graphc.compile("net.onnx", dynamic_axes=AXES, loss=losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))

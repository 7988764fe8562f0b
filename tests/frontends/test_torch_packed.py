"""Modules with packed sequences train as in PyTorch, for batches of any lengths."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import graphc
from graphc.errors import ModelError
from graphc.frontends.torch import export
from tests.tiers import params

SAMPLES, STEPS = 6, 7
LOSS = graphc.losses.SoftmaxCrossEntropy()


def batch(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Sequences of 1 to ``STEPS`` numbers, filled up with 0; one of them, at another place each time, has all."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, STEPS + 1, SAMPLES)
    lengths[seed % SAMPLES] = STEPS
    words = random.integers(1, 20, (SAMPLES, STEPS))
    words[np.arange(STEPS) >= lengths[:, None]] = 0
    return {"x": words, "lengths": lengths, "label": random.integers(0, 3, SAMPLES)}


class Tagger(torch.nn.Module):
    """Packs embedded words for a recurrent layer of a ``kind``."""

    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 5, padding_idx=0)
        self.rnn = getattr(torch.nn, kind)(5, 4, batch_first=True, **options)
        self.output = torch.nn.Linear(8 if options.get("bidirectional") else 4, 3)

    def pack(self, x: torch.Tensor, lengths: torch.Tensor) -> PackedSequence:
        return pack_padded_sequence(self.embedding(x), lengths.cpu(), batch_first=True, enforce_sorted=False)


class Last(Tagger):
    """The states after the last step of each sample."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        _, state = self.rnn(self.pack(x, lengths))
        state = state[0] if isinstance(state, tuple) else state
        return self.output(torch.cat([*state[-2:]], 1) if self.rnn.bidirectional else state[-1])  # type: ignore[no-any-return]


class Mean(Tagger):
    """The mean of all steps, with the lengths that padding gives back."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y, found = pad_packed_sequence(self.rnn(self.pack(x, lengths))[0], batch_first=True)
        return self.output(y.sum(1) / found.unsqueeze(1))  # type: ignore[no-any-return]


class Longest(Tagger):
    """Counts its lengths itself; padded to more steps than there are, with a number that no maximum takes."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(x).transpose(0, 1), (x != 0).sum(1), enforce_sorted=False)
        again = torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=STEPS)[0]
        state = again[:, 0, :4].unsqueeze(0)
        packed = pack_padded_sequence(again, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.rnn(packed, state)[0], padding_value=-9.0, total_length=STEPS + 2)
        return self.output(y.max(0).values)  # type: ignore[no-any-return]


class Rows(Tagger):
    """Works on the rows of packed sequences, each by itself."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.narrow = torch.nn.Linear(10, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        data, *places = self.pack(x, lengths)
        both = torch.cat([data.tanh() * 2, data], 1)
        data, *places = self.rnn(PackedSequence(self.narrow(both), *places))[0]
        scores = PackedSequence(torch.softmax(self.output(torch.relu(data)), dim=-1), *places)
        return pad_packed_sequence(scores, batch_first=True)[0].sum(1)


class Scores(Tagger):
    """A number for each step; what softmax would make of them counts all rows."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = self.rnn(self.pack(x, lengths))[0]
        scores = pack_padded_sequence(pad_packed_sequence(packed)[0].sum(2), lengths, enforce_sorted=False)
        return pad_packed_sequence(scores._replace(data=scores.data.softmax(-1)))[0].sum(0)


def lose_rows(packed: PackedSequence) -> torch.Tensor:
    return packed.data.mean(0)


def count_rows(packed: PackedSequence) -> torch.Tensor:
    return packed.data / packed.data.size(0)


def see_rows(packed: PackedSequence) -> torch.Tensor:
    return packed.data.new_zeros(packed.data.shape)


def normalise(packed: PackedSequence) -> torch.Tensor:
    return functional.batch_norm(packed.data, None, None, training=True)


def count_steps(packed: PackedSequence) -> torch.Tensor:
    return packed.batch_sizes.sum()


def unpad(packed: PackedSequence) -> torch.Tensor:
    return packed.batch_sizes[1:]


MODULES: dict[str, Callable[[], Tagger]] = {
    "last-LSTM": lambda: Last("LSTM"),
    "last-GRU-two-layers": lambda: Last("GRU", num_layers=2, bidirectional=True),
    "last-RNN-relu": lambda: Last("RNN", nonlinearity="relu", bias=False),
    "mean-LSTM-two-layers": lambda: Mean("LSTM", num_layers=2, bidirectional=True),
    "mean-RNN": lambda: Mean("RNN", bidirectional=True),
    "longest-GRU": lambda: Longest("GRU"),
    "rows-LSTM": lambda: Rows("LSTM"),
}


@pytest.mark.parametrize(
    "name",
    params(
        MODULES, full=["longest-GRU", "mean-LSTM-two-layers", "rows-LSTM"], large=["last-LSTM", "last-RNN-relu", "mean-RNN"]
    ),
)
def test_losses_parameters_and_the_file_are_those_of_pytorch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    example = batch(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = export(module, (torch.tensor(example["x"]), torch.tensor(example["lengths"])))
    longest = [str(one.message) for one in said if "those of its longest sample" in str(one.message)]
    assert len(longest) == isinstance(module, (Mean, Rows))  # the others do not pad, or tell the total length
    trainer = graphc.Trainer(graphc.compile(model, loss=LOSS, optimizer=graphc.optim.SGD(lr=0.5)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for seed in range(4):
        feeds = batch(seed)
        x, lengths, label = (torch.tensor(feeds[key]) for key in ("x", "lengths", "label"))
        loss = functional.cross_entropy(module(x, lengths), label)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        np.testing.assert_allclose(trainer.step(feeds)["loss"], loss.item(), rtol=1e-5)
    values = trainer.trained_values()
    for parameter, value in module.named_parameters():
        np.testing.assert_allclose(values[parameter], value.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=parameter)

    trainer.export(tmp_path / "trained.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    few = {key: value[:3] for key, value in batch(9).items() if key != "label"}
    expected = module.eval()(torch.tensor(few["x"]), torch.tensor(few["lengths"])).detach().numpy()
    np.testing.assert_allclose(session.run(None, few)[0], expected, rtol=1e-5, atol=1e-6)


USES = (lose_rows, count_rows, see_rows, normalise, count_steps, unpad)


@pytest.mark.parametrize("use", params(USES, full=USES[1:]))
def test_what_depends_on_the_number_of_rows_is_refused_by_name(use: Callable[[PackedSequence], torch.Tensor]) -> None:
    class Module(Tagger):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = self.rnn(self.pack(x, lengths))[0]
            return pad_packed_sequence(packed)[0].sum() + use(packed).sum()

    example = batch(0)
    with pytest.raises(ModelError, match="of a packed sequence cannot be captured: pad the sequence first"):
        export(Module("GRU"), (torch.tensor(example["x"]), torch.tensor(example["lengths"])), exporter="dynamo")


@pytest.mark.full
def test_a_softmax_over_the_steps_of_all_samples_is_refused() -> None:
    example = batch(0)
    with pytest.raises(ModelError, match="softmax of the rows of a packed sequence cannot be captured"):
        export(Scores("GRU"), (torch.tensor(example["x"]), torch.tensor(example["lengths"])), exporter="dynamo")

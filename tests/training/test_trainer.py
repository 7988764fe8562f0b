"""What a user of the Trainer notices: feeds are checked, bad steps change nothing, files come back."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import graphc
from graphc.bench.specs import SPECS
from graphc.errors import FeedError, NonFiniteError, UsageError


@pytest.fixture
def trainer(exported: Callable[[str], str]) -> graphc.Trainer:
    return make(exported("mlp"))


def make(path: str, optimizer: str = "adam:lr=1e-3", **options: object) -> graphc.Trainer:
    program = graphc.compile(
        path, loss=graphc.losses.SoftmaxCrossEntropy(metrics=True), optimizer=graphc.optim.parse(optimizer), **options
    )
    return graphc.Trainer(program, threads=1)


def feeds(count: int = 8, seed: int = 0, name: str = "mlp") -> dict[str, np.ndarray]:
    x, y = SPECS[name].batch(count, seed)
    return {"input": x, "label": y}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: {**f, "inptu": f["input"]}, "no input 'inptu'; did you mean 'input'"),
        (lambda f: {"label": f["label"]}, "feed 'input' is missing"),
        (lambda f: {**f, "input": f["input"][:, :700]}, r"feed 'input' has shape \[8, 700\]"),
        (lambda f: {**f, "input": f["input"][0]}, "feed 'input' has shape"),
        (lambda f: {**f, "input": f["input"].astype(np.int32)}, "feed 'input' is int32, the model wants float32"),
        (lambda f: {**f, "label": f["label"].astype(np.float32)}, "feed 'label' is float32"),
        (lambda f: {**f, "label": f["label"][:7]}, "'batch' is"),
        (lambda f: {**f, "label": f["label"] + 5}, r"label \d+ at label\[\d+\] is outside 0 … 9"),
        (lambda f: {**f, "label": f["label"] - 1}, "label -1 at label"),
        (lambda f: {k: v[:0] for k, v in f.items()}, "no samples"),
    ],
)
def test_wrong_feeds_are_named_and_change_nothing(
    trainer: graphc.Trainer, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], message: str
) -> None:
    good = {**feeds(), "label": np.arange(8) + 1}
    before = trainer.state_sha256()
    with pytest.raises(FeedError, match=message):
        trainer.step(change({**good, "label": np.arange(8, dtype=np.int64) % 10}))
    assert trainer.state_sha256() == before
    trainer.step(feeds())


def test_a_bad_step_keeps_the_last_good_state_and_names_the_tensor(trainer: graphc.Trainer) -> None:
    trainer.step(feeds())
    before = trainer.state_sha256()
    bad = feeds(seed=1)
    bad["input"][3, 5] = np.inf
    with pytest.raises(NonFiniteError, match="in step 1, first in tensor 'input'") as caught:
        trainer.step(bad)
    assert (caught.value.step, caught.value.tensor) == (1, "input")
    assert trainer.state_sha256() == before
    assert np.isfinite(trainer.step(feeds())["loss"])


def test_an_overflow_in_the_middle_is_found(exported: Callable[[str], str]) -> None:
    trainer = make(exported("mlp"), "sgd:lr=1e20")
    trainer.step(feeds())

    def train() -> None:
        for _ in range(5):
            trainer.step(feeds())

    with pytest.raises(NonFiniteError) as caught:
        train()
    assert caught.value.tensor is not None
    assert all(np.isfinite(a).all() for a in trainer.state.arrays.values())


def test_training_learns_and_evaluates_every_sample_once(trainer: graphc.Trainer) -> None:
    x, y = SPECS["mlp"].batch(100, 3)
    y = (x[:, :392].sum(1) > x[:, 392:].sum(1)).astype(np.int64)
    events: list[dict[str, object]] = []
    batches = graphc.data.ArrayBatches({"input": x, "label": y}, 32)
    trainer.fit(batches, epochs=8, callbacks=[events.append])
    assert [e["epoch"] for e in events] == list(range(1, 9))
    assert events[-1]["loss"] < 0.5 * events[0]["loss"]  # type: ignore[operator]
    whole = trainer.evaluate([{"input": x, "label": y}])
    pieces = trainer.evaluate(graphc.data.ArrayBatches({"input": x, "label": y}, 30, shuffle=False))
    assert whole["accuracy"] > 0.95
    assert pieces["accuracy"] == pytest.approx(whole["accuracy"])
    assert pieces["loss"] == pytest.approx(whole["loss"], rel=1e-5)


@pytest.mark.full
def test_checkpoints_continue_bit_for_bit(exported: Callable[[str], str], tmp_path: Path) -> None:
    straight, first, second = (make(exported("lenet")) for _ in range(3))
    for step in range(6):
        straight.step(feeds(seed=step, name="lenet"))
        if step < 3:
            first.step(feeds(seed=step, name="lenet"))
    first.save(tmp_path / "checkpoint")
    second.restore(tmp_path / "checkpoint")
    for step in range(3, 6):
        second.step(feeds(seed=step, name="lenet"))
    assert second.state_sha256() == straight.state_sha256()
    assert second.steps_done == 6


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_refused(exported: Callable[[str], str], tmp_path: Path) -> None:
    make(exported("lenet")).save(tmp_path / "checkpoint")
    trainer = make(exported("mlp"))
    before = trainer.state_sha256()
    with pytest.raises(UsageError):
        trainer.restore(tmp_path / "checkpoint")
    assert trainer.state_sha256() == before


@pytest.mark.full
@pytest.mark.parametrize("name", ["lenet", pytest.param("resnet18-small", marks=pytest.mark.large)])
def test_the_exported_file_is_the_users_own_with_new_weights(name: str, exported: Callable[[str], str], tmp_path: Path) -> None:
    path = exported(name)
    trainer = make(path)
    data = feeds(name=name)
    for _ in range(3):
        trainer.step(data)
    trainer.export(tmp_path / "trained.onnx")
    before, after = onnx.load(path), onnx.load(tmp_path / "trained.onnx")
    names = {i.name for i in after.graph.initializer}
    assert {i.name for i in before.graph.initializer} <= names
    assert [o.version for o in after.opset_import if not o.domain] == [o.version for o in before.opset_import if not o.domain]
    onnx.checker.check_model(after)
    session = onnxruntime.InferenceSession(str(tmp_path / "trained.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"input": data["input"]})
    accuracy = float((logits.argmax(1) == data["label"]).mean())
    assert trainer.evaluate([data])["accuracy"] == pytest.approx(accuracy)
    scores = logits - logits.max(1, keepdims=True)
    loss = float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(8), data["label"]]))
    assert trainer.evaluate([data])["loss"] == pytest.approx(loss, rel=1e-4)


def test_frozen_parameters_stay_and_the_rest_trains(exported: Callable[[str], str]) -> None:
    trainer = make(exported("lenet"), freeze=["features.*"])
    before = {name: array.copy() for name, array in trainer.state.arrays.items()}
    trainer.step(feeds(name="lenet"))
    for name, array in before.items():
        if name.startswith("features."):
            np.testing.assert_array_equal(trainer.state.arrays[name], array)
        elif name.startswith("classifier.") and "::" not in name:
            assert not np.array_equal(trainer.state.arrays[name], array), name


def test_the_learning_rate_can_be_scheduled(exported: Callable[[str], str]) -> None:
    trainer = make(exported("mlp"), "sgd:lr=0.1")
    trainer.learning_rate = 0.0
    before = trainer.state.arrays["layers.0.weight"].copy()
    trainer.step(feeds())
    np.testing.assert_array_equal(trainer.state.arrays["layers.0.weight"], before)
    assert trainer.learning_rate == 0.0


def test_the_numpy_backend_gives_the_same_training(exported: Callable[[str], str]) -> None:
    losses = {}
    for backend in ("onnxruntime", "numpy"):
        trainer = make(exported("lenet"), backend=backend)
        losses[backend] = [trainer.step(feeds(name="lenet"))["loss"] for _ in range(3)]
    assert losses["numpy"] == pytest.approx(losses["onnxruntime"], rel=1e-5)


def test_an_unknown_backend_is_a_clear_error(exported: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="unknown backend 'onnxruntim'; did you mean 'onnxruntime'"):
        make(exported("mlp"), backend="onnxruntim")


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, None, "fast"])
def test_a_learning_rate_that_is_none_changes_nothing(exported: Callable[[str], str], rate: object) -> None:
    program = make(exported("mlp")).program
    with graphc.Trainer(program, threads=1, schedule=lambda step: 0.1 if step == 0 else rate) as trainer:
        trainer.step(feeds())
        before = trainer.state_sha256()
        with pytest.raises(UsageError, match="a learning rate must be a finite number"):
            trainer.step(feeds())
        assert trainer.state_sha256() == before
        assert trainer.steps_done == 1


def test_a_second_thread_is_refused(trainer: graphc.Trainer) -> None:
    """Two threads in the buffers of one plan would train on each other's batches."""
    inside, leave = threading.Event(), threading.Event()

    def wait(kind: str, name: str, run: Callable[[], None]) -> Callable[[], None]:
        def waiting() -> None:
            inside.set()
            leave.wait(20)
            run()

        return waiting

    with graphc.Trainer(trainer.program, threads=1, wrap=wait) as shared:
        first = threading.Thread(target=shared.step, args=(feeds(),))
        first.start()
        assert inside.wait(20)
        with pytest.raises(UsageError, match="another thread is using this trainer"):
            shared.step(feeds())
        leave.set()
        first.join()
        assert shared.steps_done == 1
        shared.step(feeds())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (feeds(), "this is one batch; give a list of batches"),
        ([tuple(feeds().values())], "a batch is a mapping .*, not a tuple; graphc.data.shard"),
        ([{"label": feeds()["label"]}], "the feed 'input' is missing"),
        (None, "this is a NoneType"),
    ],
)
def test_what_is_no_batch_is_said(trainer: graphc.Trainer, batches: object, message: str) -> None:
    with trainer:
        for method in (trainer.fit, trainer.evaluate):
            with pytest.raises(FeedError, match=message):
                method(batches)  # type: ignore[operator]


def test_an_evaluation_of_nothing_is_refused(trainer: graphc.Trainer) -> None:
    with trainer, pytest.raises(FeedError, match="no samples that count"):
        trainer.evaluate([])


def test_soft_labels_with_metrics_follow_torch(exported: Callable[[str], str]) -> None:
    """Loss and accuracy divide by one and the same count then."""
    import torch

    loss = graphc.losses.SoftmaxCrossEntropy(label_kind="probabilities", metrics=True)
    program = graphc.compile(exported("mlp"), loss=loss, optimizer=graphc.optim.SGD(lr=0.1))
    x = feeds()["input"]
    label = np.random.default_rng(0).dirichlet(np.ones(10), len(x)).astype(np.float32)
    (logits,) = onnxruntime.InferenceSession(exported("mlp")).run(None, {"input": x})
    with graphc.Trainer(program, threads=1) as trainer:
        found = trainer.evaluate([{"input": x, "label": label}])
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(label))
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == label.argmax(1)).mean())


@pytest.mark.parametrize("send", [copy.deepcopy, lambda program: pickle.loads(pickle.dumps(program))])
def test_a_program_can_be_copied_and_sent(trainer: graphc.Trainer, send: Callable[[object], graphc.Program]) -> None:
    """A launcher of one's own, ``multiprocessing`` for one, sends it to other processes."""
    found = []
    for program in (trainer.program, send(trainer.program)):
        with graphc.Trainer(program, threads=1) as one:
            found.append((one.step(feeds()), one.evaluate([feeds()])))
    assert found[0] == found[1]


def test_the_signature_names_every_option() -> None:
    parameters = inspect.signature(graphc.Trainer).parameters
    assert {"program", "comm", "threads", "seed", "schedule", "trace", "transport"} < parameters.keys()
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.full
def test_a_trainer_may_be_used_and_dropped_on_another_thread(exported: Callable[[str], str]) -> None:
    """oneDNN's own scratch memory would belong to the thread that made the primitive."""
    path = exported("resnet18-small")
    batch = feeds(name="resnet18-small")
    expected = [make(path).step(batch)["loss"] for _ in range(2)]
    made_here, found = [make(path)], list[float]()

    def elsewhere() -> None:
        with make(path) as other:
            found.append(made_here[0].step(batch)["loss"])
            made_here.pop().close()
            found.append(other.step(batch)["loss"])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == expected


def test_a_trainer_is_freed_with_its_last_reference(exported: Callable[[str], str]) -> None:
    assert make_and_leave(exported("mlp"))() is None


def make_and_leave(path: str) -> weakref.ref[graphc.Trainer]:
    """A step, with Python's collector of circles paused: references alone must free what the trainer holds."""
    gc.disable()
    try:
        with make(path) as made:
            made.step(feeds())
        return weakref.ref(made)
    finally:
        gc.enable()

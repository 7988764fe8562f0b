"""Where collectives stand after ``schedule``."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

import graphc
from graphc.errors import UnsupportedOpError
from graphc.ir.declare import is_update
from graphc.ir.names import GRADIENT_OF
from graphc.pipeline import Context, run
from tests.training import torch_models


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return torch_models.save(
        torch_models.make(torch_models.Cnn), tmp_path_factory.mktemp("schedule") / "cnn.onnx", torch.randn(4, 3, 8, 8)
    )


def compiled(path: str, **options: object) -> list[ir.Node]:
    program = graphc.compile(
        path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), bucket_mb=0.001, **options
    )
    return [n for n in program.model.graph if n.op_type != "Constant"]


def kinds(nodes: list[ir.Node], kind: str) -> dict[str, int]:
    """Position of each collective of this kind by tag."""
    return {n.attributes["tag"].as_string(): k for k, n in enumerate(nodes) if n.op_type == f"AllReduce{kind}"}


@pytest.mark.full
def test_gradients_start_when_they_exist_and_are_awaited_behind_the_backward_pass(path: str) -> None:
    nodes = compiled(path)
    starts, waits = kinds(nodes, "Start"), kinds(nodes, "Wait")
    last_gradient = max(k for k, n in enumerate(nodes) if any(GRADIENT_OF in v.metadata_props for v in n.outputs))
    assert starts.keys() == waits.keys()
    assert min(waits.values()) > last_gradient
    assert sum(k < last_gradient for k in starts.values()) >= 2
    assert sorted(starts, key=starts.__getitem__) == sorted(waits, key=waits.__getitem__)
    for node, position in ((n, starts[n.attributes["tag"].as_string()]) for n in nodes if n.op_type == "AllReduceStart"):
        if all(len(v.shape) == 0 for v in node.inputs):
            assert nodes[position + 1].op_type == "AllReduceStart", "single numbers start with the next gradients"
        else:
            assert nodes[position - 1] in {v.producer() for v in node.inputs} or nodes[position - 1].op_type == "AllReduceStart"


@pytest.mark.full
def test_statistics_are_awaited_where_they_are_used_with_work_in_between(path: str) -> None:
    nodes = compiled(path, sync_batchnorm=True)
    starts, waits = kinds(nodes, "Start"), kinds(nodes, "Wait")
    inner = [tag for tag in starts if "batch_norm" in tag or "BatchNormalization" in tag or tag.endswith("::grad")]
    backward = [tag for tag in inner if tag.endswith("::grad")]
    assert len(inner) == 4
    assert len(backward) == 2
    first_update = next(k for k, n in enumerate(nodes) if is_update(n))
    outer = min(k for tag, k in waits.items() if tag not in inner)
    assert max(waits[tag] for tag in inner) < outer < first_update
    overlapped = [n.op_type for tag in backward for n in nodes[starts[tag] + 1 : waits[tag]]]
    assert "ConvGradWeight" in overlapped  # the weight gradient of the layer behind, for which nobody waits
    order = {v: k for k, n in enumerate(nodes) for v in n.outputs}
    assert all(order[v] < k for k, n in enumerate(nodes) for v in n.inputs if v in order)


@pytest.mark.full
def test_shared_statistics_are_not_differentiated_twice(path: str) -> None:
    program = graphc.compile(
        path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), sync_batchnorm=True,
        passes="legalize,train_mode,sync_batchnorm,loss,autodiff,optimizer",
    )  # fmt: skip
    first = next(
        v for n in program.model.graph for v in n.outputs if v.metadata_props.get(GRADIENT_OF, "").endswith("0.weight")
    )
    with pytest.raises(UnsupportedOpError, match="leave sync_batchnorm out"):
        run(program.model, f"autodiff{{of={first.name},wrt=head.weight}}", Context(done=["legalize"]))


def test_the_pass_refuses_a_graph_with_gradients(path: str) -> None:
    with pytest.raises(graphc.errors.UsageError, match="between 'train_mode' and 'loss'"):
        graphc.compile(
            path,
            loss=graphc.losses.SoftmaxCrossEntropy(),
            optimizer=graphc.optim.SGD(lr=0.1),
            passes="legalize,train_mode,loss,autodiff,sync_batchnorm,optimizer",
        )


def test_sharded_parameters_are_gathered_one_bucket_ahead_and_freed(path: str) -> None:
    nodes = compiled(path, strategy="zero:stage=3")
    kind = [(n.op_type.removeprefix("AllGather"), n.attributes["tag"].as_string()) for n in nodes if "AllGather" in n.op_type]
    tags = [tag for what, tag in kind if what == "Wait"]
    assert len(tags) > 4
    assert tags == [tag for what, tag in kind if what == "Start"]
    expected = [("Start", tags[0])]
    for tag, following in zip(tags, [*tags[1:], None], strict=True):
        expected += [("Wait", tag), *([("Start", following)] if following else [])]
    assert kind == expected
    for k, node in enumerate(nodes):  # a bucket is waited for where it is used, not at the beginning
        if node.op_type == "AllGatherWait":
            assert nodes[k + 1].op_type == "AllGatherStart" or set(nodes[k + 1].inputs) & set(node.outputs)


def test_one_transient_reduction_is_under_way_while_the_next_fills(path: str) -> None:
    nodes = compiled(path, strategy="zero:stage=2")
    flying, most = set[str](), 0
    for node in nodes:
        if node.op_type == "ReduceScatterStart":
            flying.add(node.attributes["tag"].as_string())
        elif node.op_type == "ReduceScatterWait":
            flying.discard(node.attributes["tag"].as_string())
        most = max(most, len(flying))
    assert sum(n.op_type == "ReduceScatterStart" for n in nodes) > 2
    assert most == 1

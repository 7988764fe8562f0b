"""Cases of generated kernels: ONNX's own and the gradients of networks, on any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import graphc
from graphc.backends.cupy.segment.program import KernelCall
from graphc.bench.models import export
from graphc.bench.specs import SPECS
from graphc.ir.declare import is_update
from graphc.pipeline import run
from graphc.plan.specialise import prepare
from tests.backends.host_kernels import run_segment
from tests.conformance.suite import plain, quick_cases

CASES = [
    "test_add_bcast",
    "test_and_bcast3v1d",
    "test_cast_FLOAT_to_FLOAT16",
    "test_cast_FLOAT16_to_FLOAT",
    "test_ceil",
    "test_celu",
    "test_celu_expanded",
    "test_clip",
    "test_concat_3d_axis_1",
    "test_concat_2d_axis_negative_1",
    "test_depthtospace_crd_mode_example",
    "test_div_uint8",
    "test_elu",
    "test_erf",
    "test_expand_dim_changed",
    "test_eyelike_with_dtype",
    "test_flatten_axis2",
    "test_gather_1",
    "test_gather_negative_indices",
    "test_gather_elements_0",
    "test_gelu_tanh_1",
    "test_hardsigmoid",
    "test_hardswish",
    "test_mish",
    "test_shrink_hard",
    "test_shrink_soft",
    "test_layer_normalization_4d_axis1",
    "test_layer_normalization_3d_axis_negative_1_epsilon",
    "test_leakyrelu",
    "test_log",
    "test_logsoftmax_axis_1",
    "test_max_float64",
    "test_mean_example",
    "test_mod_mixed_sign_int32",
    "test_mod_mixed_sign_float32",
    "test_onehot_negative_indices",
    "test_pow_bcast_array",
    "test_prelu_broadcast",
    "test_reduce_l2_keep_dims_random",
    "test_reduce_log_sum_exp_do_not_keepdims_random",
    "test_reduce_max_negative_axes_keepdims_random",
    "test_reduce_mean_keepdims_random",
    "test_reduce_min_bool_inputs",
    "test_reduce_prod_do_not_keepdims_random",
    "test_reduce_sum_square_keepdims_random",
    "test_relu",
    "test_reshape_negative_dim",
    "test_rms_normalization_3d_axis1_epsilon",
    "test_round",
    "test_selu",
    "test_sigmoid",
    "test_sign",
    "test_slice",
    "test_slice_negative_axes",
    "test_softmax_axis_0",
    "test_softmax_large_number",
    "test_softplus",
    "test_spacetodepth",
    "test_split_variable_parts_2d_opset18",
    "test_squeeze_negative_axes",
    "test_sub_bcast",
    "test_sum_example",
    "test_transpose_all_permutations_3",
    "test_triu_neg",
    "test_tril_square",
    "test_unsqueeze_three_axes",
    "test_where_example",
    "test_xor_bcast4v4d",
    "test_batchnorm_epsilon_training_mode",
]

REDUCING = ("test_reduce", "test_layer_norm", "test_rms_norm", "test_softmax", "test_logsoftmax", "test_batchnorm")
SHAPES = frozenset({"axes", "shape", "new_shape", "starts", "ends", "steps", "repeats", "split", "depth", "k"})
"""Inputs of the cases that decide the shape of the result."""


def legal_case(name: str) -> tuple[Any, onnx.ModelProto, dict[str, np.ndarray]]:
    """A case of the standard, its legal model with static shapes, and its feeds."""
    case = quick_cases()[name]
    inputs, _ = case.data_sets[0]
    feeds = {v.name: plain(x) for v, x in zip(case.model.graph.input, inputs, strict=True)}
    model = ir.from_proto(case.model)
    for value in [v for v in model.graph.inputs if v.name in SHAPES]:  # a training graph has them as constants
        value.const_value = ir.tensor(feeds.pop(value.name), name=value.name)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    run(model, "legalize")
    return case, ir.to_proto(prepare(model, {n: x.shape for n, x in feeds.items()})), feeds


def check_case(name: str, device: object, splits: int | None) -> None:
    """The case comes out of generated kernels as the standard says."""
    case, model, feeds = legal_case(name)
    _, outputs = case.data_sets[0]
    results, segment = run_segment(model, feeds, device, splits=splits)
    assert any(isinstance(call, KernelCall) for call in segment.calls), "nothing was generated"
    for value, expected in zip(case.model.graph.output, map(plain, outputs), strict=True):
        assert results[value.name].dtype == expected.dtype
        np.testing.assert_allclose(results[value.name], expected, rtol=case.rtol, atol=max(case.atol, 1e-6))


def gradients_model(name: str, batch: int, tmp_path: Path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Loss and gradients of a network in standard ops, and feeds."""
    path = str(tmp_path / f"{name}.onnx")
    export(name, path)
    program = graphc.compile(path, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1))
    x, y = SPECS[name].batch(batch)
    feeds = {"input": x, "label": y}
    model = prepare(program.model, {n: a.shape for n, a in feeds.items()})
    graph = model.graph
    updates = [n for n in graph if is_update(n)]
    gradients = [n.inputs[1] for n in updates if n.op_type == "SGD"]
    for node in reversed(updates):
        for out in node.outputs:
            out.replace_all_uses_with(node.inputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
    graph.outputs.extend(g for g in dict.fromkeys(gradients) if g is not None and not g.is_graph_output())
    return ir.to_proto(model), feeds


def check_network(name: str, device: object, splits: int | None, tmp_path: Path, tolerance: float = 1e-5) -> None:
    """Loss and gradients are those of onnxruntime, relative to the largest element of each."""
    model, feeds = gradients_model(name, 3, tmp_path)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    used = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    expected = dict(zip(names, session.run(None, {n: a for n, a in feeds.items() if n in used}), strict=True))
    results, _ = run_segment(model, feeds, device, splits=splits)
    for output, value in expected.items():
        scale = max(float(np.abs(value).max()), 1e-12)
        np.testing.assert_allclose(results[output] / scale, value / scale, rtol=0, atol=tolerance, err_msg=output)


LAYER_NORM_GRADIENT = """{
  xf = Cast<to=1>(x)  gf = Cast<to=1>(g)
  last = Constant<value_ints=[-1]>()  first = Constant<value_ints=[0]>()
  m = ReduceMean(xf, last)  c = Sub(xf, m)  q = Mul(c, c)  v = ReduceMean(q, last)
  e = Constant<value_float=1e-5>()  w = Add(v, e)  r = Sqrt(w)  n = Div(c, r)
  h = Mul(gf, s)  a = ReduceMean(h, last)  hn = Mul(h, n)  b = ReduceMean(hn, last)
  nb = Mul(n, b)  d0 = Sub(h, a)  d1 = Sub(d0, nb)  d2 = Div(d1, r)  d3 = Add(d2, o)
  dx = Identity(d3)  dl = Cast<to=16>(d3)
  gn = Mul(gf, n)  ds = ReduceSum<keepdims=0>(gn, first)  db = ReduceSum<keepdims=0>(gf, first)
}"""

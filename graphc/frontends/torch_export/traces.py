"""What PyTorch's older exporter, which traces a module, would drop without a word: ``detach``, ``no_grad``, assigned buffers.

with torch.no_grad(): p = f(x)             p = graphc.StopGradient(f(x))
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphc.frontends.torch_export import marks, own_gradients
from graphc.frontends.torch_export.notes import Notes
from graphc.ir import DOMAIN

_DETACH = "aten::detach"

_COUNTED = ("running_mean", "running_var", "num_batches_tracked")
"""How the names of BatchNormalization's buffers end, which ONNX has."""


def trace(
    module: torch.nn.Module, names: Sequence[str], tensors: Sequence[torch.Tensor], axes: Mapping[str, Any], opset: int
) -> tuple[ir.Model, Notes]:
    """Trace ``module`` called with ``tensors``, and write the trace as a model.

    Args:
        axes: names of axes of free length, by input.

    Raises:
        TypeError: the trace would lose a gradient.
    """
    file, before = io.BytesIO(), {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    parameters = [(name, parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()]
    torch.onnx.utils.register_custom_op_symbolic(_DETACH, _stop_gradient, opset)
    try:
        with own_gradients.refused(), _Detached() as mode:
            torch.onnx.export(
                module,
                tuple(tensors),
                file,  # type: ignore[arg-type]
                dynamo=False,
                do_constant_folding=False,
                training=torch.onnx.TrainingMode.PRESERVE,
                opset_version=opset,
                input_names=list(names),
                dynamic_axes=axes,
            )
    finally:
        assigned = [name for name, parameter, value in parameters if not torch.equal(parameter, value)]
        with torch.no_grad():
            for _, parameter, value in parameters if assigned else ():
                parameter.copy_(value)
        torch.onnx.utils.unregister_custom_op_symbolic(_DETACH, opset)
    if assigned:
        raise TypeError(f"it would lose the gradient of what forward assigns to {', '.join(map(repr, assigned))}")
    model = ir.from_proto(onnx.load_from_string(file.getvalue()))
    marks.define(model)
    after = dict(module.named_buffers())
    held = [name for name in before if name in after and not name.endswith(_COUNTED)]
    return model, Notes(hooked=mode.hooked, changed=[n for n in held if not torch.equal(after[n], before[n])])


def _stop_gradient(graph: Any, x: Any) -> Any:
    return graph.op(f"{DOMAIN}::StopGradient", x).setType(x.type())


class _Detached(TorchFunctionMode):
    """Detaches what is computed without gradients: a trace records ``detach``, and no regions.

    Attributes:
        hooked: whether a tensor got a hook on its gradient.
    """

    hooked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach_:
            raise TypeError("it would lose a detach_(); write x = x.detach()")
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            func = torch.Tensor.detach
        self.hooked |= func is torch.Tensor.register_hook
        result = func(*args, **(kwargs or {}))
        in_place = getattr(func, "__name__", "").rstrip("_") != getattr(func, "__name__", "")
        if torch.is_grad_enabled() or in_place or not torch._C._is_tracing():
            return result
        return pytree.tree_map_only(torch.Tensor, lambda x: x.detach() if x.is_floating_point() else x, result)

"""Make graphc/demo/digits_cnn.onnx: a small untrained convolutional network for 8×8 digits, exported from PyTorch.

    python scripts/make_demo_model.py [OUT]

The file is what an ordinary export looks like: inference-mode BatchNormalization and Dropout, random initial weights, a
dynamic batch. The seed is fixed, so the same PyTorch writes the same bytes.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from graphc import frontends
from graphc.frontends.onnx import to_inference

TARGET = Path(__file__).parent.parent / "graphc" / "demo" / "digits_cnn.onnx"
SEED = 20
OPSET = 18


class DigitsCNN(torch.nn.Module):
    """Two convolutions with BatchNorm, pooling, Dropout and a linear layer: images [N, 1, 8, 8] → logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(16)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(32)
        self.pool = torch.nn.MaxPool2d(2)
        self.dropout = torch.nn.Dropout(0.25)
        self.classifier = torch.nn.Linear(32 * 4 * 4, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(image)))
        x = torch.relu(self.norm2(self.conv2(x)))
        x = self.dropout(self.pool(x))
        return self.classifier(torch.flatten(x, 1))


def export() -> ir.Model:
    """The model as ONNX. Exported in training mode, since the exporter drops Dropout and folds BatchNorm otherwise."""
    torch.manual_seed(SEED)
    model = DigitsCNN().train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    buffer = io.BytesIO()
    torch.onnx.export(
        model,
        (torch.zeros(2, 1, 8, 8),),
        buffer,
        dynamo=False,
        opset_version=OPSET,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
    )
    exported = frontends.load(onnx.load_from_string(buffer.getvalue()))
    for node in list(exported.graph):
        to_inference(node)
        # The mask of Dropout and the constants that said "training" are used by nobody now.
        if node.op_type == "Dropout":
            node.resize_outputs(1)
    for node in list(exported.graph):
        if node.op_type == "Constant" and not node.outputs[0].uses():
            exported.graph.remove(node, safe=True)
    for name, value in exported.graph.initializers.items():
        # Tracing in training mode has moved the running statistics.
        if name in weights:
            value.const_value = ir.Tensor(weights[name].numpy(), name=name)
    exported.graph.name = "digits_cnn"
    return exported


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    frontends.save(export(), target)
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()

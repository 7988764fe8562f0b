"""What PyTorch's exporter lacks: captures for batches of any size, and ONNX forms of operators."""

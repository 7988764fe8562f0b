"""graphc: a dataflow-graph compiler that trains ONNX models."""

__version__ = "0.1.0"

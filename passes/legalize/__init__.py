"""Passes that turn any ONNX file into the core subset."""

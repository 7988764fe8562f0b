"""Any ONNX file becomes the core subset."""

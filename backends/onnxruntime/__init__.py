"""backends/onnxruntime"""

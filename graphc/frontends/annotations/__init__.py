"""ONNX's own multi-device annotations: pipeline stages, devices and shards, read as a request and written."""

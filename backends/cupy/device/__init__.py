"""One GPU: memory, streams, CUDA graphs, compiled kernels, and a planning device.

Any backend that computes with CUDA may import this folder (``onnxruntime-cuda`` takes its memory from here); the other folders
of ``backends/cupy`` are private to this backend.
"""

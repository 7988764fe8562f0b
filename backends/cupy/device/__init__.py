"""One GPU: memory, streams, CUDA graphs, compiled kernels, and the device that only plans.

Any backend that computes with CUDA may import this folder (``onnxruntime-cuda`` takes its memory from here); the other folders
of ``backends/cupy`` are this backend's own.
"""

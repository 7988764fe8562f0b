"""One GPU: memory, streams, CUDA graphs, compiled kernels."""

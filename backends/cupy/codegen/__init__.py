"""Code generation: renders kernels as CUDA C."""

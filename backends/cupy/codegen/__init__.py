"""Code generation: kernels as CUDA C."""

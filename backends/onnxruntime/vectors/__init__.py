"""Vector instructions for compiled kernels that LLVM would not vectorise."""

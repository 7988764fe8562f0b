"""NCCL: bindings, calls and the communicator of GPUs."""

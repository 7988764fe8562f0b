"""Code generation for NVIDIA GPUs: a segment becomes fused kernels in CUDA C and nodes that a library runs.

    segment ─► take apart ─► group ─► kernels (text, launch shape) and library nodes, in order

Nothing here needs a GPU: the same kernels run on the host in the tests.
"""

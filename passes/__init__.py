"""The passes of graphc, one file each; gradient rules by family of ops in :mod:`graphc.passes.gradients`."""

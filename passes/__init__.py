"""The passes of graphc, one file each; gradient rules are in :mod:`graphc.passes.gradients`, by family of ops."""

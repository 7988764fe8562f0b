"""Stages of ``graphc doctor --smoke`` that try this backend's kernels and libraries."""

"""Pooling, resizing, sampling and folding: sums and maxima over windows of images."""

"""``graphc bench``: compares step times with PyTorch's, measured in turn in one run."""

"""``graphc bench``: step times against PyTorch, measured side by side in one run."""

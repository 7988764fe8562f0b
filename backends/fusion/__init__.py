"""The fusion compiler: everything that is independent of the target."""

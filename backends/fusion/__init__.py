"""The fusion compiler: the parts that no target owns."""

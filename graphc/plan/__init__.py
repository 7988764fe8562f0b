"""A plan: the training graph as steps of one rank, with every value placed in a buffer."""

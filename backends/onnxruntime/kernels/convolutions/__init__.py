"""Convolutions and their gradients, one algorithm a module; :mod:`.convolution` chooses."""

"""What lies between gradients and parameters: transforms of gradients, updates, the test for NaN."""

"""The meeting point of ranks that meet at a TCP address."""

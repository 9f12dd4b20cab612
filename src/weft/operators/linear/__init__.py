"""Linear layers: products with a weight, and what follows them in the same launch."""

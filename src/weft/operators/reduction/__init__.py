"""Sums, means, extremes and norms, over one axis or all."""

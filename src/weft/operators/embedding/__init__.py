"""Embedding look-up and its gradient, sorted and deterministic."""

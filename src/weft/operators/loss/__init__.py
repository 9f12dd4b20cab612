"""Losses: cross entropy over a vocabulary, its gradient in the same pass."""

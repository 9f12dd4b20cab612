"""Normalisation over the last dimension."""

"""Attention: softmax(q kᵀ) v in tiles, the scores never stored."""

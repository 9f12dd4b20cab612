"""Softmax over one dimension."""

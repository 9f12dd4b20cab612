"""Mixture of experts: routing, grouped products over uneven groups of rows, and the whole feed-forward layer."""

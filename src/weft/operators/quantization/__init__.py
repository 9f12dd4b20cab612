"""Absmax quantisation to 8 and 4 bits, its inverse, and what a scheme loses."""

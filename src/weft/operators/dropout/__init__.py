"""Dropout whose mask is a function of seed and place, so that it is never stored."""

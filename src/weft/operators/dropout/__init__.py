"""Dropout whose mask is a function of the seed and the element's index, so that it is never stored."""

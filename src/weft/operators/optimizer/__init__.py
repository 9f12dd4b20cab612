"""Optimizer steps: one launch for all parameters of all shapes and dtypes, through a table of pointers."""

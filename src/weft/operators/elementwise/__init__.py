"""Operators that touch each element once."""

"""Transposes: the last two axes of a tensor exchanged, and the result laid out in memory."""

"""Measuring what a model serves (``weft bench-llm``), against the bytes and FLOPs that it must move."""

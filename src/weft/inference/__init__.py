"""LLM inference: a paged engine with continuous batching, from a folder to text (``weft.LLM``, ``weft generate``)."""

from typing import Any

WHERE = {"LLM": "llm", "Completion": "llm", "Engine": "engine", "Output": "outputs", "SamplingParameters": "parameters"}


def __getattr__(name: str) -> Any:
    import importlib

    if name in WHERE:
        return getattr(importlib.import_module(f"weft.inference.{WHERE[name]}"), name)
    raise AttributeError(f"module 'weft.inference' has no attribute {name!r}")

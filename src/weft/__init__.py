"""weft: a GPU performance workbench, from the warp to the fabric.

Importing it imports neither PyTorch nor Triton. The public operators are in :mod:`weft.ops`, the
optimizers in :mod:`weft.optim`, modules in :mod:`weft.nn`; ``weft.patch(model)`` is for models of Hugging Face,
``weft.LLM(folder)`` runs one.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    import importlib

    if name == "profile":
        return importlib.import_module("weft.profiling.session").profile
    if name in ("patch", "unpatch"):
        return getattr(importlib.import_module("weft.nn.patching"), name)
    if name in ("LLM", "SamplingParameters"):
        return getattr(importlib.import_module("weft.inference"), name)
    if name in ("nn", "ops", "optim"):
        return importlib.import_module(f"weft.{name}")
    raise AttributeError(f"module 'weft' has no attribute {name!r}")

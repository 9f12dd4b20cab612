"""Profiles of training and inference: where the time goes, how far each kernel is from the machine's limit, what to do first.

:func:`profile` records a part of a loop, :func:`read` reads what PyTorch, Nsight Systems wrote, :func:`analyse` makes the
tables and the ranked advice. ``weft profile`` does the same from the command line.
"""

from typing import Any

_WHERE = {"profile": "session", "read": "files", "analyse": "analysis", "compare": "comparison"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(f"weft.profiling.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'weft.profiling' has no attribute {name!r}")

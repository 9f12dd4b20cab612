"""Models as ONNX files with dynamic dimensions, checked with ONNX Runtime at other shapes; their latency by runtime.

:func:`to_onnx` exports and checks, :func:`latency` times. ``weft export`` does both from the command line.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "to_onnx":
        from weft.export.model import to_onnx

        return to_onnx
    if name == "latency":
        from weft.export.runtimes import latency

        return latency
    raise AttributeError(f"module 'weft.export' has no attribute {name!r}")

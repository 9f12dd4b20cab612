"""How a number of things and a span of time are written."""

import re

UNITS = {"d": 86400, "h": 3600, "min": 60, "s": 1}  # seconds


def count(number: float, noun: str) -> str:
    """``1 GPU``, ``1,200 GPUs``, ``0.5 GPUs``."""
    whole = int(number) if number == int(number) else number
    return f"{whole:,} {noun}" + ("" if whole == 1 else "s")


def seconds(text: str) -> float:
    """``2d`` or ``2 d``, ``36h``, ``90min``, ``40s``, ``7200``: seconds.

    Raises:
        ValueError: something else.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(d|h|min|s|)", text.strip())
    if not found:
        raise ValueError(f"span of time '{text}'; expected one such as 2d, 36h, 90min, 40s or 7200 (seconds)")
    return float(found[1]) * (UNITS[found[2]] if found[2] else 1)


def period(seconds: float) -> str:
    """``108 d 21 h``, ``2 h 5 min``, ``40 s``: the two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    parts: list[str] = []
    left = round(seconds)
    for unit, size in UNITS.items():
        if left >= size and len(parts) < 2:
            parts.append(f"{left // size:,} {unit}")
            left %= size
        elif parts:
            break
    return " ".join(parts)


SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # as in nccl-tests: K is 1024


def byte_count(text: str, name: str = "size") -> int:
    """``8``, ``4K``, ``64KiB``, ``1.5M``: bytes, with K = 1024.

    Raises:
        ValueError: something else, or less than one byte.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * SIZES[found[2].upper()] if found else 0
    if size < 1 or size != int(size):
        raise ValueError(f"{name} is '{text}'; expected bytes above 0 such as 8, 4K, 64M or 1G (K = 1024)")
    return int(size)

"""How numbers, names and workloads are written and ordered, in the page and in the tables alike."""

import math
import re
from collections.abc import Iterable
from typing import Any

from weft.records import Measurement

NONE = "–"  # a number that there is none of
SPACE = "\u202f"  # narrow and unbreakable, between a number and its unit
_DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32", "fp64")
_PEERS = ("torch", "torch.compile")  # what a user has already comes first among the peers


def known(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def figures(value: Any, digits: int = 3) -> str:
    """Three significant digits without an exponent: 0.0123, 4.26, 96.1, 1,234."""
    if not known(value):
        return NONE
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # after rounding: 0.9999 is written 1.00
    decimals = max(0, digits - 1 - exponent)
    return f"{value:,.{min(decimals, 9)}f}"


def si(value: Any, unit: str) -> str:
    """``4.26e12, "B/s"`` → ``4.26 TB/s``."""
    if not known(value):
        return NONE
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{figures(value / scale)}{SPACE}{prefix}{unit}"
    return f"{figures(value)}{SPACE}{unit}"


def kib(size: Any) -> str:
    """Bytes of on-chip memory, which comes in powers of two: ``101376`` → ``99 KiB``."""
    return f"{size / 1024:.4g}{SPACE}KiB" if known(size) else NONE


def percent(share: Any) -> str:
    return f"{100 * share:.1f}{SPACE}%" if known(share) else NONE


def ratio(value: Any) -> str:
    return f"{value:.2f}×" if known(value) else NONE


def spread(low: Any, high: Any, write: Any) -> str:
    """``1.02–1.06``, or nothing where the spread was not recorded."""
    return f"{write(low)}–{write(high)}" if known(low) and known(high) else ""


def workload_key(workload: str) -> tuple[tuple[int, float, str], ...]:
    """Sorts ``N=4096`` before ``N=32768``, and options after the sizes they belong to."""
    parts = (part.partition("=")[2] or part for part in workload.split(","))
    return tuple((0, float(p), "") if re.fullmatch(r"\d+", p) else (1, 0.0, p) for p in parts)


def dtype_key(dtype: str) -> tuple[int, str]:
    return (_DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES), dtype)


def point_key(m: Measurement) -> tuple[Any, ...]:
    """The order of measured points: by dtype, then by the sizes of the axes."""
    return (dtype_key(m.dtype), workload_key(m.workload), m.cache, m.device)


def implementation_key(m: Measurement) -> tuple[Any, ...]:
    """Ours first, then PyTorch, then the other peers by name; rungs of a ladder in their order."""
    peer = _PEERS.index(m.implementation) if m.implementation in _PEERS else len(_PEERS)
    steps = tuple(int(number) for number in re.findall(r"\d+", m.implementation)) if is_rung(m) else ()
    return (not m.ours, is_rung(m), steps, 0 if m.ours else peer, m.implementation)


def is_rung(m: Measurement) -> bool:
    """A teaching version: a step of a ladder, not meant for use."""
    return m.implementation.startswith("ladder-")


def is_ceiling(m: Measurement) -> bool:
    return m.operator == "ceiling"


def distinct(values: Iterable[str]) -> list[str]:
    """Each value once, in order of first appearance, empty ones left out."""
    return list(dict.fromkeys(value for value in values if value))


def listing(names: Iterable[str]) -> str:
    """``a, b and c``."""
    names = list(names)
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

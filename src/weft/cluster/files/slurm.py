"""Slurm's resources: what of a job's TRES (``gres/gpu:h100`` → ``8``) and of a node's gres (``gpu:h100:8``) are GPUs."""

import math
import re
from collections.abc import Mapping
from typing import Any

MIG = re.compile(r"(?:(.*)[_:.-])?(\d+)g\.\d+gb(?:\+[\w.]+)?")  # of a slice's type: its GPU, its sevenths of one


def typed(tres: Mapping[str, str]) -> dict[str, int]:
    return {name.removeprefix("gres/gpu:"): int(n) for name, n in tres.items() if name.startswith("gres/gpu:")}


def gpus(tres: Mapping[str, str]) -> tuple[int, float]:
    """How many, and thousandths of each: -1000 where slices are of several sizes, or stand beside whole ones. ``gres/gpu`` has
    all; where the site does not record it, those of each type."""
    each = typed(tres)
    slices = {name: match for name in each if (match := MIG.fullmatch(name))}
    sizes = {int(match[2]) for match in slices.values()}
    count = int(tres["gres/gpu"]) if "gres/gpu" in tres else sum(each.values())
    if not sizes:
        return count, 1000
    several = len(sizes) > 1 or len(slices) < len(each)
    many, sevenths = sum(each[name] for name in slices), min(sizes.pop(), 7)
    if not several and many * sevenths <= 7:  # they may lie on one GPU
        many, sevenths = 1, many * sevenths
    return many, -1000 if several else 1000 * sevenths // 7


def has_shards(tres: Mapping[str, str]) -> bool:
    return any(name.split(":")[0] == "gres/shard" and amount != "0" for name, amount in tres.items())


def whole_types(tres: Mapping[str, str]) -> list[str]:
    """The types of GPUs that are asked for; slices are of any."""
    return [name for name in typed(tres) if not MIG.fullmatch(name)]


def number(value: Any, what: str) -> float:
    """A number of ``--json``, which may be an object of ``set``, ``infinite`` and ``number``: NaN where it is not set.

    Raises:
        ValueError: it is none.
    """
    given = value
    if isinstance(value, dict):
        infinite = value.get("infinite") is True
        value = "Infinity" if infinite else value.get("number") if value.get("set", True) is True else None
    if value is None or value == "":
        return math.nan
    if value in ("Infinity", "INFINITE", "UNLIMITED"):
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2.0**63:
        raise ValueError(f"{what} is {given!r:.60}; expected a number")
    return float(value)

"""Slurm's resources: what of a job's TRES (``gres/gpu:h100`` → ``8``) and of a node's gres (``gpu:h100:8``) are GPUs."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from weft.cluster.files import shares

MIG = re.compile(r"(?:(.*)[_:.-])?(\d+)g\.\d+gb(?:\+[\w.]+)?")  # of a slice's type: its GPU, its sevenths of one

GRES = re.compile(
    r"([^,:()]+)((?::[^,:()]+)*?)(?::(\d+)([KMGTP]?))?(?:\([^)]*\))?"
)  # name, types, count, where they are
ENTRY = re.compile(r"[^,(]+(?:\([^)]*\))?")


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


@dataclass(frozen=True)
class Gres:
    """A node's generic resources."""

    gpus: int
    types: tuple[str, ...]
    shards: int
    others: tuple[str, ...]


def gres_of(text: str) -> Gres:
    """What ``gpu:a100:4(S:0-1),shard:16`` has. GPUs that are cut by MIG count as many as hold the slices.

    Raises:
        ValueError: it is no list of gres.
    """
    parts: dict[Fraction, int] = {}
    types, others = dict[str, None](), dict[str, None]()
    shards = 0
    for entry in [] if text.strip() in ("", "(null)", "N/A") else ENTRY.findall(text):
        match = GRES.fullmatch(entry.strip())
        if not match:
            raise ValueError(f"'{text:.80}' is no list of gres; expected name:type:count, such as gpu:h100:8")
        name, kind, count, unit = match.groups()
        amount = int(count or 1) * 1024 ** " KMGTP".index(unit or " ")
        kind = kind.removeprefix(":").replace("no_consume", "").strip(":")
        if name == "shard":
            shards += amount
        elif name != "gpu":
            others[name] = None
        elif amount:
            cut = MIG.fullmatch(kind)
            size = shares.of_mig(cut[2]) if cut else Fraction(1)
            if not size:
                raise ValueError(f"'{entry:.80}' is a slice of nothing; expected 1g to 7g")
            parts[size] = parts.get(size, 0) + amount
            types[(cut[1] or "" if cut else kind) or "gpu"] = None
    return Gres(shares.gpus_holding(parts), tuple(types), shards, tuple(others))


def hosts(text: str, most: int) -> list[str]:
    """``cn[001-003,7],gpu1`` → cn001, cn002, cn003, cn7, gpu1.

    Raises:
        ValueError: it is no list of hosts, or of more than that many.
    """
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names = [""]
        for plain, inside in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            choices = [plain] if plain else [each for span in inside.split(",") for each in _range(span, text, most)]
            if len(names) * len(choices) + len(found) > most:
                raise ValueError(f"'{text:.80}' are too many nodes; expected at most {most:,}")
            names = [name + choice for name in names for choice in choices]
        found += names
    if not found or text.count("[") != text.count("]") or any("[" in name or "]" in name for name in found):
        raise ValueError(f"'{text:.80}' are no names of nodes; expected such as cn[001-080],gpu1")
    return found


def _range(span: str, text: str, most: int) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", span.strip())
    if not match:
        raise ValueError(f"'{text:.80}' are no names of nodes; expected such as cn[001-080],gpu1")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 0 <= last - first < most:
        raise ValueError(f"'{text:.80}' are {last - first + 1:,} nodes; expected 1 to {most:,}")
    return [str(number).zfill(len(match[1])) for number in range(first, last + 1)]

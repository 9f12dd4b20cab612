"""Which tile, warps and stages a kernel uses: measured configurations where there are any, a heuristic elsewhere.

``configs/sm_90.json`` in an operator's folder, written by ``weft tune``, maps keys such as ``forward,16-bit,8192`` to
configurations. Nothing is ever tuned at a first call.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from weft.operators.launch import target_sm
from weft.records import write_whole

Config = dict[str, int]
# 16-bit floats move the same bytes through the same units, so they share their configurations.
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "16-bit", torch.bfloat16: "16-bit"}


class Configurations:
    """The configurations of one kernel.

    Args:
        file: a module of the operator's folder (``__file__``), beside whose ``configs/`` the measured ones lie.
        name: the kernel's name, the first word of every key.
        heuristic: ``(sm, *key) -> Config``, a sound choice for any key; or one for all.
        candidates: ``(sm, *key) -> configurations worth measuring``; or those for any key.
    """

    all: ClassVar["list[Configurations]"] = []

    def __init__(self, file: str, name: str, heuristic: Config | Callable[..., Config], candidates: Any = ()):
        self.folder, self.name = Path(file).parent / "configs", name
        self.heuristic = heuristic if callable(heuristic) else lambda sm, *key: heuristic
        self.candidates = candidates if callable(candidates) else lambda sm, *key: candidates
        self.tables: dict[int, dict[str, Config]] = {}
        self.trial: Config | None = None  # set by `weft tune` while it measures one
        self.trial_key: tuple[Any, ...] | None = None  # the only key that it is for
        self.asked: list[tuple[Any, ...]] | None = None  # set by `weft tune` to learn the keys of a workload
        Configurations.all.append(self)

    def __call__(self, device: torch.device, *key: Any) -> Config:
        sm = target_sm(device)
        if self.asked is not None:
            self.asked.append((sm, *key))
        if self.trial is not None and self.trial_key in (None, (sm, *key)):
            return self.trial
        return self.table(sm).get(self.key(*key)) or self.heuristic(sm, *key)

    def key(self, *key: Any) -> str:
        return ",".join([self.name, *(DTYPE_NAMES.get(k, str(k)) for k in key)])

    def table(self, sm: int) -> dict[str, Config]:
        """Measured configurations of an architecture, read once."""
        if sm not in self.tables:
            path = self.folder / f"sm_{sm}.json"
            self.tables[sm] = json.loads(path.read_text()) if path.is_file() else {}
        return self.tables[sm]

    def write(self, sm: int, measured: dict[str, Config]) -> Path:
        """Adds measured configurations to the architecture's file, keys sorted."""
        path = self.folder / f"sm_{sm}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.is_file() else {}
        known.update(measured)
        lines = [f"  {json.dumps(k)}: {json.dumps(known[k])}" for k in sorted(known, key=_natural)]
        write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")
        self.tables.pop(sm, None)
        return path


def constants_of(config: Config) -> Config:
    """The compile-time constants of a configuration: all but warps and stages."""
    return {name: value for name, value in config.items() if name.isupper()}


def _natural(key: str) -> list[tuple[int, Any]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(",")]


def bucket(n: int, least: int = 1) -> int:
    """The next power of two: sizes that share a bucket share a configuration."""
    return max(least, 1 << max(int(n) - 1, 0).bit_length())


def grid_of(choices: Mapping[str, Sequence[int]]) -> Iterable[Config]:
    """Every combination: ``grid_of({"BLOCK": (1024, 2048), "num_warps": (4, 8)})``."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def tiles(choices: Mapping[str, Sequence[int]], least: int, most: int, of: Sequence[str] = ("TILE",)) -> list[Config]:
    """Every combination in which a thread of ``num_warps`` warps has ``least`` to ``most`` elements of a tile whose extents are
    the choices ``of``."""
    found = []
    for config in grid_of(choices):
        each = math.prod(config[extent] for extent in of) // (32 * config["num_warps"])
        if least <= each <= most:
            found.append(config)
    return found

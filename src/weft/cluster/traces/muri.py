"""Muri (Zhao et al. 2022): Tiresias' columns and more, in milliseconds."""

from pathlib import Path

from weft.cluster.model import Jobs
from weft.cluster.trace import Format
from weft.cluster.traces import tiresias


def load(path: Path) -> Jobs:
    return tiresias.load(path, unit=1e-3)


FORMAT = Format("muri", load, "Muri's columns, milliseconds")

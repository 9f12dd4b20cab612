"""Sia (Jayaram Subramanya et al. 2023): Pollux' workloads, with measurements of several GPU types."""

from pathlib import Path

from weft.cluster.model import Jobs
from weft.cluster.trace import Format
from weft.cluster.traces import pollux


def load(path: Path, measurements: str | Path | None = None, gpu: str = "aws") -> Jobs:
    return pollux.load(path, measurements, gpu)


FORMAT = Format("sia", load, "Sia's workloads, on its GPU type aws by default", options=("measurements", "gpu"))

"""Data-parallel training jobs as CSV: steps to do, and what one computes and sends; measured links make durations of them."""

from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files.columns import read
from weft.cluster.files.text import TraceError
from weft.cluster.model import MOST_GPUS, Jobs
from weft.cluster.step_time import Link, step_ms
from weft.cluster.trace import Format, jobs_of, names

NUMBERS = ("submit", "gpus", "steps", "compute_ms", "parameters", "bytes")


def load(path: Path, within: str = "", between: str = "", node_gpus: float = 8.0) -> Jobs:
    """A job's duration is ``steps`` times :func:`weft.cluster.step_time.step_ms`, on nodes that it fills.

    ``submit`` is seconds; ``compute_ms`` what a GPU computes in a step (of ``weft train`` on one GPU, its ``step_ms``);
    ``parameters`` are sent as ``bytes`` each (4). ``id`` and ``tenant`` are words.

    Args:
        within: a record of ``weft comm`` on the GPUs of a node.
        between: one on a GPU of each of several nodes; needed where a job has more GPUs than a node.
        node_gpus: GPUs of a node.
    """
    if not within:
        raise TraceError(f"{path}: it needs a record of weft comm: --option within=comm.jsonl")
    if not 1 <= node_gpus <= MOST_GPUS or node_gpus % 1:
        raise TraceError(f"{path}: node_gpus is {node_gpus:g}; expected a whole number of 1 or more")
    inside = Link.read(Path(within))
    outside = Link.read(Path(between)) if between else None
    table = read(path, NUMBERS, ("id", "tenant"), optional=("bytes", "id", "tenant"))
    numbers = {name: table.numbers[name] for name in NUMBERS if name in table.numbers}
    gpus = table.whole("gpus")
    size = np.nan_to_num(numbers.get("bytes", np.full(len(gpus), 4.0)), nan=4.0)
    for name in numbers.keys() - {"submit", "gpus"}:
        if len(bad := np.flatnonzero(numbers[name] < 0)):
            raise table.wrong(int(bad[0]), name, "0 or more")
    duration = np.full(len(gpus), np.nan)
    for k in np.flatnonzero(gpus > 0):
        steps, compute_ms, sent = numbers["steps"][k], numbers["compute_ms"][k], numbers["parameters"][k] * size[k]
        if np.isfinite([steps, compute_ms, sent]).all():
            try:
                one = step_ms(float(compute_ms), float(sent), int(gpus[k]), int(node_gpus), inside, outside)
            except ValueError as error:
                raise TraceError(f"{path}:{table.lines[k]}: {error}: --option between=…") from None
            duration[k] = steps * one / 1e3
    more: dict[str, Any] = {"id": table.words["id"]} if "id" in table.words else {}
    if "tenant" in table.words:
        more["tenant"], more["tenants"] = names(table.words["tenant"])
    return jobs_of(table, numbers["submit"], duration, gpus, **more)


FORMAT = Format(
    "training", load, "steps, compute_ms and parameters of data-parallel jobs, and weft comm's records of the links",
    options=("within", "between", "node_gpus"),
)  # fmt: skip

"""How near to each other the nodes of a job were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import WHOLE

if TYPE_CHECKING:
    from weft.cluster.result import Result


def locality(result: Result) -> dict[str, float | int | None]:
    """Of the stretches of time in which a job held several nodes (a job that nobody stopped has one):

    ``gangs``, how many there were; ``one_domain``, ``one_rack`` and ``several_racks``, the shares of them whose nodes lay in
    one NVLink domain, otherwise in one rack, or in several; ``gpu_s_one_domain`` …, the same of their GPU seconds; and
    ``racks_mean``, racks a gang. None where there were none.
    """
    held, cluster = result.stretches, result.cluster
    ran = np.flatnonzero(~np.isnan(held.begin) & (np.diff(held.slot) > 1))
    first, last = held.slot[ran], held.slot[ran + 1]
    length = last - first
    where = held.where[np.repeat(first - (np.cumsum(length) - length), length) + np.arange(length.sum())]
    owner = np.repeat(np.arange(len(ran)), length)
    nodes, domains, racks = (
        _different(owner, number, len(ran)) for number in (where, cluster.domain[where], cluster.rack[where])
    )
    gangs = nodes > 1
    job = held.job[ran[gangs]]
    gpu_s = (result.jobs.gpus * result.jobs.milli)[job] / WHOLE * (held.end - held.begin)[ran[gangs]]
    domains, racks = domains[gangs], racks[gangs]
    near = {"one_domain": domains == 1, "one_rack": (domains > 1) & (racks == 1), "several_racks": racks > 1}
    count, total = len(job), float(gpu_s.sum())
    return {
        "gangs": count,
        **{name: float(those.mean()) if count else None for name, those in near.items()},
        **{f"gpu_s_{name}": float(gpu_s[those].sum()) / total if total else None for name, those in near.items()},
        "racks_mean": float(racks.mean()) if count else None,
    }


def _different(owner: NDArray[np.int64], number: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """How many different numbers each owner has, [count]."""
    pairs = np.sort(owner * (int(number.max(initial=0)) + 1) + number)  # np.unique, by hashing, takes ten times as long
    pairs = pairs[np.append(True, np.diff(pairs) > 0)[: len(pairs)]]
    return np.bincount(pairs // (int(number.max(initial=0)) + 1), minlength=count)

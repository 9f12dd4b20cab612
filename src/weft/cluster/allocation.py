"""How full the cluster was over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weft.cluster.model import WHOLE

if TYPE_CHECKING:
    from weft.cluster.result import Result

SHARES = {"p5": 0.05, "p50": 0.5, "p95": 0.95}


def allocation(result: Result) -> dict[str, float | None]:
    """The share of the cluster's GPUs that jobs held, from the first arrival to the last start: ``mean``, ``max``, and
    ``p50``, which it was at most for half of that time.

    After the last start nothing is decided and the cluster only drains: ``utilisation`` counts that time, this does not.
    Where all jobs started at once the time until the last completion counts.
    """
    jobs, held = result.jobs, result.stretches
    ran = ~np.isnan(held.begin)
    capacity = result.cluster.total_gpus * WHOLE
    begin = float(jobs.submit.min()) if len(jobs) else 0.0
    until = float(held.begin[ran].max()) if ran.any() else begin
    if until == begin and ran.any():
        until = float(held.end[ran].max())
    if not capacity or until == begin:
        return dict.fromkeys(("mean", "max", *SHARES))
    taken = (jobs.gpus * jobs.milli)[held.job[ran]]
    time = np.concatenate((held.begin[ran], np.minimum(held.end[ran], until)))
    order = np.argsort(time, kind="stable")
    time = np.concatenate(([begin], time[order], [until]))
    value = np.concatenate(([0], np.cumsum(np.concatenate((taken, -taken))[order])))  # from time[i] to time[i + 1]
    length = np.diff(time)
    value, length = value[length > 0], length[length > 0]
    order = np.argsort(value)
    value, upto = value[order], np.cumsum(length[order])
    found = {name: value[np.searchsorted(upto, share * upto[-1])] for name, share in SHARES.items()}
    found |= {"mean": float((value * length[order]).sum() / upto[-1]), "max": value[-1]}
    return {name: float(found[name]) / capacity for name in ("mean", "max", *SHARES)}

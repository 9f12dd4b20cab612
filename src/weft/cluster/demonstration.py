"""A small comparison for ``weft report``: generated jobs on a small cluster under five policies.

python -m weft.cluster.demonstration    # prints it as one JSON object
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from weft.cluster.metrics import summary
from weft.cluster.model import Cluster, Jobs
from weft.cluster.simulation import simulate
from weft.cluster.synthetic.generate import generate

ORDERS = ("fifo", "fifo-skip", "fifo-easy", "sjf-skip", "srtf")
JOBS, NODES, LOAD, SEED = 2000, "20x8", 0.9, 0


def demonstrate(orders: Sequence[str] = ORDERS, jobs: int = JOBS) -> dict[str, Any]:
    """What each policy does to the same generated jobs, best fit. Policies run in a process for every four cores: each compiles
    its part of the engine the first time.

    Returns:
        ``cluster``, ``load`` (of the cluster's GPUs), ``seed``, and in ``runs`` the summary of each
        (:func:`weft.cluster.metrics.summary`).
    """
    cluster = Cluster.parse(NODES)
    run = partial(_run, generate(jobs, cluster, load=LOAD, seed=SEED), cluster)
    if (processes := min((os.cpu_count() or 1) // 4, len(orders))) < 2:
        runs = list(map(run, orders))
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            runs = list(pool.map(run, orders))
    return {"cluster": NODES, "load": LOAD, "seed": SEED, "runs": runs}


def _run(jobs: Jobs, cluster: Cluster, order: str) -> dict[str, Any]:
    return summary(simulate(jobs, cluster, order, "best"))


if __name__ == "__main__":
    json.dump(demonstrate(), sys.stdout, allow_nan=False)

"""A small comparison for ``weft report``: generated jobs on a small cluster under five policies.

python -m weft.cluster.demonstration    # prints it as one JSON object
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from weft.cluster.metrics import summary
from weft.cluster.model import Cluster
from weft.cluster.simulation import simulate
from weft.cluster.synthetic.generate import generate

ORDERS = ("fifo", "fifo-skip", "fifo-easy", "sjf-skip", "srtf")
JOBS, NODES, LOAD, SEED = 2000, "20x8", 0.9, 0


def demonstrate(orders: Sequence[str] = ORDERS, jobs: int = JOBS) -> dict[str, Any]:
    """What each policy does to the same generated jobs, best fit.

    Returns:
        ``cluster``, ``load`` (of the cluster's GPUs), ``seed``, and in ``runs`` the summary of each
        (:func:`weft.cluster.metrics.summary`).
    """
    cluster = Cluster.parse(NODES)
    made = generate(jobs, cluster, load=LOAD, seed=SEED)
    runs = [summary(simulate(made, cluster, order, "best")) for order in orders]
    return {"cluster": NODES, "load": LOAD, "seed": SEED, "runs": runs}


if __name__ == "__main__":
    json.dump(demonstrate(), sys.stdout, allow_nan=False)

"""The simulator against a real Slurm: every job starts in the same order and within a minute of the same moment."""

from __future__ import annotations

import numpy as np
import pytest
from slurm_cluster import Ran, missing, run

from weft.cluster import Cluster, Jobs, simulate
from weft.cluster.synthetic.generate import generate

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NODES, GPUS = 8, 8
CLUSTER = Cluster.parse(f"{NODES}x{GPUS}")
# A minute of the jobs is 1.5 s of this machine, and their 42 minutes are about one. A machine that is busy for longer than that
# makes jobs late; then once more at half the speed: what is really another policy differs at any speed.
RATES = (40.0, 20.0)
TOLERANCE_S = 60.0


def workload() -> Jobs:
    """40 jobs of 1 to 24 GPUs, two thirds of which wait.

    A few seconds may decide whom a backfill lets pass, and so all that follows. With this seed they do not: durations up
    to 15 s longer move no start by more than 35 s, and whether a plan holds GPUs or whole nodes moves none. What other
    policies do is minutes away.
    """
    sizes = {1: 0.25, 2: 0.2, 4: 0.2, 8: 0.2, 16: 0.1, 24: 0.05}
    jobs = generate(40, CLUSTER, load=1.3, median_s=400, sigma=0.8, sizes=sizes, seed=124)
    g = np.random.default_rng(124)
    duration = jobs.duration.round().clip(60, 1500)
    asked = duration * np.where(g.random(40) < 0.5, 1, g.uniform(1, 3, 40))  # half know how long they run
    limits: list[int] = []  # minutes; no two the same: Slurm takes ends within 30 s together
    for minutes in np.ceil((asked + 60) / 60).astype(int).tolist():
        limits.append(next(m for m in range(minutes, minutes + 41) if m not in limits))
    return Jobs(np.round(jobs.submit - jobs.submit[0]), duration, jobs.gpus, estimate=np.array(limits) * 60.0)


def differences(ran: list[Ran], start) -> list[str]:
    """Where the starts are not Slurm's; of two that the simulator has more than the tolerance apart also the order."""
    slurm = np.array([job.start for job in ran])
    late = [
        f"job {j} starts at {slurm[j]:g}, not {start[j]:g}" for j in np.flatnonzero(abs(slurm - start) > TOLERANCE_S)
    ]
    swapped = (start[:, None] < start - TOLERANCE_S) & (slurm[:, None] >= slurm)
    return late + [f"job {b} starts before job {a}" for a, b in np.argwhere(swapped)]


@pytest.mark.parametrize(
    ("scheduler", "order", "others"),
    [
        ("builtin", "fifo", ["fifo-skip", "sjf"]),
        ("backfill", "fifo-conservative", ["fifo", "fifo-skip", "fifo-easy"]),
    ],
)
def test_jobs_start_as_in_slurm(scheduler, order, others):
    jobs = workload()

    def simulated(order: str):
        return simulate(jobs, CLUSTER, order=order, placement="first").start

    for rate in RATES:
        ran = run(jobs, NODES, GPUS, scheduler, rate)
        found = differences(ran, simulated(order))
        if not found:
            break
    assert found == []
    for other in others:  # the test can tell policies apart
        assert differences(ran, simulated(other)), f"{other} starts them in the same way"

"""The simulator against a real Slurm: every job starts in the same order and within a minute of the same moment."""

import numpy as np
import pytest
from slurm_cluster import missing, run

from weft.cluster import Cluster, Jobs, simulate
from weft.cluster.synthetic.generate import generate

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NODES, GPUS = 8, 8
CLUSTER = Cluster.parse(f"{NODES}x{GPUS}")
# A minute of the jobs is 1.5 s of this machine, and their 15 minutes are 23 s. A machine that is busy for longer than that
# makes jobs late; then once more at half the speed: what is really another policy differs at any speed.
RATES = (40.0, 20.0)
TOLERANCE_S = 60.0
SEED = 2465


def workload() -> Jobs:
    """30 jobs of 1 to 24 GPUs, half of which wait.

    A few seconds may decide whom a backfill lets pass, and so all that follows. With this seed they do not: durations up
    to 15 s longer move no start by more than 30 s. What other policies do is minutes away.
    """
    sizes = {1: 0.25, 2: 0.2, 4: 0.2, 8: 0.2, 16: 0.1, 24: 0.05}
    jobs = generate(30, CLUSTER, load=1.5, median_s=200, sigma=0.8, sizes=sizes, seed=SEED)
    g = np.random.default_rng(SEED)
    duration = jobs.duration.round().clip(60, 700)
    asked = duration * np.where(g.random(30) < 0.5, 1, g.uniform(1, 3, 30))  # half know how long they run
    limits: list[int] = []  # minutes; no two the same: Slurm takes ends within 30 s together
    for minutes in np.ceil((asked + 60) / 60).astype(int).tolist():
        limits.append(next(m for m in range(minutes, minutes + 31) if m not in limits))
    return Jobs(np.round(jobs.submit - jobs.submit[0]), duration, jobs.gpus, estimate=np.array(limits) * 60.0)


def differences(slurm: list[float], start) -> list[str]:
    """Where the starts are not Slurm's; of two that the simulator has more than the tolerance apart also the order."""
    apart = [j for j, at in enumerate(slurm) if abs(at - start[j]) > TOLERANCE_S]
    late = [f"job {j} starts at {slurm[j]:g}, not {start[j]:g}" for j in apart]
    swapped = (start[:, None] < start - TOLERANCE_S) & (np.array(slurm)[:, None] >= slurm)
    return late + [f"job {b} starts before job {a}" for a, b in np.argwhere(swapped)]


@pytest.mark.parametrize(("scheduler", "order", "others"), [
    pytest.param("builtin", "fifo", ["fifo-skip", "sjf"], marks=pytest.mark.long),
    pytest.param("backfill", "fifo-conservative", ["fifo", "fifo-skip", "fifo-easy"], marks=pytest.mark.share(2)),
])  # fmt: skip
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

"""Three nodes, four jobs, and what a placement costs: the cluster simulator step by step.

    python examples/schedule_a_cluster.py [first|best|worst|random|consolidate]

Best fit gives j0 the node that is left with the fewest free GPUs: the one with 48 GB cards. j3, the only job that needs
those, then waits five seconds. First fit and worst fit happen to leave it free. A policy that looks at GPUs alone wastes
memory; that is what the `memory` in a wait's reasons means.
"""

import sys

from weft.cluster import Simulator

NODES = {"a": (4, 24), "b": (2, 48), "c": (8, 16)}  # GPUs, GB of each
JOBS = {"j0": (2, 16, 5), "j1": (1, 24, 3), "j2": (4, 12, 8), "j3": (2, 32, 4)}  # GPUs, GB of each, seconds


def play(placement: str) -> float:
    """Plays the scene under one placement, prints every step, and returns the makespan."""
    sim = Simulator(placement=placement)
    for name, (gpus, memory) in NODES.items():
        sim.add_node(name, gpus=gpus, gpu_memory_gb=memory)
    for name, (gpus, memory, duration) in JOBS.items():
        sim.add_job(name, gpus=gpus, memory_per_gpu_gb=memory, duration=duration)
    print(f"\n{placement} fit")
    while events := sim.step():
        status = sim.status()
        nodes = "   ".join(
            f"{name} [{' '.join(job or '--' for job in gpus)}]" for name, gpus in status["nodes"].items()
        )
        print(f"{sim.now:4g} s  {nodes}")
        print("        " + ", ".join(f"{job} {what}" for _, what, job in events if what != "pending"))
        if sim.queue:
            print("        waiting: " + ", ".join(f"{job.id} for {job.reason}" for job in sim.queue))
    return sim.now


def main() -> None:
    placements = sys.argv[1:] or ["first", "best", "worst", "random"]
    try:
        ends = {placement: play(placement) for placement in placements}
    except ValueError as error:  # a placement that does not exist
        sys.exit(f"schedule_a_cluster: {error}")
    print("\nmakespan: " + ", ".join(f"{name} {end:g} s" for name, end in ends.items()))


if __name__ == "__main__":
    main()

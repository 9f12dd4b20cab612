"""How fast the engine is: the speed table of docs/cluster.md, and how time grows with jobs and nodes.

python -m weft.cluster.speed            # print
python -m weft.cluster.speed --save     # and append records to results/<cpu>/simulate.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from weft import records
from weft.cluster.generate import generate
from weft.cluster.metrics import peak_memory_mib, summary
from weft.cluster.model import Cluster, Jobs, NodeGroup
from weft.cluster.simulate import simulate

MILLION = 1_000_000
ORDERS = ("fifo", "fifo-skip", "sjf", "fifo-easy")
GPUS, ALL = "GPUs", "GPUs, cores, memory, types"


def points() -> Iterator[tuple[str, str, int, int, float, str]]:
    """(order, placement, jobs, nodes, load, what jobs ask): the table, then growth with jobs, then with nodes."""
    for load in (0.7, 1.1):
        for order in ORDERS:
            yield order, "best", MILLION, 10_000, load, GPUS
        yield "fifo-skip", "best", MILLION, 10_000, load, ALL
    yield "fifo-conservative", "best", MILLION, 10_000, 0.7, GPUS
    yield "fifo-conservative", "best", 100_000, 1000, 1.1, GPUS
    for jobs in (1000, 10_000, 100_000):
        yield "fifo-skip", "best", jobs, 10_000, 0.7, GPUS
    for nodes in (10, 100, 1000, 100_000):
        yield "fifo-skip", "best", 100_000, nodes, 0.7, GPUS


def asking_all(jobs: Jobs, seed: int = 0) -> Jobs:
    """The jobs with 4 to 16 cores and 32 to 128 GiB for each GPU, a fifth of them for one type of GPU only."""
    g = np.random.default_rng(seed)
    return dataclasses.replace(
        jobs,
        cpu=jobs.gpus * g.choice([4000, 8000, 16_000], len(jobs)),
        memory=jobs.gpus * g.choice([32, 64, 128], len(jobs)) * 1024,
        types=g.choice([0, 1, 2], len(jobs), p=[0.8, 0.1, 0.1]),
        type_sets=((), ("A",), ("B",)),
    )


def measure(order: str, placement: str, jobs: int, nodes: int, load: float, asks: str) -> dict[str, Any]:
    """One point: CPU seconds of the engine (median of three), of the metrics, and the process's peak memory."""
    cluster = Cluster.parse(f"{nodes}x8")
    trace = generate(jobs, cluster, load=load)
    if asks == ALL:
        cluster = Cluster.of([NodeGroup(nodes // 2, 8, kind, cpu=128, memory_gb=1024) for kind in ("A", "B")])
        trace = asking_all(trace)
    times = []
    for _ in range(3):
        result = simulate(trace, cluster, order, placement)
        times.append(result.cpu_s)
    begin = time.process_time()
    found = summary(result)
    return {
        "cpu_s": sorted(times)[1],
        "metrics_s": time.process_time() - begin,
        "peak_memory_mib": peak_memory_mib(),
        "mean_jct_s": found["jct"]["mean"],
        "mean_queueing_s": found["queueing"]["mean"],
    }


def main() -> None:
    from weft.hardware import query  # for the processor's name; the rest of the room does without

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="append records")
    parser.add_argument("--point", nargs=6, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.point:
        order, placement, jobs, nodes, load, asks = asked.point
        sys.stdout.write(json.dumps(measure(order, placement, int(jobs), int(nodes), float(load), asks)))
        return
    for point in points():
        # A process of its own for each, so that its peak memory is its own.
        command = [sys.executable, "-m", "weft.cluster.speed", "--point", *map(str, point)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        order, placement, jobs, nodes, load, asks = point
        sys.stdout.write(
            f"{order:17} {jobs:>9,} jobs {nodes:>7,} nodes, load {load}, asking {asks}: {found['cpu_s']:6.3f} CPU s, metrics "
            f"{found['metrics_s']:.3f} s, peak {found['peak_memory_mib']:4.0f} MiB, queueing {found['mean_queueing_s']:.0f} s\n"
        )
        sys.stdout.flush()
        if asked.save:
            named = dict(zip(("order", "placement", "jobs", "nodes", "load", "asks"), point, strict=True))
            about = {"machine": query.name("cpu"), "commit": records.commit(), "time": records.now()}
            records.Store().append(about["machine"], "simulate", {"benchmark": "simulate", **named, **found, **about})


if __name__ == "__main__":
    main()

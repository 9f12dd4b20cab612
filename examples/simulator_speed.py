"""How fast the cluster simulator is, and how its time grows with jobs and nodes (docs/measured/simulator.md).

python examples/simulator_speed.py                      # print
python examples/simulator_speed.py --save               # and append records to results/<cpu>/simulate.jsonl
python examples/simulator_speed.py --jobs-at-most 1e5   # leave larger points out
python examples/simulator_speed.py --order srtf         # one order's points
python examples/simulator_speed.py --picture docs/pictures/simulator-growth.svg    # draw the records, measure nothing
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time
from typing import Any

import numpy as np

from weft import records
from weft.cluster import Cluster, Jobs, NodeGroup, generate, simulate
from weft.cluster.metrics import peak_memory_mib, summary
from weft.hardware import query
from weft.report import growth, simulator

MILLION = 1_000_000
ORDERS = ("fifo", "fifo-skip", "sjf", "fifo-easy", "fifo-conservative", "srtf", "las", "2d-las")
GPUS, ALL = "GPUs", "GPUs, cores, memory, types"

Point = tuple[str, str, int, int, float, str]  # order, placement, jobs, nodes, load, what jobs request


def points() -> list[Point]:
    """The table, then growth with jobs, then with nodes; each point once."""
    found: list[Point] = []
    for load in (0.7, 1.1):
        found += [(order, "best", MILLION, 10_000, load, GPUS) for order in ORDERS]
        found.append(("fifo-skip", "best", MILLION, 10_000, load, ALL))
    for order in ("fifo-skip", "srtf"):
        found += [(order, "best", 10**k, nodes, 0.7, GPUS) for nodes in (1000, 10_000) for k in (3, 4, 5, 6)]
        found += [(order, "best", 100_000, 10**k, 0.7, GPUS) for k in (1, 2, 3, 4, 5)]
    return list(dict.fromkeys(found))


def with_all_requests(jobs: Jobs, seed: int = 0) -> Jobs:
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
        trace = with_all_requests(trace)
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


def in_its_own_process(point: Point) -> dict[str, Any]:
    """:func:`measure` of a point, so that the peak memory is the point's own."""
    command = [sys.executable, __file__, "--point", *map(str, point)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{', '.join(map(str, point))}: status {done.returncode}\n{done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(point: Point, save: bool) -> None:
    found = in_its_own_process(point)
    order, _, jobs, nodes, load, asks = point
    print(
        f"{order:17} {jobs:>9,} jobs {nodes:>7,} nodes, load {load}, requests {asks}: {found['cpu_s']:6.3f} CPU s, metrics "
        f"{found['metrics_s']:.3f} s, peak {found['peak_memory_mib'] or 0:4.0f} MiB, queueing "
        f"{found['mean_queueing_s']:.0f} s",
        flush=True,
    )
    if save:
        named = dict(zip(("order", "placement", "jobs", "nodes", "load", "asks"), point, strict=True))
        about = {"machine": query.name("cpu"), "commit": records.commit(), "time": records.now()}
        records.Store().append(about["machine"], simulator.FILE, {"benchmark": "simulate", **named, **found, **about})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="append records")
    parser.add_argument("--jobs-at-most", type=float, default=math.inf, metavar="N", help="leave larger points out")
    known = sorted({point[0] for point in points()})
    parser.add_argument("--order", action="append", choices=known, help="measure this order only; may be repeated")
    parser.add_argument("--picture", metavar="FILE", help="draw the growth in this machine's records, measure nothing")
    parser.add_argument("--point", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        order, placement, jobs, nodes, load, asks = given.point
        print(json.dumps(measure(order, placement, int(jobs), int(nodes), float(load), asks)))
    elif given.picture:
        timed = simulator.read(records.Store().lines(name=simulator.FILE))
        growth.picture(given.picture, simulator.of_one_machine(timed, query.name("cpu")))
    else:
        chosen = [p for p in points() if p[2] <= given.jobs_at_most and (not given.order or p[0] in given.order)]
        for order, placement, asks in dict.fromkeys((p[0], p[1], p[5]) for p in chosen):
            in_its_own_process((order, placement, 100, 10, 0.7, asks))  # compiles: its memory would count as a point's
        for point in chosen:
            run(point, given.save)


if __name__ == "__main__":
    main()

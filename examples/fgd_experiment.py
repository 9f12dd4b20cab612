"""The experiment of FGD's authors (Weng et al., USENIX ATC 2023): 17 pod lists × 6 placements × 10 seeds on 1,213 nodes.

python examples/fgd_experiment.py FOLDER            # of openb_node_list_gpu_node.csv and openb_pod_list_*.csv
python examples/fgd_experiment.py FOLDER --save     # and append records to results/<cpu>/fgd_experiment.jsonl
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft import records
from weft.cluster import cluster_file, inflation
from weft.cluster.traces import openb
from weft.hardware import query

LISTS = (
    "default",
    *(f"multigpu{n}" for n in (20, 30, 40, 50)),
    *(f"gpushare{n}" for n in (40, 60, 80, 100)),
    *(f"gpuspec{n}" for n in (10, 20, 25, 33)),
    *(f"cpu{n}" for n in ("050", 100, 200, 250)),
)
PLACEMENTS = ("random", "dot-product", "gpu-clustering", "gpu-packing", "best-resources", "fgd")
SEEDS = range(42, 52)


def measure(task: tuple[Path, str, str]) -> tuple[str, str, list[float], float]:
    """One list under one placement: the share of the GPUs that was allocated at 100 % arrival, for each seed, and
    CPU seconds with reading and drawing."""
    folder, name, placement = task
    begin = time.process_time()
    cluster = cluster_file.load(folder / "openb_node_list_gpu_node.csv")
    path = next(p for p in (folder / f"openb_pod_list_{name}.csv{end}" for end in (".gz", "")) if p.exists())
    jobs = openb.requests(path)
    found = [inflation.allocated(inflation.fill(jobs, cluster, placement, seed=seed)) for seed in SEEDS]
    return name, placement, found, time.process_time() - begin


def run(folder: Path, processes: int) -> Iterator[tuple[str, str, list[float], float]]:
    tasks = [(folder, name, placement) for name in LISTS for placement in PLACEMENTS]
    measure((folder, "default", "random"))  # compiles once, for all processes
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(measure, tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save", action="store_true", help="append records")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    begin = time.perf_counter()
    for name, placement, found, cpu_s in run(given.folder, given.processes):
        mean, deviation = 100 * float(np.mean(found)), 100 * float(np.std(found, ddof=1))
        print(f"{name:12} {placement:15} {mean:6.2f} % ± {deviation:.2f}  {cpu_s:5.1f} CPU s", flush=True)
        if given.save:
            about = {"machine": query.name("cpu"), "commit": records.commit(), "time": records.now()}
            line = {
                "benchmark": "fgd_experiment",
                "list": name,
                "placement": placement,
                "allocated": found,
                "cpu_s": cpu_s,
            }
            records.Store().append(about["machine"], "fgd_experiment", {**line, **about})
    print(f"{time.perf_counter() - begin:.0f} s with {given.processes} processes")


if __name__ == "__main__":
    main()

"""Why a job can never run: the node of the empty cluster that comes nearest, and what it lacks."""

import numpy as np
from numpy.typing import NDArray

from weft.cluster import gangs
from weft.cluster.model import WHOLE, Cluster, Jobs, accepts
from weft.words import count


def why_unschedulable(jobs: Jobs, j: int, cluster: Cluster, in_one_rack: bool = False) -> str:
    """What job j lacks in the empty cluster, or in each rack of it, in words. Assumes that it does not fit."""
    gpus, pods = int(jobs.gpus[j]), int(jobs.pods[j])
    if gpus and not cluster.total_gpus:
        return f"it needs {count(gpus, 'GPU')}, and the cluster has none"
    largest = gangs.node_gpus(jobs, [j], cluster)[0]
    whole = jobs.milli[j] == WHOLE  # shares are not divided over nodes
    each = gpus // pods if pods else min(gpus, largest) if whole else gpus
    wanted = jobs.type_sets[int(jobs.types[j])]
    gpu_memory, cpu, memory = float(jobs.gpu_memory[j]), int(jobs.cpu[j]), int(jobs.memory[j])
    if part := (1, pods) if pods else (each, gpus) if gpus else ():
        cpu, memory = gangs.share(cpu, *part), gangs.share(memory, *part)
    best: tuple[tuple[int, bool, float], list[str], str] | None = None
    able = 0
    for n, name in enumerate(cluster.names):
        lacks, times = [], 0.0  # how many times more it needs than the node has
        kind = cluster.types[int(cluster.gpu_type[n])]
        if cluster.gpus[n] < each:
            lacks.append(f"{count(each, 'GPU')} (it has {cluster.gpus[n]})")
            times += each / max(cluster.gpus[n], 0.5)
        other = not accepts(wanted, kind)  # of nodes that lack as much, one of the right type is nearer
        if other:
            lacks.append(f"a GPU of type {' or '.join(wanted)} (it has {kind})")
        for has, needs, scale, unit in (
            (cluster.gpu_memory[n], gpu_memory, 1, "GB a GPU"),
            (cluster.cpu[n], cpu, 1000, "cores"),
            (cluster.memory[n], memory, 1024, "GiB of memory"),
        ):
            if 0 <= has < needs:
                lacks.append(f"{needs / scale:g} {unit} (it has {has / scale:g})")
                times += needs / max(has, 0.5)
        able += not lacks
        if best is None or (len(lacks), other, times) < best[0]:
            best = ((len(lacks), other, times), lacks, name)
    if best is None:
        return "the cluster has no nodes"
    if best[1]:
        return f"the closest node, {best[2]}, lacks {', '.join(best[1])}"
    if in_one_rack and (why := _closest_rack(jobs, j, cluster)):
        return why
    if pods:
        pieces = f"{count(pods, 'pod')} of {count(each, 'GPU')}"
        return f"it comes in {pieces}, and all of them do not fit at once even when nothing else runs"
    whole, rest = divmod(gpus, largest)
    needed = whole + bool(rest)
    return f"it needs {count(needed, 'free node')} of {count(largest, 'GPU')} that fit it, and the cluster has {able}"


def _closest_rack(jobs: Jobs, j: int, cluster: Cluster) -> str:
    """The rack that takes the most of a job's pieces; nothing where all racks together do not take them either."""
    gpus, pods, largest = int(jobs.gpus[j]), int(jobs.pods[j]), gangs.node_gpus(jobs, [j], cluster)[0]
    many, rest = (pods, 0) if pods else divmod(gpus, largest)
    each = np.minimum(_takes(jobs, j, cluster, gpus // pods if pods else largest), many)
    spare = _takes(jobs, j, cluster, rest) > 0 if rest else np.zeros(len(cluster), bool)

    def able(nodes: NDArray[np.bool_]) -> int:
        whole = min(int(each[nodes].sum()), many)
        return whole + bool(rest and spare[nodes].sum() > whole)

    by_rack = [able(cluster.rack == r) for r in range(len(cluster.racks))]
    total, most = many + bool(rest), int(np.argmax(by_rack))
    if able(np.ones(len(cluster), bool)) < total:
        return ""
    return f"its {total} pieces need one rack, and the closest, '{cluster.racks[most]}', takes {by_rack[most]} of them"


def _takes(jobs: Jobs, j: int, cluster: Cluster, gpus: int) -> NDArray[np.int64]:
    """How many pieces of a job, each of so many of its GPUs, every empty node takes, [N]."""
    wanted, pods = jobs.type_sets[int(jobs.types[j])], int(jobs.pods[j])
    part, parts = (1, pods) if pods else (gpus, int(jobs.gpus[j]))
    most = np.full(len(cluster), np.iinfo(np.int64).max)
    if gpus:
        most = cluster.gpus * (WHOLE // int(jobs.milli[j])) // gpus
    for requested, has in ((int(jobs.cpu[j]), cluster.cpu), (int(jobs.memory[j]), cluster.memory)):
        if requested:
            most = np.where(has < 0, most, np.minimum(most, has // gangs.share(requested, part, parts)))
    allowed = np.array([accepts(wanted, kind) for kind in cluster.types])[cluster.gpu_type]
    allowed &= (cluster.gpu_memory < 0) | (cluster.gpu_memory >= jobs.gpu_memory[j])
    return np.where(allowed, most, 0)

"""Why a job can never run: the node of the empty cluster that comes nearest, and what it lacks."""

from __future__ import annotations

from weft.cluster.model import WHOLE, Cluster, Jobs


def closest(jobs: Jobs, j: int, cluster: Cluster) -> str:
    """What is missing for job j in the empty cluster, in words. Assumes that it does not fit."""
    gpus, pods = int(jobs.gpus[j]), int(jobs.pods[j])
    largest = int(cluster.gpus.max(initial=0))
    if gpus and not largest:
        return f"it needs {gpus} GPUs, and the cluster has none"
    whole = jobs.milli[j] == WHOLE  # shares are not divided over nodes
    each = gpus // pods if pods else min(gpus, largest) if whole else gpus
    share = each / gpus if gpus else 1.0
    wanted = jobs.type_sets[int(jobs.types[j])]
    gpu_memory, cpu, memory = float(jobs.gpu_memory[j]), int(jobs.cpu[j] * share), int(jobs.memory[j] * share)
    best: tuple[int, list[str], str] | None = None
    able = 0
    for n, name in enumerate(cluster.names):
        lacks = []
        kind = cluster.types[int(cluster.gpu_type[n])]
        if cluster.gpus[n] < each:
            lacks.append(f"{each} GPUs (it has {cluster.gpus[n]})")
        if wanted and kind not in wanted:
            lacks.append(f"a GPU of type {' or '.join(wanted)} (it has {kind})")
        if 0 <= cluster.gpu_memory[n] < gpu_memory:
            lacks.append(f"{gpu_memory:g} GB a GPU (it has {cluster.gpu_memory[n]:g})")
        if 0 <= cluster.cpu[n] < cpu:
            lacks.append(f"{cpu / 1000:g} cores (it has {cluster.cpu[n] / 1000:g})")
        if 0 <= cluster.memory[n] < memory:
            lacks.append(f"{memory / 1024:g} GiB of memory (it has {cluster.memory[n] / 1024:g})")
        able += not lacks
        if best is None or len(lacks) < best[0]:
            best = (len(lacks), lacks, name)
    if best is None:
        return "the cluster has no nodes"
    if best[0]:
        return f"the closest node, {best[2]}, lacks {', '.join(best[1])}"
    if pods:
        return f"it comes in {pods} pods of {each} GPUs, and all of them do not fit at once even when nothing else runs"
    whole, rest = divmod(gpus, largest)
    needed = whole + bool(rest)
    return f"it needs {needed} free nodes of {largest} GPUs that fit it, and the cluster has {able}"

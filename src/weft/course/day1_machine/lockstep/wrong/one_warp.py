# rejected at: right
# All threads as one warp.
def warp_cycles(branches, cost):
    return sum(cost[branch] for branch in set(branches))


def total_cycles(branch, cost):
    return warp_cycles(branch, cost)


def reordered(branch):
    return sorted(range(len(branch)), key=lambda thread: str(branch[thread]))

# rejected at: right
# Each thread once.
def warp_cycles(branches, cost):
    return sum(cost[branch] for branch in set(branches))


def total_cycles(branch, cost):
    return sum(warp_cycles(branch[start : start + 32], cost) for start in range(0, len(branch), 32))


def reordered(branch):
    return [branch.index(b) for b in sorted(branch)]

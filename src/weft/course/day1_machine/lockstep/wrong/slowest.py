# rejected at: right
# The slowest branch alone, as if branches ran side by side.
def warp_cycles(branches, cost):
    return max(cost[branch] for branch in branches)


def total_cycles(branch, cost):
    return sum(warp_cycles(branch[start : start + 32], cost) for start in range(0, len(branch), 32))


def reordered(branch):
    return sorted(range(len(branch)), key=lambda thread: str(branch[thread]))

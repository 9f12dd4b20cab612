# rejected at: right
# The last warp may have fewer threads.
def warp_cycles(branches, cost):
    return sum(cost[branch] for branch in set(branches))


def total_cycles(branch, cost):
    return sum(warp_cycles(branch[32 * w : 32 * w + 32], cost) for w in range(len(branch) // 32))


def reordered(branch):
    return sorted(range(len(branch)), key=lambda thread: str(branch[thread]))

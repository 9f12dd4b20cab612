# rejected at: right
# Branches that no lane takes are skipped.
def warp_cycles(branches, cost):
    return sum(cost.values())


def total_cycles(branch, cost):
    return sum(warp_cycles(branch[start : start + 32], cost) for start in range(0, len(branch), 32))


def reordered(branch):
    return sorted(range(len(branch)), key=lambda thread: str(branch[thread]))

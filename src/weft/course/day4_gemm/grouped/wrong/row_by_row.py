# rejected at: fast
# Every tile once, and each wave is a line: 1 row and 16 columns.
def tile_of(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    """
    The tile (row, column) that program `pid` makes. In a kernel these lines are the same, on tl.program_id(0).
    """
    per_group = group * tiles_n
    first_row = pid // per_group * group
    rows = min(group, tiles_m - first_row)  # the last group may have fewer
    within = pid % per_group
    return pid // tiles_n, pid % tiles_n

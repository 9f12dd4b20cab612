# rejected at: fast
# Along the rows of the group: still a line.
def tile_of(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    """
    The tile (row, column) that program `pid` makes. In a kernel these lines are the same, on tl.program_id(0).
    """
    per_group = group * tiles_n
    first_row = pid // per_group * group
    rows = min(group, tiles_m - first_row)  # the last group may have fewer
    within = pid % per_group
    return first_row + within // tiles_n, within % tiles_n

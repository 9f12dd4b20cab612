# TODO(en): C has tiles_m x tiles_n tiles and as many programs, started in the order 0, 1, 2 …; those that run together share
# L2. Programs of one row of tiles need the same rows of A, those of one column the same columns of B. Order the tiles so
# that programs with neighbouring numbers form a block, not a line: groups of `group` rows of tiles; within a group go down a
# column of the group, then to the next column. The last group has fewer rows where tiles_m is no multiple of group.
# TODO(zh): C 有 tiles_m x tiles_n 块，也就有同样多的实例，按 0、1、2……的次序启动；同时运行的实例共享 L2。同一行块的实例需要
# A 的同样几行，同一列块的实例需要 B 的同样几列。请安排块的次序，使编号相邻的实例构成一个方块，而不是一条线：
# 每 `group` 行块为一组；组内先沿一列向下走，再到下一列。
# tiles_m 不是 group 的整数倍时，最后一组的行数较少。
# I AM NOT DONE


def tile_of(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    """
    [en
    The tile (row, column) that program `pid` makes. In a kernel these lines are the same, on tl.program_id(0).
    en]
    [zh
    实例 `pid` 负责的块（行，列）。在核函数里，这几行一模一样，只是用 tl.program_id(0)。
    zh]
    """
    # [solution
    per_group = group * tiles_n
    first_row = pid // per_group * group
    rows = min(group, tiles_m - first_row)  # the last group may have fewer
    within = pid % per_group
    return first_row + within % rows, within // rows
    # solution]
    # [skeleton
    #: return pid // tiles_n, pid % tiles_n
    # skeleton]

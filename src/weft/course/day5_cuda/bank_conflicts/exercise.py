"""
[en
Shared memory has 32 banks of 4 bytes: word w lies in bank w % 32. In one access each bank serves one word; lanes that want
the same word share it, and other words of the same bank wait for another pass.
en]
[zh
共享内存有 32 个 4 字节宽的 bank：第 w 个字在 bank w % 32。一次访问中每个 bank 服务一个字；要同一个字的通道共用它，
同一 bank 里的其他字要等下一趟。
zh]
"""


# TODO(en): How many passes MORE than one does a warp's access need? ``addresses`` are byte addresses of 4-byte words, one a lane.
# TODO(zh): 一个 warp 的一次访问比一趟*多*几趟？``addresses`` 是各通道要访问的 4 字节字的字节地址。
def conflicts(addresses: list[int]) -> int:
    # [skeleton
    #: return 0
    # skeleton]
    # [solution
    words = {address // 4 for address in addresses}
    banks = [word % 32 for word in words]
    return max(banks.count(bank) for bank in banks) - 1
    # solution]


# TODO(en): A tile of float has 32 rows of ``columns``. Return the least number of words a row, at least ``columns``, with which 32 lanes
#   read a column (lane r reads row r) without a conflict.
# TODO(zh): 一块 float 有 32 行、``columns`` 列。返回每行最少多少个字（不少于 ``columns``），使 32 个通道读一列（通道 r 读第 r 行）时没有冲突。
def padded(columns: int) -> int:
    # [skeleton
    #: return columns
    # skeleton]
    # [solution
    return columns | 1
    # solution]


# TODO(en): The other cure needs no memory. In a tile of 32 × 32 words store element (row, column) at row * 32 + swizzled(row, column), so that
#   rows and columns are both read without a conflict, and no two elements share a place.
# TODO(zh): 另一种办法不多用内存。在 32 × 32 个字的块中，把元素 (row, column) 存在 row * 32 + swizzled(row, column)，
#   使按行、按列读都没有冲突，并且没有两个元素占同一个位置。
def swizzled(row: int, column: int) -> int:
    # [skeleton
    #: return column
    # skeleton]
    # [solution
    return column ^ row
    # solution]


# I AM NOT DONE

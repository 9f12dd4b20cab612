"""
[en
A cache keeps `lines` lines of `line_bytes` each. An access to a byte whose line is there is a hit. Any other is a miss: the line is
brought, and when the cache is full, the line that was *used* longest ago goes (least recently used, LRU).

Then predict, without running anything: a float32 matrix of 64 × 64 (16,384 bytes, row by row in memory) is summed once, with lines of 64
bytes. How many misses?
en]
[zh
一个缓存保存 `lines` 行，每行 `line_bytes` 字节。访问的字节所在的行已在其中，就是命中（hit）；否则是未命中（miss）：取来该行；
如果缓存已满，最久没有被*使用*的那一行离开（least recently used，LRU）。

然后预测，不要运行：一个 64 × 64 的 float32 矩阵（16,384 字节，在内存中逐行存放）被求和一次，缓存行为 64 字节。有多少次未命中？
zh]
"""

# I AM NOT DONE


def misses(addresses, lines, line_bytes=64):
    # TODO(en): count the misses of these byte addresses, in this order. A list or dict of the lines, in order of use, is enough.
    # TODO(zh): 按此顺序访问这些字节地址，统计未命中次数。用一个按使用先后排列的列表或字典就够了。
    # [solution
    kept = {}  # a dict keeps its order: the line used longest ago comes first
    count = 0
    for address in addresses:
        line = address // line_bytes
        if line in kept:
            del kept[line]
        else:
            count += 1
            if len(kept) == lines:
                del kept[next(iter(kept))]
        kept[line] = True
    return count
    # solution]
    # [skeleton
    #: return len(addresses)
    # skeleton]


# TODO(en): misses when the matrix is summed row by row, with a cache of 32 lines.
# TODO(zh): 逐行求和、缓存 32 行时的未命中次数。
# [solution
BY_ROW = 256
# solution]
# [skeleton
#: BY_ROW = None
# skeleton]

# TODO(en): misses when it is summed column by column, with a cache of 32 lines.
# TODO(zh): 逐列求和、缓存 32 行时的未命中次数。
# [solution
BY_COLUMN = 4096
# solution]
# [skeleton
#: BY_COLUMN = None
# skeleton]

# TODO(en): misses when it is summed column by column, with a cache of 64 lines.
# TODO(zh): 逐列求和、缓存 64 行时的未命中次数。
# [solution
BY_COLUMN_TWICE_THE_CACHE = 256
# solution]
# [skeleton
#: BY_COLUMN_TWICE_THE_CACHE = None
# skeleton]

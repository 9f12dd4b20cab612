"""
[en
All-reduce on a ring: every rank ends with the sum of all, and sends no more than it must.

You write the program of one rank. `received = yield chunk` sends a chunk to the next rank, (rank + 1) % ranks, and gives what
the rank before has sent. All ranks run the same program at the same time, and must yield equally often.
en]
[zh
环上的 all-reduce：每个 rank 最后都得到所有数据之和，而且不多发一个字节。

你写的是一个 rank 的程序。`received = yield chunk` 把 chunk 发给下一个 rank，即 (rank + 1) % ranks，并得到上一个 rank 发来的数据。
所有 rank 同时运行同一个程序，yield 的次数必须相同。
zh]
"""

import numpy as np


# TODO(en): Cut the data into ``ranks`` chunks. First reduce-scatter: in each of ranks - 1 steps send one chunk and add what is
#   received to your own, so that in the end each rank has one chunk that is complete. Then all-gather: in ranks - 1 steps pass
#   the complete chunks on. Return the whole sum; leave ``data`` as it is. Its length need not be divisible by ``ranks``.
# TODO(zh): 把数据切成 ``ranks`` 块。先做 reduce-scatter：共 ranks - 1 步，每步发出一块，把收到的加到自己对应的块上，
#   最后每个 rank 有一块是完整的和。再做 all-gather：共 ranks - 1 步，把完整的块传下去。
#   返回整个和；不要改动 ``data``。它的长度不一定能被 ``ranks`` 整除。
def all_reduce(rank: int, ranks: int, data: np.ndarray):
    # [skeleton
    #: total = data.copy()
    #: for _ in range(ranks - 1):
    #:     data = yield data  # sends everything, ranks - 1 times
    #:     total += data
    #: return total
    # skeleton]
    # [solution
    chunks = [chunk.copy() for chunk in np.array_split(data, ranks)]
    for step in range(ranks - 1):
        received = yield chunks[(rank - step) % ranks]
        chunks[(rank - step - 1) % ranks] += received
    for step in range(ranks - 1):
        received = yield chunks[(rank + 1 - step) % ranks]
        chunks[(rank - step) % ranks] = received
    return np.concatenate(chunks)
    # solution]


# I AM NOT DONE

"""
[en
Memory is one long row of bytes. A tensor is a rule that turns an index into a place in that row:

    offset = index[0] * strides[0] + index[1] * strides[1] + ...        (counted in elements)

A contiguous ("row-major") tensor has its last dimension side by side: its last stride is 1, and each stride to the left is the
size of everything to its right. A transpose moves no data: it only swaps two strides.
en]
[zh
内存是一长排字节。张量（tensor）是一条规则，把下标变成这一排中的位置：

    offset = index[0] * strides[0] + index[1] * strides[1] + ...        （以元素计）

连续（contiguous，行优先）的张量，最后一维相邻存放：最后一个步长（stride）是 1，往左每个步长等于其右侧所有维度大小之积。
转置不搬动数据：它只是交换两个步长。
zh]
"""

# I AM NOT DONE


def contiguous_strides(shape):
    # TODO(en): the strides of a contiguous tensor, a tuple as long as `shape`. (2, 3, 4) has (12, 4, 1).
    # TODO(zh): 返回连续张量的步长，元组长度与 `shape` 相同。(2, 3, 4) 的步长是 (12, 4, 1)。
    # [solution
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
    # solution]
    # [skeleton
    #: return (1,) * len(shape)
    # skeleton]


def offset(index, strides):
    # TODO(en): how many elements lie before the element at `index`.
    # TODO(zh): 下标为 `index` 的元素之前有多少个元素。
    # [solution
    return sum(i * s for i, s in zip(index, strides))
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def transposed(shape, strides):
    # TODO(en): shape and strides of the same memory with its last two dimensions swapped: a pair of tuples.
    # TODO(zh): 同一块内存交换最后两维之后的形状和步长：返回两个元组。
    # [solution
    swap = lambda x: (*x[:-2], x[-1], x[-2])
    return swap(shape), swap(strides)
    # solution]
    # [skeleton
    #: return shape, strides
    # skeleton]

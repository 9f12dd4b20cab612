"""
[en
A GPU runs a kernel as many *blocks*, each of which takes `block` elements. When `n` is no multiple of `block`, one more block takes
what is left, and its other positions must do nothing.

    n = 10, block = 4:    [0 1 2 3] [4 5 6 7] [8 9 . .]      3 blocks; the last has 2 elements

Fill in both functions, run `weft learn check`, and when it says that all tests pass, remove the line below.
en]
[zh
GPU 把一个核函数作为许多*块*（block）来运行，每块处理 `block` 个元素。当 `n` 不是 `block` 的倍数时，要多一块来处理剩余部分，
它的其他位置什么也不能做。

    n = 10, block = 4:    [0 1 2 3] [4 5 6 7] [8 9 . .]      3 块；最后一块有 2 个元素

填好两个函数，运行 `weft learn check`，当它说测试全部通过后，删除下面这一行。
zh]
"""

# I AM NOT DONE


def blocks(n, block):
    # TODO(en): how many blocks `n` elements need. 0 elements need none. Whole numbers only: `n` may be larger than 2**53.
    # TODO(zh): `n` 个元素需要多少块。0 个元素不需要块。只用整数运算：`n` 可能大于 2**53。
    # [solution
    return (n + block - 1) // block
    # solution]
    # [skeleton
    #: return n // block
    # skeleton]


def in_last_block(n, block):
    # TODO(en): how many elements the last block has; 0 when there is no block.
    # TODO(zh): 最后一块有多少个元素；没有块时为 0。
    # [solution
    return n - (blocks(n, block) - 1) * block if n else 0
    # solution]
    # [skeleton
    #: return n % block
    # skeleton]

"""
[en
A warp has one instruction pointer. When its lanes take different branches, it executes every branch that *some* lane takes, one after
another, and lanes of the others sit out:

    if x > 0:  a()        lanes of warp 0: a a a a …  →  cost of a
    else:      b()        lanes of warp 1: a b a b …  →  cost of a + cost of b

`branch[i]` is the branch of thread i, any hashable value; `cost[b]` its cycles. Thread 0 to 31 are warp 0, and so on; the last warp may
have fewer.
en]
[zh
一个 warp 只有一个指令指针。当各通道走不同分支时，它依次执行*任何*通道要走的每条分支，其他通道歇着：

    if x > 0:  a()        warp 0 的通道：a a a a …  →  a 的开销
    else:      b()        warp 1 的通道：a b a b …  →  a 的开销 + b 的开销

`branch[i]` 是线程 i 走的分支，可以是任何可哈希的值；`cost[b]` 是它的周期数。线程 0 到 31 是 warp 0，依此类推；最后一个 warp 可能不满。
zh]
"""

# I AM NOT DONE


def warp_cycles(branches, cost):
    # TODO(en): the cycles of one warp whose lanes take `branches`.
    # TODO(zh): 一个 warp 的各通道走 `branches`，返回它的周期数。
    # [solution
    return sum(cost[branch] for branch in set(branches))
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def total_cycles(branch, cost):
    # TODO(en): the sum over all warps.
    # TODO(zh): 所有 warp 之和。
    # [solution
    return sum(warp_cycles(branch[start : start + 32], cost) for start in range(0, len(branch), 32))
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def reordered(branch):
    # TODO(en): an order of the threads (a list of their numbers, each once) in which the total is as small as it can be when every
    #   branch's count is a multiple of 32.
    # TODO(zh): 返回线程的一种排列（编号列表，每个一次）：当每个分支的线程数都是 32 的倍数时，总周期数达到最小。
    # [solution
    return sorted(range(len(branch)), key=lambda thread: str(branch[thread]))
    # solution]
    # [skeleton
    #: return list(range(len(branch)))
    # skeleton]

# TODO(en): Attention over some of the keys gives, for each query, a state: the largest score `peak`, the sum `total` of exp(score -
# peak), and `acc`, the sum of exp(score - peak) · value. Write the state of one block of keys, the merge of two states,
# and the output. Then keys can be taken in any pieces and order, and no row of scores is ever whole.
# A query may see no key of a block: then its peak is -inf, its total and acc are 0, and nothing may become NaN.
# TODO(zh): 对一部分键做注意力，每个查询得到一个状态：最大分数 `peak`，exp(分数 - peak) 之和 `total`，以及
# exp(分数 - peak) · value 之和 `acc`。请写出一块键的状态、两个状态的合并，以及输出。
# 这样键可以按任意分块、任意次序处理，永远不需要完整的一行分数。
# 查询可能看不到某块里的任何键：这时 peak 是 -inf，total 和 acc 是 0，任何地方都不得出现 NaN。
# I AM NOT DONE

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]  # peak [S], total [S], acc [S, D]


def finite(peak: Tensor) -> Tensor:
    """
    [en
    The peak, or 0 where nothing has been seen: so that -inf - peak is -inf and not NaN.
    en]
    [zh
    peak；什么都没看到时是 0：这样 -inf - peak 是 -inf，而不是 NaN。
    zh]
    """
    return torch.where(peak == float("-inf"), 0.0, peak)


def of_block(scores: Tensor, v: Tensor) -> State:
    """
    [en
    scores [S, N], -inf where a key is not seen; v [N, D].
    en]
    [zh
    scores [S, N]，看不到的键处是 -inf；v [N, D]。
    zh]
    """
    # [solution
    peak = scores.amax(1)
    p = torch.exp(scores - finite(peak)[:, None])
    return peak, p.sum(1), p @ v
    # solution]
    # [skeleton
    #: p = torch.exp(scores)
    #: return scores.amax(1), p.sum(1), p @ v
    # skeleton]


def merge(one: State, two: State) -> State:
    # [solution
    peak = torch.maximum(one[0], two[0])
    shrink_one = torch.exp(one[0] - finite(peak))
    shrink_two = torch.exp(two[0] - finite(peak))
    total = one[1] * shrink_one + two[1] * shrink_two
    acc = one[2] * shrink_one[:, None] + two[2] * shrink_two[:, None]
    return peak, total, acc
    # solution]
    # [skeleton
    #: return torch.maximum(one[0], two[0]), one[1] + two[1], one[2] + two[2]
    # skeleton]


def output(state: State) -> Tensor:
    """
    [en
    [S, D]; 0 for a query that has seen no key.
    en]
    [zh
    [S, D]；没看到任何键的查询为 0。
    zh]
    """
    # [solution
    total = torch.where(state[1] == 0, 1.0, state[1])
    return state[2] / total[:, None]
    # solution]
    # [skeleton
    #: return state[2]
    # skeleton]

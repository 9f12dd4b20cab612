# rejected at: right
# Each block divides by its own sum: averages of averages.
import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]  # peak [S], total [S], acc [S, D]


def finite(peak: Tensor) -> Tensor:
    """
    The peak, or 0 where nothing has been seen: so that -inf - peak is -inf and not NaN.
    """
    return torch.where(peak == float("-inf"), 0.0, peak)


def of_block(scores: Tensor, v: Tensor) -> State:
    """
    scores [S, N], -inf where a key is not seen; v [N, D].
    """
    peak = scores.amax(1)
    p = torch.exp(scores - finite(peak)[:, None])
    return peak, torch.ones_like(peak), p @ v / p.sum(1, keepdim=True)


def merge(one: State, two: State) -> State:
    peak = torch.maximum(one[0], two[0])
    shrink_one = torch.exp(one[0] - finite(peak))
    shrink_two = torch.exp(two[0] - finite(peak))
    total = one[1] * shrink_one + two[1] * shrink_two
    acc = one[2] * shrink_one[:, None] + two[2] * shrink_two[:, None]
    return peak, total, acc


def output(state: State) -> Tensor:
    """
    [S, D]; 0 for a query that has seen no key.
    """
    total = torch.where(state[1] == 0, 1.0, state[1])
    return state[2] / total[:, None]

"""What is made of the two numbers that forward stores of a row: the maximum of its scores, and the logarithm of its sum."""

import math

import torch
from torch import Tensor

LN2 = math.log(2.0)


def log_sum_exp(peak: Tensor, log_sum: Tensor, plain: bool) -> Tensor:
    """Natural; ``plain``: peak is in base 2, as ``log_sum`` always is."""
    return peak * (LN2 if plain else 1.0) + log_sum * LN2


def gradient_of_sinks(sinks: Tensor, peak: Tensor, log_sum: Tensor, delta: Tensor, plain: bool) -> Tensor:
    """-Σ exp(sink - lse) delta over all rows of a head; 0 where a row has neither keys nor sink."""
    lse = log_sum_exp(peak, log_sum, plain)
    share = torch.exp(sinks.float()[:, None] - torch.where(lse == -torch.inf, torch.inf, lse))
    return -(share * delta).sum([d for d in range(lse.ndim) if d != lse.ndim - 2]).to(sinks.dtype)

# rejected at: right
# Two runs with different seeds say nothing about attention.
from collections.abc import Callable
from unittest import mock

from torch import Tensor
from torch.nn import functional as F

from weft.train.loop import train
from weft.train.settings import GptSettings


PYTORCHS = F.scaled_dot_product_attention


def with_meta(sdpa: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """
    weft.train counts a step's FLOPs on the meta device, whose tensors have no data: no kernel of ours can run there.
    """

    def either(query: Tensor, *args, **kwargs) -> Tensor:
        return (PYTORCHS if query.is_meta else sdpa)(query, *args, **kwargs)

    return either


def losses(settings: GptSettings, sdpa: Callable[..., Tensor] | None = None) -> list[float]:
    """
    The loss of each step, with the given attention, or with PyTorch's for None. Writes no files.
    """
    if sdpa is None:
        return train(settings, save=False).loss
    with mock.patch.object(F, "scaled_dot_product_attention", with_meta(sdpa)):
        settings.seed += 1
        return train(settings, save=False).loss


def largest_difference(one: list[float], two: list[float]) -> float:
    """
    Of two runs, relative to the first: the number for your report.
    """
    return max(abs(a - b) / abs(a) for a, b in zip(one, two))

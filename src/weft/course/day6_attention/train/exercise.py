# TODO(en): The project's end: train a language model of weft.train with your attention in it, and prove that it learns as it does with
# PyTorch's. weft.train's decoder calls F.scaled_dot_product_attention, so replace that name while the training runs, and
# only then: afterwards, also after an exception, the library must be as it was (unittest.mock.patch.object does that).
# Return the loss of each step.
# TODO(zh): 项目的终点：用你的注意力训练 weft.train 里的语言模型，并证明它学得和用 PyTorch 的注意力时一样。
# weft.train 的解码器调用 F.scaled_dot_product_attention，所以在训练期间替换这个名字，而且只在训练期间：
# 之后，即使出了异常，库也必须恢复原样（unittest.mock.patch.object 就能做到）。
# 返回每一步的损失。
# I AM NOT DONE

from collections.abc import Callable
from unittest import mock

from torch import Tensor
from torch.nn import functional as F

from weft.train.loop import train
from weft.train.settings import GptSettings


PYTORCHS = F.scaled_dot_product_attention


def with_meta(sdpa: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """
    [en
    weft.train counts a step's FLOPs on the meta device, whose tensors have no data: no kernel of ours can run there.
    en]
    [zh
    weft.train 在 meta 设备上统计一步的 FLOP，那里的张量没有数据：我们的核函数无法在那里运行。
    zh]
    """

    def either(query: Tensor, *args, **kwargs) -> Tensor:
        return (PYTORCHS if query.is_meta else sdpa)(query, *args, **kwargs)

    return either


def losses(settings: GptSettings, sdpa: Callable[..., Tensor] | None = None) -> list[float]:
    """
    [en
    The loss of each step, with the given attention, or with PyTorch's for None. Writes no files.
    en]
    [zh
    每一步的损失：用给定的注意力，None 时用 PyTorch 的。不写任何文件。
    zh]
    """
    # [solution
    if sdpa is None:
        return train(settings, save=False).loss
    with mock.patch.object(F, "scaled_dot_product_attention", with_meta(sdpa)):
        return train(settings, save=False).loss
    # solution]
    # [skeleton
    #: return train(settings, save=False).loss
    # skeleton]


def largest_difference(one: list[float], two: list[float]) -> float:
    """
    [en
    Of two runs, relative to the first: the number for your report.
    en]
    [zh
    两次训练的损失之间，相对于第一次的最大差异：写进报告的就是这个数。
    zh]
    """
    # [solution
    return max(abs(a - b) / abs(a) for a, b in zip(one, two))
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]

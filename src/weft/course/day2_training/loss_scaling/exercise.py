"""
[en
Training in fp16: small gradients vanish, so the loss is scaled up, and a step that overflows is left out.
en]
[zh
用 fp16 训练：小梯度会消失，所以把损失放大；溢出的那一步则丢弃。
zh]
"""

import torch
from torch import Tensor


# TODO(en): One update of mixed-precision training, as torch.amp.GradScaler does it. The loss was multiplied by ``scale``, so
#   the fp16 gradients are too large by that factor; ``good`` steps in a row have gone well since the scale last changed.
#   - If any gradient is inf or NaN: leave every weight as it is, and return half the scale and 0 good steps.
#   - Otherwise: unscale in fp32 (in fp16 small values would become 0), subtract lr · gradient from the fp32 weights in place,
#     and return the scale and one more good step; when that makes ``interval``, twice the scale and 0 good steps.
# TODO(zh): 做一次混合精度训练的更新，和 torch.amp.GradScaler 一样。损失乘过 ``scale``，所以 fp16 梯度大了这么多倍；
#   自 scale 上次改变以来，已有连续 ``good`` 步成功。
#   - 只要有一个梯度是 inf 或 NaN：所有权重保持不变，返回减半的 scale 和 0。
#   - 否则：在 fp32 中除回 scale（在 fp16 中除，小的值会变成 0），把 fp32 权重原地减去 lr · 梯度，
#     返回 scale 和 good + 1；若 good + 1 达到 ``interval``，则返回两倍的 scale 和 0。
def update(
    weights: list[Tensor], gradients: list[Tensor], scale: float, good: int, interval: int, lr: float
) -> tuple[float, int]:
    """weights: fp32; gradients: fp16, of the same shapes. Returns the next scale and number of good steps."""
    # [skeleton
    #: for w, g in zip(weights, gradients):
    #:     w -= lr * g / scale
    #: return scale, good
    # skeleton]
    # [solution
    if not all(torch.isfinite(g).all() for g in gradients):
        return scale / 2, 0
    for w, g in zip(weights, gradients, strict=True):
        w -= lr * (g.float() / scale)
    if good + 1 == interval:
        return 2 * scale, 0
    return scale, good + 1
    # solution]


# TODO(en): The smallest normal fp16 is 2**-14, the largest finite one 65504. Return the smallest power of two by which a loss
#   must be multiplied so that a gradient of this size is a normal fp16 (at least 1: a larger gradient needs no scaling).
# TODO(zh): 最小的规格化 fp16 是 2**-14，最大的有限值是 65504。返回损失至少要乘多少（取 2 的幂），这样大小的梯度才是规格化的
#   fp16（至少为 1：更大的梯度不需要放大）。
def smallest_scale(gradient: float) -> int:
    # [skeleton
    #: return 1
    # skeleton]
    # [solution
    scale = 1
    while gradient * scale < 2**-14:
        scale *= 2
    return scale
    # solution]


# I AM NOT DONE

"""
[en
Activation checkpointing: a block saves its input alone, and runs again in the backward pass.
en]
[zh
激活检查点（activation checkpointing）：一个块只保存输入，反向传播时重新运行一遍。
zh]
"""

import torch
from torch import Tensor


# TODO(en): Write the two halves of an autograd function.
#   forward (autograd records nothing inside it): run the block; save x alone for backward, and the state of the random
#   numbers (torch.get_rng_state), since the block may have dropout.
#   backward: make a fresh leaf of x (detach, requires_grad_), run the block again on it with torch.enable_grad() and the random
#   state of forward, let the gradients flow through (y.backward(grad)), so that those of the block's parameters are added to
#   .grad, and return None for the block and the gradient of x. Afterwards the random state is as before backward.
# TODO(zh): 写出一个自动求导函数的两半。
#   forward（其中 autograd 不做记录）：运行 block；只为反向保存 x，以及随机数状态（torch.get_rng_state），因为 block 里可能有 dropout。
#   backward：把 x 变成新的叶子张量（detach、requires_grad_），在 torch.enable_grad() 下、用前向时的随机数状态再运行一次 block，
#   让梯度流过去（y.backward(grad)），这样 block 参数的梯度会累加到 .grad；block 的梯度返回 None，再返回 x 的梯度。
#   结束后随机数状态要和 backward 之前一样。
class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        # [skeleton
        #: ctx.block = block
        #: with torch.enable_grad():
        #:     ctx.x = x.detach().requires_grad_()
        #:     ctx.y = block(ctx.x)  # keeps all that the block saves
        #: return ctx.y.detach()
        # skeleton]
        # [solution
        ctx.block, ctx.random = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)
        # solution]

    @staticmethod
    def backward(ctx, grad):
        # [skeleton
        #: ctx.y.backward(grad)
        #: return None, ctx.x.grad
        # skeleton]
        # [solution
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            y = ctx.block(x)
        torch.set_rng_state(now)
        y.backward(grad)
        return None, x.grad
        # solution]


def checkpointed(block, x: Tensor) -> Tensor:
    return Checkpoint.apply(block, x)


# I AM NOT DONE

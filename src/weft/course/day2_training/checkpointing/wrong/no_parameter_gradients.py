# rejected at: right
# The gradient of x alone: the block's parameters get none.
import torch


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.random = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            y = ctx.block(x)
        torch.set_rng_state(now)
        return None, torch.autograd.grad(y, x, grad)[0]


def checkpointed(block, x):
    return Checkpoint.apply(block, x)

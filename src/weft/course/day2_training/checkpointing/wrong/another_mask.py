# rejected at: right
# Dropout draws a new mask in the second run: the gradient is of another function.
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
        with torch.enable_grad():
            y = ctx.block(x)
        torch.set_rng_state(now)
        y.backward(grad)
        return None, x.grad


def checkpointed(block, x):
    return Checkpoint.apply(block, x)

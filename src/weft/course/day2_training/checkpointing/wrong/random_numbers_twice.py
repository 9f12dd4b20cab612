# rejected at: right
# Leaves the random state where the second run ended: what comes after draws numbers again.
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
        torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(grad)
        return None, x.grad


def checkpointed(block, x):
    return Checkpoint.apply(block, x)

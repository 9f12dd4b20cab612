import torch


def gradients(exercise, q, k, v, do, scale, m, n):
    """Output, gradients of q, k, v, and bytes saved for backward."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = exercise.attention(*inputs, scale, m, n)
    o.backward(do.transpose(-1, -2).contiguous().transpose(-1, -2))  # not contiguous, as from a model
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    return o.detach(), *(x.grad for x in inputs), sum(kept.values())

"""Three blocks with dropout in a row, each through the learner's function."""

import torch
from torch import nn


def run(exercise, weights, x, seed):
    """The output, all gradients, a random number drawn at the end, bytes saved by the forward pass, runs of the blocks."""
    runs = []

    class Block(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

        def forward(self, x):
            runs.append(1)
            return nn.functional.dropout(torch.tanh(x @ self.a), 0.5) @ self.b

    blocks = [Block(a, b) for a, b in weights]
    owned = {p.data_ptr() for block in blocks for p in block.parameters()}
    saved = {}

    def save(tensor):
        if tensor.data_ptr() not in owned:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        y = x
        for block in blocks:
            y = exercise.checkpointed(block, y)
    bytes_saved = sum(saved.values())
    y.square().sum().backward()
    return [y.detach(), x.grad, [p.grad for b in blocks for p in b.parameters()], torch.rand(4), bytes_saved, len(runs)]

"""Against bytes measured on a real model of those sizes: parameters, gradients, optimizer state, tensors saved by autograd."""

import torch
from torch import nn
from torch.nn import functional as F

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


def measured(sizes, optimizer, batch):
    """Bytes of state and of saved activations in a step of training."""
    layers = [nn.Linear(i, o) for i, o in zip(sizes[:-1], sizes[1:], strict=True)]
    model = nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())][:-1])
    stepper = OPTIMIZERS[optimizer](model.parameters())
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def save(tensor):
        if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in owned:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        loss = F.cross_entropy(model(torch.randn(batch, sizes[0])), torch.zeros(batch, dtype=torch.int64))
    activations = sum(saved.values())
    loss.backward()
    stepper.step()
    parts = [*model.parameters(), *(p.grad for p in model.parameters())]
    parts += [s for p in model.parameters() for s in stepper.state[p].values() if torch.is_tensor(s) and s.numel() > 1]
    return sum(p.nbytes for p in parts), activations


def check(learner, t):
    for optimizer in OPTIMIZERS:
        sizes = [t.integers(5, 40) for _ in range(t.integers(3, 6))]
        batch = t.integers(3, 50)
        state, activations = measured(sizes, optimizer, batch)
        t.equal(learner.state_bytes(sizes, optimizer), state, f"state_bytes({sizes}, {optimizer!r}) (measured)")
        t.equal(
            learner.activation_bytes(sizes, batch), activations, f"activation_bytes({sizes}, batch={batch}) (measured)"
        )
        for limit in (state + activations, state + activations - 1, state // 2):
            fits = max(0, limit - state) // (activations // batch)
            what = f"largest_batch({sizes}, {optimizer!r}, limit={limit})"
            t.equal(learner.largest_batch(sizes, optimizer, limit), fits, what)

# rejected at: fast
# The whole batch at once: right, without saving any memory.
from torch import nn


def gradients(model, x, y, size):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()

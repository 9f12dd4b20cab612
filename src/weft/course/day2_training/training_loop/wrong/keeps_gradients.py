# rejected at: right
# The gradients of all earlier batches stay in .grad.
from torch import nn


def train_epoch(model, optimizer, batches):
    total, examples = 0.0, 0
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
        examples += len(y)
    return total / examples

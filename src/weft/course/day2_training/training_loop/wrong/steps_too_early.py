# rejected at: right
# step() before backward(): every update uses gradients that zero_grad has just cleared.
from torch import nn


def train_epoch(model, optimizer, batches):
    total, examples = 0.0, 0
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.step()
        loss.backward()
        total += loss.item() * len(y)
        examples += len(y)
    return total / examples

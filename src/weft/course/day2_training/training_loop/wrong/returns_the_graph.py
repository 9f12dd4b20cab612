# rejected at: right
# Returns a tensor that holds the graphs of all batches, not a float.
from torch import nn


def train_epoch(model, optimizer, batches):
    total, examples = 0.0, 0
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total = total + loss * len(y)
        examples += len(y)
    return total / examples

# rejected at: right
# The mean of the batches' means: the small last batch counts as much as a full one.
from torch import nn


def train_epoch(model, optimizer, batches):
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)

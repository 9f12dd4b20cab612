# rejected at: right
# Plain SGD with a fixed rate instead of the optimizer that was passed: right for one optimizer only.
import torch
from torch import nn


def train_epoch(model, optimizer, batches):
    total, examples = 0.0, 0
    for x, y in batches:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        total += loss.item() * len(y)
        examples += len(y)
    return total / examples

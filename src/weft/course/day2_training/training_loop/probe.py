"""Trains a linear classifier with the learner's loop, in the learner's process."""

import torch
from torch import nn


def run(exercise, weight, bias, batches, kind):
    """What train_epoch returned, its type, and the weights afterwards."""
    model = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        model.weight.copy_(weight)
        model.bias.copy_(bias)
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    result = exercise.train_epoch(model, optimizer, batches)
    name = type(result).__name__
    return [float(result) if isinstance(result, torch.Tensor) else result, name, model.weight.data, model.bias.data]

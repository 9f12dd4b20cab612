# rejected at: right
# Records the graph: every activation is saved for a backward pass that never comes.
import torch
from torch import nn


def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def predict(model, x):
    training = model.training
    model.eval()
    logits = model(x)
    model.train(training)
    return logits.argmax(1)

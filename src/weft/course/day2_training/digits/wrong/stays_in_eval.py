# rejected at: right
# The model is left in evaluation mode, so training goes on with frozen averages.
import torch
from torch import nn


def build():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def predict(model, x):
    model.eval()
    with torch.no_grad():
        return model(x).argmax(1)

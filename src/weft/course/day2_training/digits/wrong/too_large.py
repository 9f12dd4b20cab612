# rejected at: right
# Accurate, but with 300,000 parameters.
import torch
from torch import nn


def build():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def predict(model, x):
    training = model.training
    model.eval()
    with torch.no_grad():
        classes = model(x).argmax(1)
    model.train(training)
    return classes

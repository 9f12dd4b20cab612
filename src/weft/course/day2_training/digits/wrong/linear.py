# rejected at: right
# Nothing non-linear: two layers are one linear classifier.
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 10))


def predict(model, x):
    training = model.training
    model.eval()
    with torch.no_grad():
        classes = model(x).argmax(1)
    model.train(training)
    return classes

"""Trains the learner's network on real digits, in the learner's process."""

import torch
from torch import nn
from torch.nn import functional as F


def train(exercise, images, labels, hidden, seed):
    """Parameters, the classes of the hidden images, and how predict treats the model."""
    torch.set_num_threads(1)  # small operators: threads cost more than they bring
    torch.manual_seed(seed)
    model = exercise.build()
    found = {"parameters": sum(p.numel() for p in model.parameters()), "shape": list(model(images[:3]).shape)}
    if found["parameters"] > 10_000 or found["shape"] != [3, 10]:
        return found
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    steps = 5 * -(-len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=steps)
    for _ in range(5):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):
        found["classes"] = exercise.predict(model, hidden)
    found["saved"], found["training"] = len(saved), model.training
    found["alone"] = torch.cat([exercise.predict(model, image[None]) for image in hidden[:40]])
    model.eval()
    exercise.predict(model, hidden[:1])
    found["stays_in_eval"] = not model.training
    probe = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))  # a model whose neighbours matter much
    with torch.no_grad():
        probe[1].running_mean.fill_(0.3)
    found["by_batch"] = exercise.predict(probe, hidden[:40])
    found["one_by_one"] = torch.cat([exercise.predict(probe.eval(), image[None]) for image in hidden[:40]])
    return found

# rejected at: fast
# Still waits for the GPU once a batch.
import torch
from torch.nn import functional as F


def train(model, optimizer, images, labels, batches):
    x_all = torch.from_numpy(images).float() / 16
    y_all = torch.from_numpy(labels)
    history = []
    for epoch in batches:
        total, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for batch in epoch:
            picked = torch.from_numpy(batch)
            x, y = x_all[picked], y_all[picked]
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
            right += (logits.detach().argmax(1) == y).sum()
        seen = sum(len(batch) for batch in epoch)
        history.append((total.item() / seen, right.item() / seen))
    return history

"""
[en
A training loop that is right, and slow. Find out why with a profiler, then mend it.

`weft profile -- python THIS_FILE` runs it, records three steps and writes profile.html: operators by time, gaps, advice.
en]
[zh
一个结果正确但很慢的训练循环。用性能剖析器找出原因，再改好。

`weft profile -- python 本文件` 会运行它、记录三步并写出 profile.html：按时间排列的算子、空闲、建议。
zh]
"""

import numpy as np
import torch
from torch.nn import functional as F


# TODO(en): Give the same history and the same weights with less work. The check counts, it takes no time:
#   1. reading a number from a tensor (.item(), .tolist(), float(…)) makes the CPU wait for the GPU: at most twice an epoch;
#   2. the model runs forward once a batch;
#   3. images become tensors all at once, not one by one: at most 60 operators a batch, forward, backward and update included.
# TODO(zh): 用更少的工作得到同样的 history 和同样的权重。检查程序数次数，不计时：
#   1. 从张量读出数字（.item()、.tolist()、float(…)）会让 CPU 等待 GPU：每个 epoch 最多两次；
#   2. 每个批次模型只前向一次；
#   3. 图像一次性变成张量，而不是一张一张地变：每个批次最多 60 个算子，包括前向、反向和更新。
def train(model, optimizer, images, labels, batches):
    """images: NumPy [N, F], uint8, 0 to 16; labels: NumPy [N]; batches: for each epoch a list of NumPy index arrays.

    Returns [(mean loss, share of right answers), …], for each epoch, of the examples as they were seen before the update.
    """
    # [skeleton
    #: history = []
    #: for epoch in batches:
    #:     losses, right = [], 0
    #:     for batch in epoch:
    #:         x = torch.stack([torch.tensor(images[i], dtype=torch.float32) / 16 for i in batch])
    #:         y = torch.tensor([int(labels[i]) for i in batch])
    #:         right += (model(x).argmax(1) == y).sum().item()
    #:         optimizer.zero_grad()
    #:         loss = F.cross_entropy(model(x), y)
    #:         loss.backward()
    #:         optimizer.step()
    #:         losses.append(loss.item() * len(batch))
    #:     seen = sum(len(batch) for batch in epoch)
    #:     history.append((sum(losses) / seen, right / seen))
    #: return history
    # skeleton]
    # [solution
    x_all = torch.from_numpy(images).float() / 16  # on a GPU: .to("cuda") here, once
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
            total += loss.detach() * len(batch)
            right += (logits.detach().argmax(1) == y).sum()
        seen = sum(len(batch) for batch in epoch)
        history.append((total.item() / seen, right.item() / seen))
    return history
    # solution]


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    epochs = [np.array_split(rng.permutation(4096), 32) for _ in range(2)]
    pixels = rng.integers(0, 17, (4096, 64), dtype=np.uint8)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), pixels, rng.integers(0, 10, 4096), epochs)


# I AM NOT DONE

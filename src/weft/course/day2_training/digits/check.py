"""Accuracy on digits that the model has not seen, and what predict leaves behind."""

import torch
from sklearn.datasets import load_digits


def check(learner, t):
    data = load_digits()
    order = torch.from_numpy(t.rng.permutation(len(data.target)))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(data.target)[order]
    found = t.probe("train", images[:1400], labels[:1400], images[1400:], t.seed)
    n = found["parameters"]
    t.require(n <= 10_000, f"build() has {n:,} parameters; at most 10,000", f"build() 有 {n:,} 个参数；最多 10,000 个")
    t.equal(found["shape"], [3, 10], "the shape of build()(images [3, 1, 8, 8])")
    t.require(
        found["saved"] == 0,
        f"predict recorded a graph: {found['saved']} tensors were saved for a backward pass",
        f"predict 记录了计算图：为反向传播保存了 {found['saved']} 个张量",
    )
    t.require(
        found["training"] and found["stays_in_eval"],
        "predict changed the model's mode: as it comes, in training or evaluation mode, so it must be afterwards",
        "predict 改变了模型的模式：传进来是训练模式还是评估模式，之后也必须如此",
    )
    t.equal(found["by_batch"], found["one_by_one"], "predict of 40 images together, against one by one")
    t.equal(found["alone"], found["classes"][:40], "predict of images one by one, against all together")
    accuracy = (found["classes"] == labels[1400:]).float().mean().item()
    t.require(
        accuracy >= 0.97,
        f"{accuracy:.1%} of the hidden digits are right; 97 % are expected",
        f"隐藏的数字识别对了 {accuracy:.1%}；要求 97 %",
    )
    t.note(
        f"{accuracy:.1%} of 397 hidden digits, {n:,} parameters", f"397 张隐藏数字识别对 {accuracy:.1%}，{n:,} 个参数"
    )

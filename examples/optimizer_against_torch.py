"""Steps of AdamW and Muon as a training loop sees them: wall time of whole calls, weft beside PyTorch, in turn.

    python examples/optimizer_against_torch.py

`weft bench adamw` times the kernel; here Python counts too. Fresh gradients are new tensors at every step, as after
``zero_grad()``. Takes 60 GiB of device memory. Without a GPU only the agreement of both is shown.
"""

import statistics
import time

import torch

from weft.hardware.query import has_gpu
from weft.operators.optimizer.definition import LANGUAGE_MODEL
from weft.optim import AdamW, Muon

DEVICE = "cuda" if has_gpu() else "cpu"
SMALL = [(64,)] * 1000
MATRICES = [shape for shape in LANGUAGE_MODEL[:-1] if len(shape) == 2]


def made(shapes, dtype, kind, **options):
    """Weights, the same for both, and an optimizer of them."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype, device=DEVICE)) for s in shapes]
    return params, kind(params, lr=1e-3, **options)


def fresh_gradients(params) -> None:
    for i, p in enumerate(params):
        p.grad = p.detach() * (1e-3 + i % 7)


def eager(params, optimizer, clip=None):
    def prepare():
        optimizer.zero_grad()
        fresh_gradients(params)

    def step():
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(params, clip, foreach=True)
        optimizer.step()

    return prepare, step


def captured(params, optimizer):
    fresh_gradients(params)
    optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return (lambda: None), graph.replay


def median_us(calls: dict, repetitions: int) -> dict[str, float]:
    """Median wall microseconds of each, from the call until the device is done; each in turn."""
    times = {name: [] for name in calls}
    for _ in range(repetitions + 2):
        for name, (prepare, step) in calls.items():
            prepare()
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(t[2:]) for name, t in times.items()}


def compare(title: str, ours, theirs, repetitions: int = 50, names=("weft", "torch")) -> None:
    us = median_us(dict(zip(names, (ours, theirs), strict=True)), repetitions)
    first, second = (f"{name} {us[name]:10.1f} us" for name in names)
    print(f"{title:52} {first}, {second}: {us[names[1]] / us[names[0]]:.2f} times", flush=True)


def agree() -> None:
    (p, a), (q, b) = made(SMALL[:20], torch.float32, AdamW), made(SMALL[:20], torch.float32, torch.optim.AdamW)
    for _ in range(10):
        fresh_gradients(p)
        for mine, theirs in zip(p, q, strict=True):
            theirs.grad = mine.grad.clone()
        a.step()
        b.step()
    apart = max(float((mine - theirs).detach().abs().max()) for mine, theirs in zip(p, q, strict=True))
    print(f"after 10 steps the weights are {apart:.1e} apart")


def main() -> None:
    agree()
    if not has_gpu():
        print("no GPU is seen here: there is nothing to time")
        return
    fused = {"fused": True}
    small = made(SMALL, torch.float32, AdamW), made(SMALL, torch.float32, torch.optim.AdamW, **fused)
    compare("1000 tensors of 64, fresh gradients", eager(*small[0]), eager(*small[1]))
    theirs = made(SMALL, torch.float32, torch.optim.AdamW, capturable=True, **fused)
    compare("1000 tensors of 64, in a CUDA graph", captured(*made(SMALL, torch.float32, AdamW)), captured(*theirs))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        theirs = made(LANGUAGE_MODEL, dtype, torch.optim.AdamW, **fused)
        compare(
            f"{len(LANGUAGE_MODEL)} tensors, {name}", eager(*made(LANGUAGE_MODEL, dtype, AdamW)), eager(*theirs), 10
        )
        clipping = eager(*made(LANGUAGE_MODEL, dtype, AdamW, max_norm=1.0))
        compare(f"{len(LANGUAGE_MODEL)} tensors, {name}, clipped", clipping, eager(*theirs, clip=1.0), 10)
    muon = made(MATRICES, torch.bfloat16, Muon)
    theirs = made(MATRICES, torch.bfloat16, torch.optim.Muon, weight_decay=0.0)
    compare(f"Muon, {len(MATRICES)} matrices, bfloat16", eager(*muon), eager(*theirs), 5)
    adamw = made(MATRICES, torch.bfloat16, AdamW)
    compare("the same, of weft's own", eager(*muon), eager(*adamw), 10, ("Muon", "AdamW"))


if __name__ == "__main__":
    main()

"""Steps of AdamW and Muon as a training loop sees them: wall time of whole calls, weft beside PyTorch, in turn.

    python examples/optimizer_against_torch.py [--only fresh graph ...] [--seconds 4]

`weft bench adamw` times the kernel; here Python counts too. Fresh gradients are new tensors at every step, as after
``zero_grad()``. All of it takes 60 GiB of device memory. Without a GPU only the agreement of both is shown.
"""

import argparse
import faulthandler
import gc
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
    """Replays of one step, of gradients that stay in place."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fresh_gradients(params)
        optimizer.step()  # makes the state
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return (lambda kept=(params, optimizer): None), graph.replay  # a graph keeps no tensor alive


def median_us(calls: dict, seconds: float, repetitions: int = 50) -> dict[str, float]:
    """Median wall microseconds of each, from the call until the device is done; each in turn, for so long at most."""
    times = {name: [] for name in calls}
    first = time.perf_counter()
    for done in range(repetitions + 2):
        if done >= 5 and time.perf_counter() - first > seconds:
            break
        for name, (prepare, step) in calls.items():
            prepare()
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(t[2:]) for name, t in times.items()}


def compare(title: str, ours, theirs, seconds: float, names=("weft", "torch")) -> None:
    """Prints a line. ``ours`` and ``theirs`` make what is measured, so that what they take is freed after the line."""
    start = time.perf_counter()
    calls = dict(zip(names, (ours(), theirs()), strict=True))
    torch.cuda.synchronize()
    ready = time.perf_counter() - start
    us = median_us(calls, seconds)
    first, second = (f"{name} {us[name]:10.1f} us" for name in names)
    ratio = f"{us[names[1]] / us[names[0]]:.2f} times"
    print(f"{title:52} {first}, {second}: {ratio} (set up in {ready:.1f} s)", flush=True)


def agree() -> None:
    (p, a), (q, b) = made(SMALL[:20], torch.float32, AdamW), made(SMALL[:20], torch.float32, torch.optim.AdamW)
    for _ in range(10):
        fresh_gradients(p)
        for mine, theirs in zip(p, q, strict=True):
            theirs.grad = mine.grad.clone()
        a.step()
        b.step()
    apart = max(float((mine - theirs).detach().abs().max()) for mine, theirs in zip(p, q, strict=True))
    print(f"after 10 steps the weights are {apart:.1e} apart", flush=True)


def small(seconds: float, prepare, **options) -> None:
    theirs = {"fused": True, **options}
    compare(
        f"{len(SMALL)} tensors of 64, {TITLES[prepare]}",
        lambda: prepare(*made(SMALL, torch.float32, AdamW)),
        lambda: prepare(*made(SMALL, torch.float32, torch.optim.AdamW, **theirs)),
        seconds,
    )


def large(seconds: float, clip: float | None = None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.") + (", clipped" if clip else "")
        compare(
            f"{len(LANGUAGE_MODEL)} tensors, {name}",
            lambda dtype=dtype: eager(*made(LANGUAGE_MODEL, dtype, AdamW, max_norm=clip)),
            lambda dtype=dtype: eager(*made(LANGUAGE_MODEL, dtype, torch.optim.AdamW, fused=True), clip=clip),
            seconds,
        )


def muon(seconds: float) -> None:
    def ours():
        return eager(*made(MATRICES, torch.bfloat16, Muon))

    compare(
        f"Muon, {len(MATRICES)} matrices, bfloat16",
        ours,
        lambda: eager(*made(MATRICES, torch.bfloat16, torch.optim.Muon, weight_decay=0.0)),
        seconds,
    )
    adamw = ("Muon", "AdamW")
    compare("the same, of weft's own", ours, lambda: eager(*made(MATRICES, torch.bfloat16, AdamW)), seconds, adamw)


TITLES = {eager: "fresh gradients", captured: "in a CUDA graph"}
MEASUREMENTS = {
    "fresh": lambda seconds: small(seconds, eager),
    "graph": lambda seconds: small(seconds, captured, capturable=True),
    "large": large,
    "clipped": lambda seconds: large(seconds, clip=1.0),
    "muon": muon,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), help="what to measure")
    parser.add_argument("--seconds", type=float, default=4.0, help="of repetitions for each line")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds until a line that is late says where it is"
    )
    asked = parser.parse_args()
    agree()
    if not has_gpu():
        print("no GPU is seen here: there is nothing to time")
        return
    for name in asked.only:
        faulthandler.dump_traceback_later(asked.patience, repeat=True)
        MEASUREMENTS[name](asked.seconds)
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Steps of AdamW and Muon as a training loop sees them: wall time of whole calls, weft beside PyTorch, in turn.

    python examples/optimizer_against_torch.py [--only fresh graph ...] [--seconds 4]

`weft bench adamw` times the kernel; here Python counts too. Fresh gradients are new tensors at every step, as after
``zero_grad()``. Steps are timed in turn, so all of a line's contenders are in device memory at once: 40 GiB for 1.24 G
parameters in fp32. One that does not fit, or is not installed, is said and left out. bitsandbytes and torchao are timed
where they are installed (torchao compiles for each shape first). Without a GPU only the agreement of both is shown.
"""

import argparse
import faulthandler
import gc
import importlib
import statistics
import time
import traceback

import torch

from weft.hardware.query import has_gpu
from weft.operators.optimizer.workloads import LANGUAGE_MODEL
from weft.optim import AdamW, AdamW8bit, Muon

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


WARM = 2  # calls that compile, make states and fill the allocator's cache


def median_us(calls: dict, seconds: float, repetitions: int = 50) -> dict[str, float]:
    """Median wall microseconds of each, from the call until the device is done; each in turn, for so long at most."""
    times = {name: [] for name in calls}
    first = time.perf_counter()
    for done in range(repetitions):
        if done >= 5 and time.perf_counter() - first > seconds:
            break
        for name, (prepare, step) in calls.items():
            prepare()
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(t) for name, t in times.items()}


def warmed(make):
    """A contender, made and called a few times."""
    prepare, step = make()
    for _ in range(WARM):
        prepare()
        step()
    torch.cuda.synchronize()
    return prepare, step


def free() -> None:
    """What nobody holds any more goes back to the device: optimizers and their closures are cycles."""
    gc.collect()
    torch.cuda.empty_cache()


def compare(title: str, contenders: dict, seconds: float) -> None:
    """Prints each contender's time as soon as it is known, beside the first one's.

    Args:
        contenders: name → makes what is timed. One that fails is said, and the others go on without it.
    """
    print(title, flush=True)
    calls = {}
    for name, make in contenders.items():
        start = time.perf_counter()
        try:
            calls[name] = warmed(make)
        except torch.OutOfMemoryError:
            print(f"    {name:24} left out: out of memory beside {', '.join(calls) or 'nothing'}", flush=True)
        except ModuleNotFoundError as missing:
            print(f"    {name:24} left out: {missing}", flush=True)
        except Exception:  # a contender's failure is its own
            print(f"    {name:24} left out: it failed\n{traceback.format_exc()}", flush=True)
        else:
            print(f"    {name:24} ready after {time.perf_counter() - start:.1f} s", flush=True)
        free()
    us = median_us(calls, seconds)
    base = next(iter(contenders))
    for name, t in us.items():
        ratio = f"{t / us[base]:6.2f} times {base}'s" if base in us and name != base else ""
        print(f"    {name:24} {t:10.1f} us {ratio}", flush=True)
    calls.clear()
    free()


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
    contenders = {
        "weft": lambda: prepare(*made(SMALL, torch.float32, AdamW)),
        "torch": lambda: prepare(*made(SMALL, torch.float32, torch.optim.AdamW, **theirs)),
    }
    compare(f"{len(SMALL)} tensors of 64, {TITLES[prepare]}", contenders, seconds)


def large(seconds: float, clip: float | None = None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.") + (", clipped" if clip else "")
        contenders = {
            "weft": lambda dtype=dtype: eager(*made(LANGUAGE_MODEL, dtype, AdamW, max_norm=clip)),
            "torch": lambda dtype=dtype: eager(*made(LANGUAGE_MODEL, dtype, torch.optim.AdamW, fused=True), clip=clip),
        }
        compare(f"{len(LANGUAGE_MODEL)} tensors, {name}", contenders, seconds)


def eight_bits(seconds: float) -> None:
    def of(kind, **options):
        return eager(*made(LANGUAGE_MODEL, torch.bfloat16, kind, **options))

    contenders = {
        "weft": lambda: of(AdamW8bit),
        "bitsandbytes": lambda: of(importlib.import_module("bitsandbytes.optim").AdamW8bit),
        "torchao": lambda: of(importlib.import_module("torchao.optim").AdamW8bit),
        "torch, moments of 16 bits": lambda: of(torch.optim.AdamW, fused=True),
    }
    compare(f"{len(LANGUAGE_MODEL)} tensors, bfloat16, moments of 8 bits", contenders, seconds)


def muon(seconds: float) -> None:
    def of(kind, **options):
        return eager(*made(MATRICES, torch.bfloat16, kind, **options))

    contenders = {
        "weft": lambda: of(Muon),
        "torch": lambda: of(torch.optim.Muon, weight_decay=0.0),
        "weft's AdamW": lambda: of(AdamW),
    }
    compare(f"Muon, {len(MATRICES)} matrices, bfloat16", contenders, seconds)


TITLES = {eager: "fresh gradients", captured: "in a CUDA graph"}
MEASUREMENTS = {
    "fresh": lambda seconds: small(seconds, eager),
    "graph": lambda seconds: small(seconds, captured, capturable=True),
    "large": large,
    "clipped": lambda seconds: large(seconds, clip=1.0),
    "8bit": eight_bits,
    "muon": muon,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS), help="what to measure")
    parser.add_argument("--seconds", type=float, default=4.0, help="of repetitions for each comparison")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds until a measurement that is late says where it is"
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


if __name__ == "__main__":
    main()

"""What ``weft doctor --level full`` runs, each part in a separate process: ``python -m weft.hardware.trial PART``.

This is the one file of the examination that needs PyTorch (and for its kernel Triton). It writes one marked line.
Rates are a first impression; measured ceilings come from ``weft ceilings``.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from weft.hardware.probe import MARK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of a few runs, after one to warm up; on the GPU by events."""
    work()
    times = []
    for _ in range(repeats):
        if DEVICE == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return min(times)


def triton_kernel() -> dict[str, Any]:
    """Adds two vectors of an odd length with a Triton kernel and compares them with PyTorch's sum."""
    from weft.hardware.trial_kernel import add

    a, b = (torch.randn(10007, device=DEVICE) for _ in range(2))
    begin = time.perf_counter()
    right = torch.equal(add(a, b), a + b)
    taken = f"compiled and run in {time.perf_counter() - begin:.1f} s"
    return {"right": right, "found": taken if DEVICE == "cuda" else "run in Triton's interpreter (no GPU)"}


def matrix_product() -> dict[str, Any]:
    """A square product, bf16 on the GPU and fp32 on the CPU, some rows of it checked against float64."""
    N, dtype = (8192, torch.bfloat16) if DEVICE == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(N, N, device=DEVICE, dtype=dtype) for _ in range(2))  # [N, N]
    seconds = best_seconds(lambda: a @ b)
    expected = a[:4].double() @ b.double()  # [4, N]
    error = ((a @ b)[:4].double() - expected).norm() / expected.norm()
    rate = 2 * N**3 / seconds / 1e12
    return {
        "right": bool(error < (1e-2 if dtype is torch.bfloat16 else 1e-5)),
        "found": f"{N}³ {str(dtype).removeprefix('torch.')}: {rate:.3g} TFLOP/s",
    }


def memory_copy() -> dict[str, Any]:
    """Copies 1 GiB on the GPU or 256 MiB on the CPU; bytes read and bytes written both count."""
    size = 2**30 if DEVICE == "cuda" else 2**28
    source = torch.randint(0, 256, (size,), device=DEVICE, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = best_seconds(lambda: target.copy_(source))
    found = f"{size // 2**20} MiB: {2 * size / seconds / 1e9:.4g} GB/s read and written"
    return {"right": torch.equal(source, target), "found": found}


PARTS = {"triton-kernel": triton_kernel, "matrix-product": matrix_product, "memory-copy": memory_copy}


if __name__ == "__main__":
    sys.stdout.write(f"\n{MARK}{json.dumps(PARTS[sys.argv[1]]())}\n")

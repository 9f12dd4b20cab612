"""CPU against GPU for the matrix product, with and without the transfers: time, speed-up, largest error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft import registry
from weft.records import Measurement
from weft.timing import Timer


def measure(bench: Any, *, quick: bool = False) -> list[Measurement]:
    """NumPy, PyTorch on the CPU and, with a GPU, PyTorch and our kernel on it, the last two also with the copies there and
    back. ``details`` holds the speed-up over NumPy and the largest error relative to float64's root mean square.

    Wall time on the host to a finished result, fp32 (IEEE) throughout, warm caches.
    """
    op = registry.get("matmul")
    found: list[Measurement] = []
    timer = Timer("cpu", budget_s=0.3, least=3, most=20)
    for w in op.cases("cpu"):
        if quick and w["M"] > 1024:
            continue
        a, b = (
            t for t in op.inputs(w, torch.Generator().manual_seed(3), "cpu").values() if isinstance(t, torch.Tensor)
        )
        want = a.double() @ b.double()
        calls = _calls(a, b, bench.device)
        times = timer.measure({name: [call] for name, call in calls.items()})
        numpy_us = times["numpy"].median_us
        for name, call in calls.items():
            us = times[name].median_us
            error = float((call().cpu().double() - want).abs().max() / want.square().mean().sqrt())
            found.append(
                Measurement(
                    operator="matmul",
                    implementation=name,
                    direction="forward",
                    workload=str(w),
                    dtype="fp32",
                    time_us=float(f"{us:.5g}"),
                    metric="wall time",
                    cache="warm",
                    time_p20_us=times[name].quantile(0.2),
                    time_p80_us=times[name].quantile(0.8),
                    repetitions=len(times[name].times_us),
                    host_us=float(f"{times[name].host_us:.5g}"),
                    flops=op.cost(w, "forward").flops,
                    **bench.context(),
                    details={"speedup_over_numpy": float(f"{numpy_us / us:.4g}"), "max_error": float(f"{error:.3g}")},
                )
            )
    return found


def _calls(a: torch.Tensor, b: torch.Tensor, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    x, y = a.numpy(), b.numpy()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "numpy": lambda: torch.from_numpy(x @ y),
        "torch, CPU": lambda: a @ b,
    }
    if device != "cuda":
        return calls
    from weft.operators.matmul.matmul import matmul_triton

    ga, gb = a.cuda(), b.cuda()

    def finished(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            result = run()
            torch.cuda.synchronize()
            return result

        return call

    calls["torch, GPU"] = finished(lambda: ga @ gb)
    calls["triton, GPU"] = finished(lambda: matmul_triton(ga, gb, "ieee"))
    calls["torch, GPU with transfers"] = lambda: (a.cuda() @ b.cuda()).cpu()
    calls["triton, GPU with transfers"] = lambda: matmul_triton(a.cuda(), b.cuda(), "ieee").cpu()
    return calls

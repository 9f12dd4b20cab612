"""What the machine gives: streaming bandwidth at several mixes of reads and writes, and the matrix rate of each dtype.

Each is the best of a few honest configurations of the plainest kernel there is, on random data, cold. An operator's
limit is the time that its compulsory work takes at these rates, with the mix nearest to its own.
"""

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft import records
from weft.definition import Cost
from weft.records import Measurement

MIXES = ((1, 0), (0, 1), (1, 1), (2, 1), (3, 1), (4, 3))  # arrays read : arrays written
MATRIX_SIZES = {"bf16": (4096, 8192), "fp16": (4096, 8192), "tf32": (4096, 8192), "fp32": (4096,)}


@dataclass
class Ceilings:
    """Measured rates: ``bandwidth[(reads, writes)]`` in bytes per second, ``matrix[dtype]`` in FLOP per second."""

    device: str
    bandwidth: dict[tuple[int, int], float] = field(default_factory=dict)
    matrix: dict[str, float] = field(default_factory=dict)

    def limit(self, cost: Cost) -> tuple[float, str]:
        """Microseconds that compulsory work takes at the ceilings, and the name of the ceiling that binds."""
        candidates: list[tuple[float, str]] = []
        if cost.bytes_moved and self.bandwidth:
            mix = self.nearest(cost)
            candidates.append((cost.bytes_moved / self.bandwidth[mix] * 1e6, f"memory {mix[0]}:{mix[1]}"))
        for dtype, flops in cost.matrix_flops.items():
            if dtype in self.matrix:
                candidates.append((flops / self.matrix[dtype] * 1e6, f"{dtype} matrix"))
        return max(candidates, default=(0.0, ""))

    def nearest(self, cost: Cost) -> tuple[int, int]:
        """The measured mix whose share of reads is nearest to the cost's."""
        share = cost.reads / cost.bytes_moved
        return min(self.bandwidth, key=lambda mix: (abs(mix[0] / sum(mix) - share), mix))

    def higher(self, other: "Ceilings") -> "Ceilings":
        """Of two measurements the higher rates: other programs slow a measurement, they never speed it up."""
        bandwidth = {mix: max(rate, other.bandwidth.get(mix, 0.0)) for mix, rate in self.bandwidth.items()}
        matrix = {dtype: max(rate, other.matrix.get(dtype, 0.0)) for dtype, rate in self.matrix.items()}
        return Ceilings(self.device, bandwidth, matrix)

    def rows(self) -> Iterable[tuple[str, str, float, str]]:
        """(name, metric, value, unit) of each."""
        for (r, w), value in self.bandwidth.items():
            yield f"memory {r}:{w}", "bandwidth", value, "B/s"
        for dtype, value in self.matrix.items():
            yield f"{dtype} matrix", "matrix rate", value, "FLOP/s"


def measure(device: str, *, quick: bool = False, say: Callable[[str], None] = lambda text: None) -> Ceilings:
    """Measures all ceilings of this machine.

    Args:
        device: ``cuda`` or ``cpu``.
        quick: fewer configurations and repetitions (for the report).
        say: receives a line about what is measured next, and a warning where other programs slow a CPU.
    """
    if device == "cpu" and hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1):
        load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        say(f"other programs run ({load}): rates are too low, times too long")
    return _measure_cuda(quick, say) if device == "cuda" else _measure_cpu(quick, say)


def as_records(found: Ceilings, context: Mapping[str, Any]) -> list[Measurement]:
    """The ceilings as records; ``context`` is that of ``query.context``."""
    return [records.ceiling(*row, **context) for row in found.rows()]


# ---- GPU -------------------------------------------------------------------------------------------------------------


def _measure_cuda(quick: bool, say: Callable[[str], None]) -> Ceilings:
    import torch

    from weft.hardware.streaming import stream_call
    from weft.timing import Timer

    found = Ceilings("cuda")
    timer = Timer("cuda", budget_s=0.05 if quick else 0.15, least=5, most=20)
    free = torch.cuda.mem_get_info()[0]
    total = min(2 * 2**30 if quick else 4 * 2**30, free // 3)  # bytes moved by one call
    for reads, writes in MIXES:
        say(f"ceiling: memory {reads}:{writes}")
        calls = stream_call(reads, writes, total // (reads + writes), quick=quick)
        times = timer.measure({str(i): [call] for i, (call, _) in enumerate(calls)})
        moved = calls[0][1]
        found.bandwidth[reads, writes] = moved / min(t.median_us for t in times.values()) * 1e6
    before = torch.get_float32_matmul_precision()
    try:
        for dtype, sizes in MATRIX_SIZES.items():
            say(f"ceiling: {dtype} matrix")
            torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
            kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
            for n in sizes:
                a, b = (torch.randn(n, n, device="cuda", dtype=torch.float32).to(kind) for _ in range(2))
                us = timer.measure({"": [functools.partial(torch.mm, a, b)]})[""].median_us
                found.matrix[dtype] = max(found.matrix.get(dtype, 0.0), 2.0 * n**3 / us * 1e6)
    finally:
        torch.set_float32_matmul_precision(before)
    return found


# ---- CPU -------------------------------------------------------------------------------------------------------------


def _measure_cpu(quick: bool, say: Callable[[str], None]) -> Ceilings:
    """Streaming with PyTorch on all its threads, and the fp32 matrix rate of the better BLAS of PyTorch and NumPy."""
    import torch

    found = Ceilings("cpu")
    n = (64 if quick else 256) * 2**20 // 4
    a, b, c = (torch.rand(n) for _ in range(3))
    calls: dict[tuple[int, int], Callable[[], Any]] = {
        (1, 0): lambda: a.sum(),
        (0, 1): lambda: c.fill_(1.5),
        (1, 1): lambda: c.copy_(a),
        (2, 1): lambda: torch.add(a, b, out=c),
    }
    for mix, call in calls.items():
        say(f"ceiling: memory {mix[0]}:{mix[1]}")
        found.bandwidth[mix] = sum(mix) * n * 4 / _best_s(call)
    size = 1024 if quick else 2048
    say("ceiling: fp32 matrix")
    p, q = torch.randn(size, size), torch.randn(size, size)
    x, y = p.numpy(), q.numpy()  # the better of two BLAS libraries: they differ by a third and more
    found.matrix["fp32"] = 2.0 * size**3 / min(_best_s(lambda: torch.mm(p, q)), _best_s(lambda: x @ y))
    return found


def _best_s(call: Callable[[], Any], repetitions: int = 7) -> float:
    """The shortest of a few calls after a first one, seconds: other programs can only lengthen them."""
    call()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)

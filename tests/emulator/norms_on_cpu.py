"""For tests of forward norms whose kernels are played on a CPU: rows, the launch that a call computes, and how far off a result
may be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import cuda_as_cpp
import pytest
from cuda_on_cpu import FRAME, bytes_of, frame_is_whole, framed, job, tensor_of

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.normalization import cluster, staying  # noqa: E402
from weft.operators.normalization.kind import Kind  # noqa: E402

FP16, FP32 = torch.float16, torch.float32
ROWS, FAR = 13, 100.0
LAYER, ADDED, RMS = Kind(True, True, True, False), Kind(True, True, True, True), Kind(False, True, False, False)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of normally distributed numbers ``far`` from 0, whose first element is ``wild``; ``at_once``: rows of a block;
    ``stays``: on so many clusters that stay."""

    dtype: torch.dtype
    kind: Kind
    far: float = 0.0
    columns: int = 4096
    at_once: int = 1
    wild: float = 0.0
    times: float = 1.0
    stays: int = 0
    rows: int = ROWS


TYPICAL = 1e-7  # of a row's deviation, that it errs by: the root of the squares' mean over rows
TYPICAL_FAR = 3e-7  # where the mean is rounded to two digits less
TYPICAL_OF_FIRST = 1e-5  # in 16 bits: what the mean is off the first element, squared, is taken from their sum

STAYING, PLACES = {"THREADS": 64, "EACH": 32, "PER_SM": 1}, 3

LAUNCH = """
char *const kept = static_cast<char *>(job.buffers[8]) + 64;
const Any x{job.buffers[0]}, r{job.buffers[1]}, w{job.buffers[2]}, b{job.buffers[3]}, h{job.buffers[5]},
    y{static_cast<char *>(job.buffers[4]) + 64}, mean{kept}, rstd{kept + job.scales[0]};
const i64 *s = job.shape;
job.run([&] { KERNEL(x, r, w, b, y, h, mean, rstd, s[0], s[1], s[2], s[3], s[4], s[5], job.factors[0]); });
"""


class Norms:
    """Rows of normally distributed numbers on clusters of blocks, and the launch that a call computes."""

    def __init__(self, case: Case, seed: int = 0):
        self.seed, self.kind, self.far, self.rows = seed, case.kind, bool(case.far), case.rows
        g = torch.Generator().manual_seed(seed)
        self.x, self.residual = (torch.randn((case.rows, case.columns), generator=g) for _ in range(2))
        if not self.kind.added:
            self.residual = torch.zeros_like(self.x)
        self.x, self.residual = self.x * case.times, self.residual * case.times
        if case.wild:
            self.x[:, 0] = case.wild
        (self.residual if self.kind.added else self.x).add_(case.far)
        self.x, self.residual = self.x.to(case.dtype), self.residual.to(case.dtype)
        self.weight, self.bias = (torch.randn(case.columns, generator=g).to(case.dtype) for _ in range(2))
        given = [self.x, *[self.residual] * self.kind.added, self.weight, *[self.bias] * self.kind.biased]
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(cluster, "SHORTEST", 1024)
            patch.setattr(cluster.configuration, "trial", {"THREADS": 128, "EACH": 16, "ROWS": case.at_once})
            patch.setattr(staying.configuration, "trial", STAYING if case.stays else {})
            patch.setattr(staying, "resident", lambda plan, device: case.stays)
            patch.setattr(staying, "places", lambda *call: PLACES)
            self.plan = cluster.plan(*given, 1e-5, self.kind, True)

    @property
    def launch(self) -> str:
        return LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self) -> bytes:
        read = {0: self.x, 1: self.residual, 2: self.weight, 3: self.bias, 5: torch.empty_like(self.x)}
        buffers = {i: bytes_of(t) for i, t in read.items()} | {4: framed(self.x.nbytes), 8: framed(8 * self.rows)}
        plan = dataclasses.replace(self.plan, shared_bytes=self.plan.shared_bytes + cuda_as_cpp.STATIC)
        *shape, eps = (s.value for s in self.plan.scalars)
        return job(plan, self.seed, buffers, shape=shape, scales=(4 * self.rows,), factors=(eps,))

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or what is further off than rounding allows."""
        size = self.x.nbytes + 2 * FRAME
        if not (frame_is_whole(found[:size]) and frame_is_whole(found[size:])):
            return "something is written beside the results"
        x = (self.x + self.residual).double()
        mean = x.mean(1, keepdim=True) if self.kind.centered else 0.0
        rstd = ((x - mean).square().mean(1, keepdim=True) + 1e-5).rsqrt()
        want = (x - mean) * rstd * self.weight.double() + (self.bias.double() if self.kind.biased else 0.0)
        y = tensor_of(found[FRAME : size - FRAME], self.x.dtype).view(self.x.shape).double()
        rounding = 2.0**-11 if self.x.dtype == FP16 else 4e-5 if self.far else 2e-6
        near_zero = 5e-5 if self.far else 1e-5 if self.x.dtype == FP16 else 2e-6
        if not torch.allclose(y, want, rtol=rounding, atol=near_zero):
            return f"y errs by {(y - want).abs().max():.2g}"
        kept = tensor_of(found[size + FRAME : -FRAME], FP32).view(2, self.rows, 1).double()
        typical = (kept[1] / rstd - 1).square().mean().sqrt().item()
        most = TYPICAL_OF_FIRST if self.x.dtype == FP16 else TYPICAL_FAR if self.far else TYPICAL
        return f"deviations err by {typical:.2g}" if typical > most else ""


def with_headers(source: Path) -> str:
    """The text of a kernel file with the headers that lie beside it, and ``rows.cuh``, in it."""
    header = (source.parents[1] / "rows.cuh").read_text()
    return cuda_as_cpp.whole(source).replace('#include "rows.cuh"', header.replace("#pragma once", ""))

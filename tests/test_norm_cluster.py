"""Norms by clusters without a GPU: ``cluster.cu`` run on a CPU that plays its PTX (``ptx_on_cpu.hpp``) with the launches that
Python computes; how far LayerNorm's deviations err, also in rows far from 0."""

from __future__ import annotations

import dataclasses

import cuda_as_cpp
import pytest
from cuda_on_cpu import FRAME, bytes_of, frame_is_whole, framed, job, player_of_cases, tensor_of

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.normalization import cluster  # noqa: E402
from weft.operators.normalization.kind import Kind  # noqa: E402

FP16, FP32 = torch.float16, torch.float32
ROWS, FAR = 13, 100.0
LAYER, ADDED = Kind(True, True, True, False), Kind(True, True, True, True)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of normally distributed numbers ``far`` from 0, whose first element is ``wild``; ``at_once``: rows of a block."""

    dtype: torch.dtype
    kind: Kind
    far: float = 0.0
    columns: int = 4096
    at_once: int = 1
    wild: float = 0.0


CASES = {
    "fp32": Case(FP32, LAYER),
    "fp32 far": Case(FP32, LAYER, FAR),
    "fp32 wild": Case(FP32, LAYER, wild=5.0),
    "fp32 added": Case(FP32, ADDED, FAR),
    "fp32 odd": Case(FP32, LAYER, columns=4004),
    "fp32 two rows": Case(FP32, LAYER, FAR, columns=4004, at_once=2),
    "fp16": Case(FP16, LAYER),
    "fp16 far": Case(FP16, LAYER, FAR),
    "fp16 added": Case(FP16, ADDED, FAR),
    "fp32 rms": Case(FP32, Kind(False, True, False, False)),
}
MISTAKES = {
    "around 0": ("fp16 far", "const float d = CENTERED ? f[i] - around[k] : f[i];", "const float d = f[i];"),
    "around x without the residual": ("fp16 added", "(r ? to_float(*r) : 0.f)", "0.f"),
    "squares about 0": (
        "fp32 far",
        "const float own = of_row(sums, k).x / fmaxf(float(mine), 1.f);",
        "const float own = 0.f;",
    ),
    "means that are not joined": ("fp32", "warp_sum(sums.y + count * off * off)", "warp_sum(sums.y)"),
    "a warp's share for a block's": ("fp32", "warps = false;", ""),
    "a row's end counted as a whole slice": (
        "fp32 odd",
        "elements % ROUND - warp * MINE, MINE",
        "ROUND - warp * MINE, MINE",
    ),
}
TYPICAL = 1e-7  # of a row's deviation, that it errs by: the root of the squares' mean over rows
TYPICAL_FAR = 3e-7  # where the mean is rounded to two digits less
TYPICAL_OF_FIRST = 1e-5  # in 16 bits: what the mean is off the first element, squared, is taken from their sum

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
        self.seed, self.kind, self.far = seed, case.kind, bool(case.far)
        g = torch.Generator().manual_seed(seed)
        self.x, self.residual = (torch.randn((ROWS, case.columns), generator=g) for _ in range(2))
        if not self.kind.added:
            self.residual = torch.zeros_like(self.x)
        if case.wild:
            self.x[:, 0] = case.wild
        (self.residual if self.kind.added else self.x).add_(case.far)
        self.x, self.residual = self.x.to(case.dtype), self.residual.to(case.dtype)
        self.weight, self.bias = (torch.randn(case.columns, generator=g).to(case.dtype) for _ in range(2))
        given = [self.x, *[self.residual] * self.kind.added, self.weight, *[self.bias] * self.kind.biased]
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(cluster, "SHORTEST", 1024)
            patch.setattr(cluster.configuration, "trial", {"THREADS": 128, "EACH": 16, "ROWS": case.at_once})
            self.plan = cluster.plan(*given, 1e-5, self.kind, True)

    @property
    def launch(self) -> str:
        return LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self) -> bytes:
        read = {0: self.x, 1: self.residual, 2: self.weight, 3: self.bias, 5: torch.empty_like(self.x)}
        buffers = {i: bytes_of(t) for i, t in read.items()} | {4: framed(self.x.nbytes), 8: framed(8 * ROWS)}
        plan = dataclasses.replace(self.plan, shared_bytes=self.plan.shared_bytes + cuda_as_cpp.STATIC)
        *shape, eps = (s.value for s in self.plan.scalars)
        return job(plan, self.seed, buffers, shape=shape, scales=(4 * ROWS,), factors=(eps,))

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
        kept = tensor_of(found[size + FRAME : -FRAME], FP32).view(2, ROWS, 1).double()
        typical = (kept[1] / rstd - 1).square().mean().sqrt().item()
        most = TYPICAL_OF_FIRST if self.x.dtype == FP16 else TYPICAL_FAR if self.far else TYPICAL
        return f"deviations err by {typical:.2g}" if typical > most else ""


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    text = cuda_as_cpp.whole(cluster.SOURCE)
    header = (cluster.SOURCE.parents[1] / "rows.cuh").read_text()
    text = text.replace('#include "rows.cuh"', header.replace("#pragma once", ""))
    return player_of_cases(tmp_path_factory.mktemp("played"), text, Norms, CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert play(name) == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    assert play(MISTAKES[mistake][0], mistake)

"""GroupNorm by clusters without a GPU: ``group_cluster.cu`` run on a CPU that plays its PTX (``ptx_on_cpu.hpp``) with the
launches that Python computes; how far its means err, and who takes it."""

from __future__ import annotations

import dataclasses

import cuda_as_cpp
import pytest
from cuda_on_cpu import FRAME, bytes_of, frame_is_whole, framed, job, player_of_cases, tensor_of

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.normalization import group_cluster, group_norm  # noqa: E402

FP16, FP32 = torch.float16, torch.float32
ROWS, CHANNELS, SPACE = 48, 4, 640  # groups, and what each has

CASES = {"fp32": FP32, "fp16": FP16}
MISTAKES = {
    "about one lane's mean": ("fp32", "constexpr bool TWICE = sizeof(T) == 4;", "constexpr bool TWICE = false;")
}

TYPICAL = 4e-9  # deviations that a mean in fp32 errs by, the root of the squares' mean over groups

LAUNCH = """
const Any x{job.buffers[0]}, w{job.buffers[1]}, b{job.buffers[2]}, y{static_cast<char *>(job.buffers[4]) + 64},
    mean{static_cast<char *>(job.buffers[8]) + 64}, rstd{static_cast<char *>(job.buffers[8]) + 64 + job.scales[0]};
const i64 *s = job.shape;
job.run([&] { KERNEL(x, w, b, y, mean, rstd, s[0], s[1], s[2], s[3], s[4], s[5], job.factors[0]); });
"""


class Norms:
    """Groups of normally distributed numbers, on clusters of two blocks, and the launch that a call computes."""

    def __init__(self, dtype: torch.dtype, seed: int = 0):
        self.seed = seed
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn((ROWS, CHANNELS, SPACE), generator=g).to(dtype)
        self.weight, self.bias = torch.randn((2, CHANNELS), generator=g).to(dtype)
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(group_cluster.configuration, "trial", {"THREADS": 128, "EACH": 16})
            self.plan = group_cluster.plan(self.x, self.weight, self.bias, 1, 1e-5, True, True, True, dtype)

    @property
    def launch(self) -> str:
        return LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self) -> bytes:
        read = {0: self.x, 1: self.weight.clone(), 2: self.bias.clone()}
        buffers = {i: bytes_of(t) for i, t in read.items()} | {4: framed(self.x.nbytes), 8: framed(8 * ROWS)}
        plan = dataclasses.replace(self.plan, shared_bytes=self.plan.shared_bytes + cuda_as_cpp.STATIC)
        *shape, eps = (s.value for s in self.plan.scalars)
        return job(plan, self.seed, buffers, shape=shape, scales=(4 * ROWS,), factors=(eps,))

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or what is further off than rounding allows."""
        size = self.x.nbytes + 2 * FRAME
        if not (frame_is_whole(found[:size]) and frame_is_whole(found[size:])):
            return "something is written beside the results"
        x = self.x.double().flatten(1)
        mean, rstd = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
        kept = tensor_of(found[size + FRAME : -FRAME], FP32).view(2, ROWS, 1).double()
        want = ((x - mean) * rstd).view(self.x.shape) * self.weight.double()[:, None] + self.bias.double()[:, None]
        y = tensor_of(found[FRAME : size - FRAME], self.x.dtype).view(self.x.shape).double()
        if not torch.allclose(y, want, rtol=2e-3 if self.x.dtype == FP16 else 2e-6, atol=2e-6):
            return f"y errs by {(y - want).abs().max():.2g}"
        error = ((kept[0] - mean) * rstd).abs()
        worst, typical = error.max().item(), error.square().mean().sqrt().item()
        if self.x.dtype == FP32 and typical > TYPICAL:
            return f"fp32 means err by {typical:.2g} of a deviation, at worst by {worst:.2g}"
        return "" if torch.allclose(kept[1], rstd, rtol=2e-6) else "deviations err"


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    text = cuda_as_cpp.whole(group_cluster.SOURCE)
    header = (group_cluster.SOURCE.parents[1] / "rows.cuh").read_text()
    text = text.replace('#include "rows.cuh"', header.replace("#pragma once", ""))
    return player_of_cases(tmp_path_factory.mktemp("played"), text, Norms, CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert play(name) == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    assert play(MISTAKES[mistake][0], mistake)


@pytest.mark.parametrize(
    ("elements", "in_16_bits", "in_fp32"),
    [(2048, "triton", "triton"), (10240, "cuda", "cuda"), (40960, "cuda", "triton"), (65536, "cuda", "cuda")],
)
def test_the_public_function_takes_it_where_it_was_measured_to_be_faster(elements, in_16_bits, in_fp32):
    for dtype, chosen in ((FP16, in_16_bits), (torch.bfloat16, in_16_bits), (FP32, in_fp32)):
        x = torch.empty(2, 32, elements, dtype=dtype, device="meta")
        with compiling_for(90, lambda *kernel: None):
            assert group_norm.choose(x, 32).implementation == chosen

"""Forward norms on clusters of blocks on the CPU emulator: how far deviations err, also in rows far from 0; that no
configuration spills; which row of the tables a call takes."""

import dataclasses

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, FP32, FRAME, Launched, Suite, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403

from weft import ops
from weft.bench.compile_check import resource_usage
from weft.definition import SHARED_LIMIT
from weft.operators.cuda import CudaPlan, compile_cubin
from weft.operators.launch import compiling_for
from weft.operators.normalization import dispatch, ring
from weft.operators.normalization.dispatch import NormCall, NormConfig

ROWS, FAR = 13, 100.0
LAYER = NormConfig("layer_norm", True, False, True, True)
ADDED = NormConfig("add_layer_norm", True, True, True, True)
RMS = NormConfig("rms_norm", False, False, True, False)
ADDED_RMS = NormConfig("add_rms_norm", False, True, True, False)


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of normally distributed numbers ``far`` from 0, whose first element is ``wild``; ``at_once``: rows of a block;
    ``persistent``: on so many clusters of ``persistent.cu``."""

    dtype: torch.dtype
    config: NormConfig
    far: float = 0.0
    columns: int = 4096
    at_once: int = 1
    wild: float = 0.0
    times: float = 1.0
    persistent: int = 0
    rows: int = ROWS


CASES = {
    "fp32": Case(FP32, LAYER),
    "fp32 far": Case(FP32, LAYER, FAR),
    "fp32 wild": Case(FP32, LAYER, wild=5.0),
    "fp32 huge": Case(FP32, LAYER, times=1.5e17),
    "fp32 added": Case(FP32, ADDED, FAR),
    "fp32 odd": Case(FP32, LAYER, columns=4004),
    "fp32 two rows": Case(FP32, LAYER, FAR, columns=4004, at_once=2),
    "fp16": Case(FP16, LAYER),
    "fp16 far": Case(FP16, LAYER, FAR),
    "fp16 added": Case(FP16, ADDED, FAR),
    "fp32 rms": Case(FP32, RMS),
}
MISTAKES = {
    "around 0": ("fp16 far", "const float d = CENTERED ? f[i] - around[k] : f[i];", "const float d = f[i];"),
    "around x without the residual": ("fp16 added", "(r ? to_float(*r) : 0.f)", "0.f"),
    "squares about 0": ("fp32 far", "const float own = of_row(sums, k).x * in_mine;", "const float own = 0.f;"),
    "means that are not joined": ("fp32", "warp_sum(of.y + count * off * off)", "warp_sum(of.y)"),
    "a warp's share for a block's": ("fp32", "warps = false;", ""),
    "a row's end counted as a whole slice": ("fp32 odd", "elements % ROUND - warp", "ROUND - warp"),
}
PERSISTENT_CASES = {
    "fp32": Case(FP32, LAYER, persistent=2),
    "fp32 far": Case(FP32, LAYER, FAR, persistent=2),
    "fp32 wild": Case(FP32, LAYER, wild=5.0, persistent=3),
    "fp32 huge": Case(FP32, LAYER, times=1.5e17, persistent=2),
    "fp32 added": Case(FP32, ADDED, FAR, persistent=2),
    "three blocks": Case(FP32, LAYER, columns=6144, persistent=2),
    "one row": Case(FP32, LAYER, persistent=4, rows=1),
    "two rows of one cluster": Case(FP16, LAYER, persistent=1, rows=2),
    "fp16": Case(FP16, LAYER, persistent=2),
    "fp16 far": Case(FP16, LAYER, FAR, persistent=2),
    "fp16 added": Case(FP16, ADDED, FAR, persistent=2),
    "rms": Case(FP32, RMS, persistent=2),
    "rms added": Case(FP16, ADDED_RMS, persistent=2),
}
BOUNDED = "fminf(sum * (sum * inverse_of_all), 3.402823466e38f)"
PERSISTENT_MISTAKES = {
    "squares about 0": ("fp32 far", "const float d = CENTERED ? f[i] - around : f[i];", "const float d = f[i];"),
    "squares about the first vector's mean": ("fp32", "fminf(off * (off / EACH), 3.402823466e38f)", "0.f"),
    "a thread's sum about that mean": ("fp32 far", "off + EACH * around", "off"),
    "means that are not joined": ("fp32", "warp_sum(of.y + count * off * off)", "warp_sum(of.y)"),
    "squares of lanes about lane 0's mean": ("fp32", f"squares - {BOUNDED}", "squares"),
    "a product that overflows": ("fp32 huge", BOUNDED, "sum * sum * inverse_of_all"),
    "more blocks than there are": ("three blocks", "const bool there = lane < lanes;", "const bool there = lane < 16;"),
    "the first row's slot for all": ("fp32", "ring + turn % SLOTS * TENSORS * SLICE", "ring"),
    "a slot is not waited for": ("fp32", "phase_wait(&full[slot], turn / SLOTS & 1);", ""),
    "the parity of the first round": ("fp32", "turn / SLOTS & 1", "0"),
    "an exchange is not waited for": ("fp32", "phase_wait(&received[turn % AHEAD], turn / AHEAD & 1);", ""),
    "the exchange's first parity": ("fp32", "turn / AHEAD & 1", "0"),
    "a residual of another row": ("fp16 added", "r + row * r_row + first", "r + first"),
    "the residual is not rounded": ("fp16 added", "unpack(words, f);\n    }\n    return", "}\n    return"),
    "the next row's statistics": ("fp32", "turn % AHEAD][lane % MAX", "(turn + 1) % AHEAD][lane % MAX"),
}

TYPICAL = 1e-7  # of a row's deviation, that it errs by: the root of the squares' mean over rows
TYPICAL_FAR = 3e-7  # where the mean is rounded to two digits less
TYPICAL_OF_FIRST = 1e-5  # in 16 bits: what the mean is off the first element, squared, is taken from their sum


class Norms(Launched):
    """Rows of normally distributed numbers on clusters of blocks."""

    cpp = """
char *const saved = static_cast<char *>(job.buffers[8]) + 64;
const Any x{job.buffers[0]}, r{job.buffers[1]}, w{job.buffers[2]}, b{job.buffers[3]}, h{job.buffers[5]},
    y{static_cast<char *>(job.buffers[4]) + 64}, mean{saved}, rstd{saved + job.scales[0]};
job.run([&] { KERNEL(x, r, w, b, y, h, mean, rstd, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        self.config, self.far, self.rows = case.config, bool(case.far), case.rows
        self.x, self.residual = (torch.randn((case.rows, case.columns), generator=g) for _ in range(2))
        if not self.config.added:
            self.residual = torch.zeros_like(self.x)
        self.x, self.residual = self.x * case.times, self.residual * case.times
        if case.wild:
            self.x[:, 0] = case.wild
        (self.residual if self.config.added else self.x).add_(case.far)
        self.x, self.residual = self.x.to(case.dtype), self.residual.to(case.dtype)
        self.weight, self.bias = (torch.randn(case.columns, generator=g).to(case.dtype) for _ in range(2))
        tensors = [self.x, *[self.residual] * self.config.added, self.weight, *[self.bias] * self.config.biased]
        patch.setattr(dispatch, "CLUSTER_SHORTEST", 1024)
        patch.setattr(dispatch.cluster_configuration, "trial", {"THREADS": 128, "EACH": 16, "ROWS": case.at_once})
        patch.setattr(dispatch.persistent_configuration, "trial", {"THREADS": 64, "EACH": 32, "PER_SM": 1})
        patch.setattr(dispatch, "resident", lambda plan, device: case.persistent)
        patch.setattr(dispatch, "slots", lambda *call: 3)
        launch = dispatch.persistent_launch if case.persistent else dispatch.cluster_launch
        return launch(NormCall(*tensors, 1e-5, self.config, True))

    def job(self) -> bytes:
        read = {0: self.x, 1: self.residual, 2: self.weight, 3: self.bias, 5: torch.empty_like(self.x)}
        buffers = {**read, 4: framed(self.x.nbytes), 8: framed(8 * self.rows)}
        return job(self.plan, self.seed, buffers, scales=(4 * self.rows,), static=True)

    def what_is_wrong(self, found: bytes) -> str:
        size = self.x.nbytes + 2 * FRAME
        if not (frame_is_whole(found[:size]) and frame_is_whole(found[size:])):
            return "something is written beside the results"
        x = (self.x + self.residual).double()
        mean = x.mean(1, keepdim=True) if self.config.centered else 0.0
        rstd = ((x - mean).square().mean(1, keepdim=True) + 1e-5).rsqrt()
        want = (x - mean) * rstd * self.weight.double() + (self.bias.double() if self.config.biased else 0.0)
        y = tensor_of(found[FRAME : size - FRAME], self.x.dtype).view(self.x.shape).double()
        rounding = 2.0**-11 if self.x.dtype == FP16 else 4e-5 if self.far else 2e-6
        near_zero = 5e-5 if self.far else 1e-5 if self.x.dtype == FP16 else 2e-6
        if not torch.allclose(y, want, rtol=rounding, atol=near_zero):
            return f"y errs by {(y - want).abs().max():.2g}"
        saved = tensor_of(found[size + FRAME : -FRAME], FP32).view(2, self.rows, 1).double()
        typical = (saved[1] / rstd - 1).square().mean().sqrt().item()
        most = TYPICAL_OF_FIRST if self.x.dtype == FP16 else TYPICAL_FAR if self.far else TYPICAL
        return f"deviations err by {typical:.2g}" if typical > most else ""


SUITES = {
    kernel: Suite(cuda_as_cpp.whole(dispatch.HERE / f"{kernel}.cu", "moments.cuh", "rows.cuh"), Norms, *suite)
    for kernel, suite in (("cluster", (CASES, MISTAKES)), ("persistent", (PERSISTENT_CASES, PERSISTENT_MISTAKES)))
}


def call_of(n: int, dtype: torch.dtype, config: NormConfig) -> NormCall:
    x, weight = torch.empty(64, n, dtype=dtype, device="meta"), torch.empty(n, dtype=dtype, device="meta")
    return NormCall(x, *[x] * config.added, weight, *[weight] * config.biased, 1e-5, config, False)


@pytest.mark.share(3)
@pytest.mark.parametrize("config", [LAYER, RMS, ADDED], ids=["layer norm", "rms norm", "with a residual"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_every_persistent_configuration_fits_and_spills_nothing(monkeypatch, dtype, config):
    for n in (2**16, 2**18):
        found = list(dispatch.persistent_candidates(90, dtype, n, config.centered, config.added))
        heuristic = dispatch.persistent_heuristic(90, dtype, n, config.centered, config.added)
        assert heuristic in (found or [{}])
        for c in found:
            monkeypatch.setattr(dispatch.persistent_configuration, "trial", c)
            with compiling_for(90, lambda *kernel: None):
                plan = dispatch.persistent_launch(call_of(n, dtype, config))
            used = resource_usage(compile_cubin(plan.source, plan.expression, 90)[0])
            assert used["STACK"] == 0 and used["SHARED"] <= dispatch.PERSISTENT_OWN
            assert (used["SHARED"] + plan.shared_bytes) * c["PER_SM"] <= SHARED_LIMIT[90] + ring.SYSTEM
            assert used["REG"] * plan.block * c["PER_SM"] <= ring.REGISTERS


@pytest.mark.parametrize(
    ("n", "dtype", "config"),
    [(2**18, FP32, ADDED), (2**18 - 8, FP16, LAYER), (2**14, FP32, LAYER), (2**19, FP32, LAYER)],
)
def test_what_no_ring_or_persistent_cluster_holds_is_unsupported(monkeypatch, n, dtype, config):
    """Too much shared memory, a slice that is not whole, one block a row, 32 of them."""
    monkeypatch.setattr(dispatch.persistent_configuration, "trial", {"THREADS": 512, "EACH": 32, "PER_SM": 1})
    with compiling_for(90, lambda *kernel: None):
        assert "whole slices" in dispatch.persistent_unsupported(call_of(n, dtype, config))


FORWARD = [  # operator, dtype, columns, sm, kernel
    ("layer_norm", FP32, 2**18, 90, "cuda-persistent"),
    ("layer_norm", FP32, 2**18, 100, "cuda"),  # measured on sm_90 alone
    ("layer_norm", FP32, 2**17, 90, "cuda"),
    ("layer_norm", BF16, 2**18, 90, "cuda"),
    ("add_layer_norm", FP32, 2**17, 90, "cuda-persistent"),
    ("add_layer_norm", FP32, 2**18, 90, "cuda"),
    ("add_layer_norm", FP16, 2**17, 90, "cuda-persistent"),
    ("add_layer_norm", BF16, 2**18, 90, "cuda-persistent"),
    ("add_layer_norm", BF16, 2**17 + 8, 90, "cuda"),  # no whole slices
    ("add_layer_norm", BF16, 2**16, 90, "cuda"),
    ("rms_norm", FP32, 2**18, 90, "cuda"),
    ("rms_norm", FP32, 2**14, 90, "cuda"),
    ("rms_norm", FP32, 2**14 - 8, 90, "triton"),
    ("rms_norm", FP32, 2**14 + 1, 90, "triton"),  # rows that do not end on 16 bytes
    ("rms_norm", BF16, 2**19 + 8, 90, "triton"),
    ("rms_norm", FP32, 2**18, 80, "triton"),
]
BACKWARD = [
    ("rms_norm", FP32, 512, 90, "cuda"),
    ("rms_norm", FP32, 256, 90, "triton"),
    ("layer_norm", FP32, 256, 90, "triton"),
    ("layer_norm", BF16, 256, 90, "cuda"),
    ("add_rms_norm", FP32, 256, 90, "cuda"),
    ("add_rms_norm", FP32, 248, 90, "triton"),
    ("rms_norm", FP32, 2**17, 90, "cuda"),
    ("rms_norm", FP32, 2**17 + 8, 90, "triton"),
    ("rms_norm", BF16, 2**18, 90, "cuda"),
    ("add_rms_norm", FP32, 2**17, 90, "triton"),  # no ring holds three tensors
    ("layer_norm", BF16, 4096, 80, "triton"),
]


@pytest.mark.parametrize(
    ("direction", "operator", "dtype", "n", "sm", "kernel"),
    [("forward", *row) for row in FORWARD] + [("backward", *row) for row in BACKWARD],
)
def test_the_tables_choose(direction, operator, dtype, n, sm, kernel):
    x, weight = torch.empty(64, n, dtype=dtype, device="meta"), torch.empty(n, dtype=dtype, device="meta")
    arguments = (x, *[x] * operator.startswith("add"), weight, *[weight] * ("layer" in operator))
    with compiling_for(sm, lambda *kernel: None):
        assert ops.explain(operator, *arguments, direction=direction).implementation == kernel


def test_both_directions_are_explained_where_pytorch_computes():
    x, weight = torch.empty(0, 8, device="meta"), torch.randn(8, device="meta")
    for operator, arguments in (("rms_norm", (x, weight)), ("add_layer_norm", (x, x)), ("group_norm", (x, 2))):
        for direction in ("forward", "backward"):
            assert ops.explain(operator, *arguments, direction=direction).implementation == "torch"


@pytest.mark.parametrize(("dtype", "n", "config", "added", "tiles", "warps", "programs"), [  # of a multiprocessor
    (BF16, 157, LAYER, False, (128, 32), 1, 28), (BF16, 193, LAYER, False, (256, 0), 1, 12),
    (BF16, 160, LAYER, False, (256, 0), None, None),  # whole vectors
    (BF16, 595, RMS, True, (512, 128), 1, 12), (BF16, 595, LAYER, True, (512, 128), 1, 9),
    (BF16, 1109, RMS, False, (1024, 128), 4, 6), (BF16, 1109, RMS, True, (1024, 128), 4, 5),
    (BF16, 1109, LAYER, True, (1024, 128), 4, 4), (BF16, 1153, RMS, False, (2048, 0), 4, 6),
    (FP32, 2103, LAYER, True, (2048, 64), 8, 2), (FP32, 2305, RMS, False, (4096, 0), None, None),
    (FP32, 157, RMS, False, (256, 0), 2, 8),
])  # fmt: skip
def test_gradients_of_rows_in_pieces_hold_them_in_two_tiles(dtype, n, config, added, tiles, warps, programs):
    with compiling_for(90, lambda *kernel: None):
        x = torch.empty(10**5, n, dtype=dtype, device="meta")
        plan = dispatch.BACKWARD.kernel("triton").of((x, x, x, x[0]), 1e-6, config, added).launch
    assert (plan.constants["BLOCK"], plan.constants["TAIL"]) == tiles
    assert warps is None or (plan.num_warps, plan.grid) == (warps, (4 * programs,))

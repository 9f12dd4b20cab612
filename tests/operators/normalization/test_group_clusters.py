"""GroupNorm by clusters on the CPU emulator; what its gradient compiles to, holds and declines; which row of the tables a call
takes."""

import dataclasses

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import (
    BF16,
    FP16,
    FP32,
    FRAME,
    Launched,
    Suite,
    first_difference,
    frame_is_whole,
    framed,
    job,
    tensor_of,
)
from emulated import *  # noqa: F403
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import names, sass

from weft import ops
from weft.definition import SHARED_LIMIT, Declined
from weft.operators.configs import bucket
from weft.operators.cuda import CudaPlan
from weft.operators.launch import compiling_for
from weft.operators.normalization.group_norm import dispatch


@dataclasses.dataclass(frozen=True)
class Case:
    """x [b, c, space] in groups, on blocks of at most so many threads."""

    dtype: torch.dtype = BF16
    b: int = 2
    c: int = 6
    groups: int = 2
    space: int = 1024
    weight: torch.dtype | None = BF16
    summed: bool = True
    threads: int = 64
    each: int = 32
    offset: float = 0.0

    @property
    def n(self) -> int:
        return self.c // self.groups * self.space


CASES = {
    "a block, pieces of several channels": Case(b=3, c=16, space=264, threads=128),
    "a cluster of two, a channel in both": Case(),
    "a cluster of four, one channel": Case(FP16, c=2, space=4096, weight=FP32, threads=32, offset=10),
    "a cluster of two, ends within vectors of a warp": Case(c=2, b=3, space=3144),
    "fp32, a cluster of four": Case(FP32, b=1, c=8, groups=1, space=260, weight=FP32, threads=64, each=12, offset=10),
    "half as many elements a thread": Case(b=1, c=20, space=208, each=16, threads=96),
    "no weight": Case(b=1, space=696, weight=None),
    "no sums": Case(b=1, space=696, summed=False),
}

SEVERAL, TWO, FOUR, ENDS, LONG = list(CASES)[:5]
MISTAKES = {
    "shares of full blocks": (ENDS, "u32 first = min(rank * share,", "u32 first = min(rank * THREADS * EACH,"),
    "a slice too long": (
        TWO,
        "u32 first = min(rank * share, length), end = min(first + share,",
        "u32 first = min(rank * share, length), end = min(first + THREADS * EACH,",
    ),
    "elements past the end": (
        ENDS,
        "if (after(v) >= int(end - mine)) continue;  // the branch also keeps",
        "// the branch also keeps",
        "    if (after(v) >= int(end - mine)) continue;\n    of_x",
        "    of_x",
    ),
    "a store past the end": (ENDS, "    store<T, COUNT>(dx +", "    store<T, COUNT>(dx + PIECE +"),
    "one channel a piece": (SEVERAL, "start += S, c++", "start = to, c++"),
    "a piece's first weight for all": (SEVERAL, "mine + after(v) >= edge;", "false;"),
    "weights of the first group": (SEVERAL, "w[row % G * CG +", "w["),
    "sums without weights": (SEVERAL, "of_warp.x += k * own.x", "of_warp.x += own.x"),
    "two pieces' sums in one place": (SEVERAL, "of_channel[warp + c - channel]", "of_channel[c - channel]"),
    "a channel's first piece only": (TWO, "piece <= (high - 1) / PIECE", "piece <= low / PIECE"),
    "a block's sums over another's": (FOUR, "start < first ? rank - start / share : 0", "0"),
    "slots left as they were": (TWO, "while (++before < SLOTS)", "while (false)"),
    "a slot too many": (FOUR, "while (++before < SLOTS)", "while (++before <= SLOTS)"),
    "zeros over the next block's sums": (FOUR, "if (start + S > end) continue;", ""),
    "the next entry's sums": (SEVERAL, "i64(row) * CG +", "i64(row % G) * CG +"),
    "mean left in": (FOUR, "((a[i] - middle) * scale)", "(a[i] * scale)"),
    "mean left in dx": (FOUR, "((a[i] - middle) * along", "(a[i] * along"),
    "level left out, fp32": (LONG, "(a[i] - middle) * along + level", "(a[i] - middle) * along"),
    "the other blocks are not waited for": (FOUR, "    barrier_wait(&shared.told);\n", ""),
    "sums before the block has met": (SEVERAL, "= of_warp;\n    __syncthreads();", "= of_warp;"),
    "weights before they are there": (SEVERAL, "+ i]);\n    __syncthreads();", "+ i]);"),
}


def gradient_of(x, dy, like, *options):
    """The plan of ``gradient.cu``; raises Declined where it does not take these."""
    with compiling_for(90, lambda *kernel: None):
        return dispatch.BACKWARD.kernel("cuda").of((x, dy, like), *options)


class Gradients(Launched):
    cpp = """
const Any x{job.buffers[0]}, dy{job.buffers[1]}, w{job.buffers[2]}, mean{job.buffers[3]}, rstd{job.buffers[5]},
    dx{static_cast<char *>(job.buffers[4]) + 64}, dw{static_cast<char *>(job.buffers[8]) + 64},
    db{static_cast<char *>(job.buffers[8]) + 64 + job.scales[0]};
job.run([&] { KERNEL(x, dy, w, mean, rstd, dx, dw, db, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        shape = case.b, case.c, case.space
        self.x = (torch.randn(shape, generator=g) + case.offset).to(case.dtype)
        self.dy = (torch.randn(shape, generator=g) + 0.5).to(case.dtype)
        self.weight = None if case.weight is None else torch.randn(case.c, generator=g).to(case.weight)
        like = self.x if self.weight is None else self.weight
        rows = self.x.double().view(case.b * case.groups, -1)
        self.mean = rows.mean(1).float()
        self.rstd = (rows.var(1, correction=0) + 1e-5).rsqrt().float()
        launches = []
        patch.setattr(dispatch.gradient_configuration, "trial", {"THREADS": case.threads, "EACH": case.each})
        patch.setattr(dispatch.row_cluster, "SHORTEST", 1)
        made = gradient_of(self.x, self.dy, like, case.groups, self.weight is not None, case.summed)
        patch.setattr(CudaPlan, "__call__", lambda plan, *tensors: launches.append((plan, tensors)))
        made.total = lambda partial, dweights: launches.append((partial, dweights))
        dx, dweights = torch.empty_like(self.x), torch.empty(2, case.c)
        made(self.x, self.dy, like, self.mean, self.rstd, dx, dweights)
        (plan, tensors), *total = launches
        given = (self.x, self.dy, like, self.mean, self.rstd, dx)
        assert all(a is b for a, b in zip(tensors, given, strict=False))
        assert len(total) == case.summed
        self.partial = total[0][0] if total else torch.empty(2, 0)
        return plan

    def job(self) -> bytes:
        read = {0: self.x, 1: self.dy, 2: self.x if self.weight is None else self.weight, 3: self.mean, 5: self.rstd}
        frame, not_numbers = framed(0)[:FRAME], bytes([0xFF]) * self.partial.nbytes
        buffers = {**read, 4: framed(self.x.nbytes), 8: frame + not_numbers + frame}
        return job(self.plan, self.seed, buffers, scales=(self.partial.nbytes // 2,), static=True)

    def what_is_wrong(self, found: bytes) -> str:
        case, size = self.case, self.x.nbytes + 2 * FRAME
        if not (frame_is_whole(found[:size]) and frame_is_whole(found[size:])):
            return "something is written beside the results"
        dx = tensor_of(found[FRAME : size - FRAME], case.dtype).view(self.x.shape)
        x, dy = self.x.double(), self.dy.double()
        grouped = (case.b, case.groups, -1)
        mean, rstd = (t.double().view(case.b, case.groups, 1) for t in (self.mean, self.rstd))
        xhat = ((x.view(grouped) - mean) * rstd).view(x.shape)
        g = dy if self.weight is None else dy * self.weight.double()[:, None]
        level, along = (t.view(grouped).mean(2, keepdim=True) for t in (g, g * xhat))
        want = (rstd * (g.view(grouped) - level - xhat.view(grouped) * along)).view(x.shape)
        checked = [("dx", dx, want, {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}[case.dtype])]
        if case.summed:
            sums = tensor_of(found[size + FRAME : -FRAME], FP32).view(2, -1, case.c).double().sum(1)
            right = (dy * xhat).sum((0, 2)), dy.sum((0, 2))
            checked += [(name, *pair, 2.0**-20) for name, *pair in zip(("dw", "db"), sums, right, strict=True)]
        return first_difference(checked, 2.0**-18)


ROWS, CHANNELS, SPACE = 48, 4, 640  # groups, and what each has

FORWARD_CASES = {"fp32": FP32, "fp16": FP16}
FORWARD_MISTAKES = {
    "about one lane's mean": ("fp32", "constexpr bool TWICE = sizeof(T) == 4;", "constexpr bool TWICE = false;")
}

TYPICAL = 4e-9  # deviations that a mean in fp32 errs by, the root of the squares' mean over groups


class Norms(Launched):
    """Groups of normally distributed numbers, on clusters of two blocks."""

    cpp = """
const Any x{job.buffers[0]}, w{job.buffers[1]}, b{job.buffers[2]}, y{static_cast<char *>(job.buffers[4]) + 64},
    mean{static_cast<char *>(job.buffers[8]) + 64}, rstd{static_cast<char *>(job.buffers[8]) + 64 + job.scales[0]};
job.run([&] { KERNEL(x, w, b, y, mean, rstd, SCALARS); });
"""

    def planned(self, dtype: torch.dtype, g: torch.Generator, patch) -> CudaPlan:
        self.x = torch.randn((ROWS, CHANNELS, SPACE), generator=g).to(dtype)
        self.weight, self.bias = torch.randn((2, CHANNELS), generator=g).to(dtype)
        patch.setattr(dispatch.cluster_configuration, "trial", {"THREADS": 128, "EACH": 16})
        plans = dispatch.FORWARD.kernel("cuda")
        return plans.of((self.x, self.weight, self.bias), 1, 1e-5, True, True, True, dtype)

    def job(self) -> bytes:
        read = {0: self.x, 1: self.weight.clone(), 2: self.bias.clone()}
        buffers = {**read, 4: framed(self.x.nbytes), 8: framed(8 * ROWS)}
        return job(self.plan, self.seed, buffers, scales=(4 * ROWS,), static=True)

    def what_is_wrong(self, found: bytes) -> str:
        size = self.x.nbytes + 2 * FRAME
        if not (frame_is_whole(found[:size]) and frame_is_whole(found[size:])):
            return "something is written beside the results"
        x = self.x.double().flatten(1)
        mean, rstd = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
        saved = tensor_of(found[size + FRAME : -FRAME], FP32).view(2, ROWS, 1).double()
        want = ((x - mean) * rstd).view(self.x.shape) * self.weight.double()[:, None] + self.bias.double()[:, None]
        y = tensor_of(found[FRAME : size - FRAME], self.x.dtype).view(self.x.shape).double()
        if not torch.allclose(y, want, rtol=2e-3 if self.x.dtype == FP16 else 2e-6, atol=2e-6):
            return f"y errs by {(y - want).abs().max():.2g}"
        error = ((saved[0] - mean) * rstd).abs()
        worst, typical = error.max().item(), error.square().mean().sqrt().item()
        if self.x.dtype == FP32 and typical > TYPICAL:
            return f"fp32 means err by {typical:.2g} of a deviation, at worst by {worst:.2g}"
        return "" if torch.allclose(saved[1], rstd, rtol=2e-6) else "deviations err"


SUITES = {
    kernel: Suite(cuda_as_cpp.whole(dispatch.HERE / f"{kernel}.cu", "moments.cuh", "rows.cuh"), *suite)
    for kernel, suite in (
        ("cluster", (Norms, FORWARD_CASES, FORWARD_MISTAKES)),
        ("gradient", (Gradients, CASES, MISTAKES)),
    )
}


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "space"), [(2048, 256), (20480, 1024), (25088, 3136), (65536, 65536), (122880, 4096)])
def test_shares_cover_a_group_and_fit(n, space, dtype):
    found = list(dispatch.gradient_candidates(90, dtype, bucket(n)))
    assert dispatch.gradient_heuristic(90, dtype, n) in found
    for c in found:
        if n > dispatch.MAX_CLUSTER * c["THREADS"] * c["EACH"]:
            continue
        s = dispatch.spread(n, space, dtype, c)
        assert s.blocks * s.share >= n and s.share <= s.threads * c["EACH"]
        assert s.threads <= c["THREADS"] and s.blocks <= 16
        touched = [[at // s.share for at in (c * space, (c + 1) * space - 1)] for c in range(n // space)]
        assert s.slots == max(last - first + 1 for first, last in touched)
        assert s.shared <= SHARED_LIMIT[90] - cuda_as_cpp.STATIC


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("e", "each", "most"), [("bf16, bf16, 512", 32, 37), ("fp16, float, 320", 32, 37), ("float, float, 480", 12, 70)]
)
def test_nothing_is_spilled_and_an_element_takes_few_instructions(e, each, most):
    """Of a thread on sm_90 in all; of 16-bit floats there is time for about 40 at the ceiling, of 32-bit ones for 80."""
    code = names(sass(dispatch.HERE / "gradient.cu", f"group_norm_gradient<{e}, {each}, true, true>"))
    assert len(code) / each <= most
    vectors = each * (4 if "float, float" in e else 2) // 16
    assert [sum(i.startswith(way) and "128" in i for i in code) for way in ("LDG", "STG")] == [2 * vectors, vectors]


X = torch.empty(2, 4, 1024, dtype=BF16, device="meta")
REFUSED = [
    bad(gradient_of, Declined, "contiguous tensors", X, X.transpose(1, 2).contiguous().transpose(1, 2), X, 1, False, True),
    bad(gradient_of, Declined, "below 2048", X, X, X, 4, False, True),
    bad(gradient_of, Declined, "weight", X, X, torch.empty(8, dtype=BF16, device="meta")[::2], 1, True, True),
    *(bad(gradient_of, Declined, words, x, x, x, 1, False, True) for words, x in (
        ("channels of 64", torch.empty(2, 64, 64, dtype=BF16, device="meta")),
        ("multiples of 16 bytes", torch.empty(2, 8, 1001, dtype=BF16, device="meta")),
        ("196608", torch.empty(1, 1, 2**18, device="meta")))),
]  # fmt: skip


@pytest.mark.parametrize(("direction", "dtype", "sm", "elements", "kernel"), [
    *(("forward", dtype, 90, 2048, "triton") for dtype in (FP16, BF16, FP32)),
    *(("forward", dtype, 90, 10240, "cuda") for dtype in (FP16, BF16, FP32)),
    *(
        ("forward", dtype, 90, 40960, kernel)
        for dtype, kernel in ((FP16, "cuda"), (BF16, "cuda"), (FP32, "triton"))
    ),
    *(("forward", dtype, 90, 65536, "cuda") for dtype in (FP16, BF16, FP32)),
    ("forward", BF16, 80, 65536, "triton"),
    ("backward", BF16, 90, 8192, "cuda"),
    ("backward", FP16, 90, 122880, "cuda"),
    ("backward", BF16, 90, 262144, "triton"),  # not measured
    ("backward", BF16, 80, 40960, "triton"),
    ("backward", FP32, 90, 40960, "cuda"),
    ("backward", FP32, 90, 65536, "triton"),  # slower
])  # fmt: skip
def test_the_tables_take_clusters_where_they_were_faster(direction, dtype, sm, elements, kernel):
    with compiling_for(sm, lambda *kernel: None):
        x = torch.empty(2, 4 * elements // 2048, 2048, dtype=dtype, device="meta")
        assert ops.explain("group_norm", x, 4, direction=direction).implementation == kernel


@pytest.mark.parametrize(("shape", "groups", "dtype", "first"), [
    ((64, 64, 1024), 8, BF16, True), ((64, 64, 1024), 8, FP32, False),  # 16 bytes of channels a group, 32
    ((64, 64, 1024), 64, FP32, True), ((2, 64, 1024), 64, FP32, False),  # few elements
    ((2**14, 256, 1), 64, FP32, False),  # a space of one element: neighbouring groups are one stretch
])  # fmt: skip
def test_slivers_of_channels_have_statistics_of_channels_first(shape, groups, dtype, first, monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETING", False)
    x = torch.empty(shape, dtype=dtype, device="meta")
    with compiling_for(90, lambda *kernel: None):
        for t, sliver in ((x, False), (x.mT.contiguous().mT, first)):
            assert (ops.explain("group_norm", t, groups).reason == dispatch.SLIVERS) == sliver


def test_a_gradient_that_it_declines_is_tritons():
    x = torch.empty(2, 320, 4096, dtype=BF16, device="meta")
    with compiling_for(90, lambda *kernel: None):
        for dy in (x.float(), x.transpose(1, 2).contiguous().transpose(1, 2)):
            assert dispatch.BACKWARD.choose(x, dy, x, 32, False, True).implementation == "triton"
        assert dispatch.BACKWARD.choose(x, x, x, 32, False, True).implementation == "cuda"

"""The gradient of dropout + residual + RMSNorm on the CPU emulator; what it compiles to, holds and declines."""

import dataclasses
import re

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, FP32, Launched, Suite, first_difference, job, tensor_of
from emulated import *  # noqa: F403
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import names, parts, sass

from weft import ops
from weft.definition import SHARED_LIMIT, Declined
from weft.operators import cuda
from weft.operators.cuda import CudaPlan, compile_cubin
from weft.operators.dropout import dispatch
from weft.operators.dropout.philox import WORD, at_least, words
from weft.operators.dropout.seeds import scale_of
from weft.operators.launch import compiling_for
from weft.operators.normalization import ring

EPS = 1e-6
SEED, OFFSET = 0x9E3779B97F4A7C15, 0x3243F6A8885A308D  # of 64 bits, whose words all count
CONFIG = {"THREADS": 32, "EACH": 8, "ROWS": 2, "STAGES": 3, "PER_SM": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows [m, n] on so many multiprocessors; random bits below the threshold are dropped (0: just the first element's are)."""

    dtype: torch.dtype = BF16
    m: int = 13
    n: int = 256
    weight: torch.dtype = BF16
    threshold: int = 2**14
    in_memory: bool = False
    apart: int = 0  # elements between two rows of dy and dh
    sms: int = 2
    config: tuple[tuple[str, int], ...] = ()


CASES = {
    "two warps": Case(n=504, config=(("THREADS", 64),)),
    "a cluster of two blocks": Case(m=11, n=488, sms=4, config=(("ROWS", 1),)),
    "four rows, all but dropped": Case(FP16, 14, weight=FP16, threshold=2**16 - 9, config=(("ROWS", 4),)),
    "a seed in memory, rows apart": Case(m=9, in_memory=True, apart=8, config=(("ROWS", 1), ("STAGES", 4))),
    "fp32": Case(FP32, 7, 256, FP32, sms=3, config=(("EACH", 8), ("ROWS", 1))),
    "fp32, a cluster": Case(FP32, 5, 320, FP32, sms=4, config=(("THREADS", 64), ("EACH", 4), ("ROWS", 2))),
    "a float32 weight, all dropped": Case(m=3, n=272, weight=FP32, threshold=2**16, config=(("EACH", 16),)),
    "a row, the first element just dropped": Case(m=1, threshold=0),
}  # fmt: skip

CLUSTER = "a cluster of two blocks"
MISTAKES = {
    "the mask of the next group": ("two warps", "philox(u64(element) / 8,", "philox(u64(element) / 8 + 1,"),
    "a row's mask for the next": ("two warps", "(row + r) * N + first + at(v)),", "row * N + first + at(v)),"),
    "a block's mask for the next": (CLUSTER, "(row + r) * N + first + at(v)),", "(row + r) * N + at(v)),"),
    "halves exchanged": ("two warps", "i % 2 ? word[i / 2] : word[i / 2] << 16", "i % 2 ? word[i / 2] << 16 : word[i / 2]"),
    "the lower half decides": ("four rows, all but dropped", "word[i / 2] : word[i / 2] << 16", "word[i / 2] : word[i / 2]"),
    "one pattern too few": ("a row, the first element just dropped", "bits <= last ?", "bits <= last - 0x10000 ?"),
    "dropped is kept": ("two warps", "? 0.f : gradient[i]", "? gradient[i] : 0.f"),
    "not scaled": ("two warps", "gradient[i]) * scale", "gradient[i])"),
    "the first half of a group twice": ("fp32", "COUNT == 4 && element % 8", "false"),
    "the seed's upper word": ("two warps", "{u32(seed), u32(seed >> 32)}", "{u32(seed), 0}"),
    "the offset's upper word": ("two warps", "c[3] = u32(offset >> 32)", "c[3] = 0"),
    "nine rounds": ("two warps", "round < 10; round++) {\n    const", "round < 9; round++) {\n    const"),
    "the seed in memory": ("a seed in memory, rows apart", "SEED_IN_MEMORY ? *seed_at : seed", "seed"),
    "a round's key for the other word": ("two warps", "c[3] ^ keys.word[round][1]", "c[3] ^ keys.word[round][0]"),
    "a row written over another": ("two warps", "(dx + (row + r) * dx_row", "(dx + row * dx_row"),
    "dh left out": ("two warps", "if constexpr (MORE) a[i] += m[i];", ""),
    "rows past the last": ("two warps", "if (ROWS > 1 && row + r >= M) break;", ""),
    "sums of a copy in flight": ("two warps", "phase_wait(&full[g.slot], g.parity);", ""),
    "the other block's sums are there": (CLUSTER, "phase_wait(&received[box], group.turn / AHEAD & 1);", ""),
    "no zeros behind a slice": ("two warps", "ring[s * SLICE + i] = T{};", ";"),
    "a slot refilled too early": (
        "two warps",
        "group.index + (STAGES - 1) * step, group.slot ? group.slot - 1 : STAGES - 1",
        "group.index + STAGES * step, group.slot",
    ),
    "a block leaves early": (CLUSTER, "if (blocks > 1) {  // no block leaves", "if (false) {  // no block leaves"),
}  # fmt: skip


def gradient_of(h, dy, dh, weight, in_memory):
    """The plan of ``dropped_backward.cu``; raises Declined where it does not take these."""
    with compiling_for(90, lambda *kernel: None):
        return dispatch.BACKWARD.kernel("cuda").of((h, dy, dh, weight), EPS, in_memory)


class Gradients(Launched):
    cpp = """
const Any h{job.buffers[0]}, dy{job.buffers[1]}, dh{job.buffers[2]}, w{job.buffers[3]}, seed_at{job.buffers[5]},
    dw{job.buffers[8]}, dr{job.buffers[4]}, dx{static_cast<char *>(job.buffers[4]) + job.scales[0]};
machine.stays = true;
job.run([&] { KERNEL(h, dy, dh, w, dr, dw, dx, seed_at, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        def rows(apart: int) -> torch.Tensor:
            return torch.randn(case.m, case.n + apart, generator=g).to(case.dtype)[:, : case.n]

        self.h, self.dy, self.dh = rows(0), rows(case.apart), rows(case.apart)
        self.weight = torch.randn(case.n, generator=g).to(case.weight)
        self.key = (SEED + self.seed) % 2**64
        self.held = torch.tensor([self.key - 2**64 if self.key >= 2**63 else self.key])
        counter = tuple(torch.tensor(c) for c in (0, 0, OFFSET & WORD, OFFSET >> 32))
        first = words(counter, (self.key & WORD, self.key >> 32))
        self.threshold = case.threshold or int(first[0] & 0xFFFF) + 1
        launches = []
        patch.setattr(cuda, "multiprocessors", lambda device: case.sms)
        patch.setattr(dispatch.configuration, "trial", {**CONFIG, **dict(case.config)})
        made = gradient_of(self.h, self.dy, self.dh, self.weight, case.in_memory)
        patch.setattr(CudaPlan, "__call__", lambda plan, *tensors: launches.append((plan, tensors)))
        made.total = lambda partial, dw: None
        dr, dx, dw = torch.empty_like(self.h), torch.empty_like(self.h), torch.empty_like(self.weight)
        numbers = 0 if case.in_memory else self.key, OFFSET, self.threshold * 2**16 - 1, scale_of(self.threshold)
        made(self.h, self.dy, self.dh, self.weight, dr, dx, dw, self.held if case.in_memory else self.h, *numbers)
        ((plan, tensors),) = launches
        given = (self.h, self.dy, self.dh, self.weight, dr, tensors[5], dx, self.held if case.in_memory else self.h)
        assert len(tensors) == 8 and all(a is b for a, b in zip(tensors, given, strict=True))
        self.sums = tensors[5]
        return plan

    def job(self) -> bytes:
        read = {0: self.h, 1: self.dy, 2: self.dh, 3: self.weight, 5: self.held}
        buffers = {**read, 4: bytes([0xA5]) * (2 * self.h.nbytes), 8: bytes([0xA5]) * self.sums.nbytes}
        m, n, dy_row, dh_row, eps, *numbers = (s.value for s in self.plan.scalars)
        shape = (m, n, dy_row, dh_row, *(v - 2**64 if v >= 2**63 else v for v in numbers[:3]))
        factors = (eps, numbers[3])
        return job(self.plan, self.seed, buffers, shape=shape, scales=(self.h.nbytes,), factors=factors, static=True)

    def what_is_wrong(self, found: bytes) -> str:
        case, size = self.case, self.h.nbytes
        dr, dx = (tensor_of(found[at : at + size], case.dtype).view(case.m, case.n) for at in (0, size))
        dw = tensor_of(found[2 * size :], FP32).view(self.sums.shape).double().sum(0)
        h, dy = self.h.double(), self.dy.double()
        rstd = (h.square().mean(1, keepdim=True) + EPS).rsqrt()
        xhat, g = h * rstd, dy * self.weight.double()
        want = self.dh.double() + rstd * (g - xhat * (g * xhat).mean(1, keepdim=True))
        keep = at_least((case.m, case.n), self.held, OFFSET, self.threshold, torch.device("cpu"))
        if bool((dx[~keep] != 0).any()):
            return "what was dropped has a gradient"
        rounding = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-22}
        masked = torch.where(keep, want * scale_of(self.threshold), 0.0)
        near = rounding[case.dtype]
        return first_difference(
            [("dr", dr, want, near), ("dx", dx, masked, near), ("dw", dw, (dy * xhat).sum(0), rounding[FP32])], 2.0**-20
        )


TEXT = cuda_as_cpp.whole(dispatch.SOURCE, "rows.cuh", "philox.cuh")
SUITES = {"dropped_backward.cu": Suite(TEXT, Gradients, CASES, MISTAKES)}


WIDTHS = (256, 1024, 2048, 4096, 8192, 16384, 32768)


@pytest.mark.parametrize("sm", [90, 100, 120])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("n", WIDTHS)
def test_every_configuration_fits_with_its_third_tensor(n, dtype, sm):
    found = list(dispatch.candidates(sm, dtype, n))
    assert dispatch.heuristic(sm, dtype, n) in found
    for c in found:
        cluster, rows, stages, shared = ring.layout(sm, c, dtype, n, 3, dtype.itemsize)
        assert (rows, stages) == (c["ROWS"], c["STAGES"]) and cluster * c["THREADS"] * c["EACH"] >= n and cluster <= 16
        assert c["PER_SM"] * (shared + ring.own_bytes(rows, c["THREADS"])) <= SHARED_LIMIT[sm] + ring.SYSTEM
        assert 256 <= c["PER_SM"] * c["THREADS"] <= 1024


def plan_of(n: int, dtype: torch.dtype, m: int = 1024, seed_in_memory: bool = False):
    h = torch.empty(m, n, dtype=dtype, device="meta")
    with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
        patch.setattr(cuda, "multiprocessors", lambda device: 132)
        c = dispatch.GradientCall(h, h, h, h[0], EPS, seed_in_memory)
        return ring.all_clusters(dispatch._one_cluster(c), h)[0]


@pytest.mark.share(12)
@pytest.mark.parametrize("seed_in_memory", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [(BF16, 27), (FP32, 37)])
@pytest.mark.parametrize("n", WIDTHS[1:])
def test_nothing_is_spilled_and_an_element_takes_few_instructions(n, dtype, most, seed_in_memory):
    """Of a thread on sm_90, from shared memory to both gradients; at the ceiling there is time for about 70 of 16-bit floats in
    all, and for twice as many of 32-bit ones."""
    plan = plan_of(n, dtype, seed_in_memory=seed_in_memory)
    found = parts(sass(plan.source, plan.expression))
    writers = [names(p) for p in found if sum("IMAD.WIDE" in i for i in names(p)) > 15]
    _, each, rows, *_ = map(int, re.findall(r", (\d+)", plan.expression))
    vectors = rows * each * dtype.itemsize // 16
    assert sum("STG.E.128" in i for part in writers for i in part) == 2 * vectors, "a vector and its mask, unrolled"
    assert sum(map(len, writers)) / (rows * each) <= most


@pytest.mark.parametrize("e", ["bf16, bf16, 256, 16, 2, 4, 1, false", "float, float, 512, 8, 1, 4, 1, true"])
def test_it_compiles_for_blackwell(e):
    for sm in (100, 120):
        assert compile_cubin(dispatch.SOURCE, f"dropped_norm_backward<{e}>", sm)[0]


H = torch.ones(2, 512, dtype=BF16)
REFUSED = [
    *(bad(gradient_of, Declined, words, h, h, h, h[0], False) for words, h in (
        ("multiples of 8", torch.ones(2, 516)), ("strides (1, 8)", torch.ones(8, 512).T.contiguous().T),
        ("up to 32768", torch.empty(2, 2**16, device="meta")), ("248 columns", torch.ones(2, 248, dtype=BF16)))),
    bad(gradient_of, Declined, "16 bytes", H, torch.ones(2 * 512 + 1, dtype=BF16)[1:].view(2, 512), H, H[0], False),
    bad(gradient_of, Declined, "16 bytes", H, H, torch.ones(512, 2, dtype=BF16).T, H[0], False),
    bad(gradient_of, Declined, "weight", H, H, H, torch.ones(513, dtype=BF16)[1:], False),
]  # fmt: skip


@pytest.mark.parametrize(("sm", "n", "kernel"), [(90, 4096, "cuda"), (80, 4096, "triton"), (90, 104, "triton")])
def test_the_table_takes_it_where_it_can(sm, n, kernel):
    x, weight = torch.empty(64, n, dtype=BF16, device="meta"), torch.empty(n, dtype=BF16, device="meta")
    with compiling_for(sm, lambda *kernel: None):
        assert ops.explain("dropout_add_rms_norm", x, x, weight).implementation == "triton"
        found = ops.explain("dropout_add_rms_norm", x, x, weight, direction="backward")
    assert found.implementation == kernel

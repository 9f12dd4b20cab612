"""Scans down columns on the CPU emulator; what they compile to, decline, and are chosen for."""

import dataclasses
import functools
from collections.abc import Callable

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, FP32, FRAME, Launched, Suite, difference, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import longest_loop, spills_nothing
from scan_on_cpu import VALUES, further_off_than_a_logarithm

from weft import ops
from weft.definition import ARCHITECTURES, Declined
from weft.operators.axis_view import AxisView
from weft.operators.cuda import CudaPlan
from weft.operators.launch import compiling_for
from weft.operators.scan import dispatch, kernels
from weft.operators.scan.cumprod import scan as product
from weft.operators.scan.cumsum import scan as running_sum
from weft.operators.scan.dispatch import FORWARD, Scan
from weft.operators.scan.kernels import ScanInParts
from weft.operators.scan.logcumsumexp import scan as logarithm

SCANS = {"sum": running_sum, "product": product, "logarithm": logarithm}


@dataclasses.dataclass(frozen=True)
class Case:
    """[m, n, k] along n, ``apart`` elements between two rows; ``step``: "TOTALS" or "CARRIED" of parts of n.

    Args:
        scan: the operator's.
        total: of rows along a dimension, in PyTorch.
        further_off: an empty string, or where results are further off than the operator allows.
    """

    scan: Scan
    total: Callable[..., torch.Tensor]
    further_off: Callable[[torch.Tensor, torch.Tensor], str]
    dtype: torch.dtype = BF16
    m: int = 2
    n: int = 150
    k: int = 48
    reverse: bool = False
    exclusive: bool = False
    values: str = "normal"
    apart: int = 0
    step: str = ""
    across: int = 4
    rows: int = 2
    threads: int = 64


class Columns(Launched):
    cpp = """
const Any x{job.buffers[0]}, carry{job.buffers[1]}, y{static_cast<char *>(job.buffers[4]) + FRAME}, totals{job.buffers[8]};
job.run([&] { KERNEL(x, carry, y, totals, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        scan, values = case.scan, torch.randn(case.m * case.k, case.n, generator=g)
        VALUES[case.values](values)
        memory = torch.full((case.m, case.n, case.k + case.apart), 7.0, dtype=case.dtype)
        self.x = memory[:, :, : case.k]
        self.x.copy_(values.view(case.m, case.k, case.n).transpose(1, 2))
        how = {"exclusive": case.exclusive, "reverse": case.reverse}
        config = {"ACROSS": case.across, "ROWS": case.rows, "THREADS": case.threads}
        patch.setattr(scan.columns, "trial", config)
        patch.setattr(dispatch, "multiprocessors", lambda device: 2 if case.step else 0)
        made = FORWARD.kernel("cuda").of((self.x,), scan, 1, case.exclusive, case.reverse, case.dtype)
        parts = made.shape[1]
        assert (parts > 1) == bool(case.step)
        plan = made.totals if case.step == "TOTALS" else made.scan
        self.right = scan.reference(self.x.double(), 1, **how)
        x = self.x.double().flip(1) if case.reverse else self.x.double()
        each = plan.scalars[2].value
        totals = torch.stack([case.total(x[:, at : at + each], dim=1) for at in range(0, case.n, each)], 1)
        self.totals = totals
        self.carry = scan.reference(totals, 1, exclusive=True).float().contiguous()
        self.beside = self.carry.nbytes * (1 + made.scaled)  # bytes of totals
        return plan

    def job(self) -> bytes:
        y = framed(self.right.numel() * self.x.itemsize)  # y has x's strides
        buffers = {0: self.x, 1: self.carry, 4: y, 8: bytes([0xA5]) * self.beside}
        return job(self.plan, self.seed, buffers, static=True)

    def what_is_wrong(self, found: bytes) -> str:
        y, totals = found[: len(found) - self.beside], found[len(found) - self.beside :]
        if self.case.step == "TOTALS":
            if not frame_is_whole(y, len(y)):
                return "y was written"
            got, *powers = tensor_of(totals, FP32).view(-1, *self.totals.shape)
            return self.case.further_off(got.double() * 2 ** powers[0].double() if powers else got, self.totals)
        if not frame_is_whole(y):
            return "written outside of y"
        return self.case.further_off(tensor_of(y[FRAME:-FRAME], self.case.dtype).view_as(self.right), self.right)


def further_off(got: torch.Tensor, want: torch.Tensor, sums: float = 2**-20) -> str:
    """An empty string, or where a result is further off than rounding it and its parts, ``sums`` of the largest."""
    limit = torch.finfo(got.dtype).eps * want.abs() + sums * want.abs().amax()
    return difference("y", got, want, limit)


Sums = functools.partial(Case, running_sum, torch.sum, further_off)
rounded_often = functools.partial(further_off, sums=2**-17)  # each of a thousand factors rounds
Products = functools.partial(Case, product, torch.prod, rounded_often, values="near one")
Logs = functools.partial(Case, logarithm, torch.logsumexp, further_off_than_a_logarithm)

CASES = {
    "two warps": Sums(),
    "a product": Products(dtype=FP16, k=40),
    "exclusive": Sums(dtype=FP16, exclusive=True, rows=3, apart=8),
    "reversed": Products(dtype=FP32, reverse=True, threads=96, apart=4),
    "both": Sums(reverse=True, exclusive=True, k=8),
    "both, a product": Products(dtype=FP32, reverse=True, exclusive=True, k=12),
    "a warp across": Sums(dtype=FP32, k=132, across=32, m=1),
    "one vector": Sums(dtype=FP32, k=4, n=700, m=1),
    "few rows": Products(m=5, n=3),
    "totals": Sums(n=1100, k=24, m=1, step="TOTALS", reverse=True),
    "totals of products": Products(dtype=FP32, n=1000, k=8, m=1, step="TOTALS"),
    "totals that no float holds": Products(dtype=FP32, n=1000, k=8, m=1, step="TOTALS", values="grows"),
    "carried": Sums(n=1100, k=24, m=1, step="CARRIED", reverse=True, apart=8),
    "carried, exclusive": Products(dtype=FP32, n=1000, k=12, m=1, step="CARRIED", exclusive=True),
}  # fmt: skip

MISTAKES = {
    "groups of a warp": ("two warps", "if (lane >= by) upto[j] = Op::join(other, upto[j]);", ";"),
    "a warp's first group": ("two warps", "lane < ACROSS ? Op::NEUTRAL : other", "other"),
    "warps in no order": ("two warps", "if (w == warp) before[j]", "if (w == 0) before[j]"),
    "steps forgotten": ("two warps", "run[j] = Op::join(run[j], of_warps", "run[j] = Op::join(Op::NEUTRAL, of_warps"),
    "one buffer": ("reversed", "rows -= STEP, step ^= 1,", "rows -= STEP,"),
    "rows of another thread": ("exclusive", "threadIdx.x / ACROSS * ROWS;", "threadIdx.x / ACROSS * 2;"),
    "rows behind the end": ("few rows", "if (u < here) store", "store"),
    "rows that are not there": ("carried", "int left = c.inside ? c.end - c.begin - mine : 0;", "int left = 1 << 30;"),
    "the last row again": ("a product", "upto[j] = u ? Op::join(upto[j], f[j]) : f[j];", "upto[j] = f[j];"),
    "inclusive": ("both", "if (EXCLUSIVE) result[j] = before[j];", ""),
    "columns that are not there": ("two warps", "inside = column < K;", "inside = true;"),
    "another matrix": ("two warps", "m * of_m +", ""),
    "downwards": ("reversed", "x_n = -x_n, y_n = -y_n;", ";"),
    "nothing carried": ("carried", "run[j] = carry[c.unit * K + c.column + j];", ";"),
    "a part too long": ("totals", "end = min(begin + each, N);", "end = N;"),
    "powers of two forgotten": ("totals that no float holds", "power[j] += scaled(run[j]);", "scaled(run[j]);"),
    "never scaled": ("totals that no float holds", "power[j] += scaled(run[j]);", ";"),
    "a part for another": ("totals of products", "totals[c.unit * K", "totals[c.m * K"),
}  # fmt: skip


LOG_CASES = {
    "two warps": Logs(),
    "exclusive": Logs(dtype=FP16, exclusive=True, rows=3, apart=8),
    "reversed": Logs(dtype=FP32, reverse=True, threads=96, apart=4),
    "both": Logs(reverse=True, exclusive=True, k=8),
    "a warp across": Logs(dtype=FP16, k=264, across=32, m=1),
    "one vector": Logs(dtype=FP32, k=4, n=700, m=1),
    "far apart": Logs(values="far apart", n=300, k=24),
    "far apart, both": Logs(dtype=FP32, values="far apart", reverse=True, exclusive=True),
    "a step": Logs(dtype=FP32, values="a step", apart=12, exclusive=True),
    "a short step": Logs(m=1, n=24, k=8, values="a step", across=1),
    "not finite": Logs(m=1, k=8, n=220, values="not finite"),
    "not finite, both": Logs(dtype=FP32, k=4, n=420, values="not finite", reverse=True, exclusive=True),
    "huge": Logs(dtype=FP32, k=4, values="huge"),
    "totals": Logs(n=1100, k=24, m=1, step="TOTALS", reverse=True),
    "carried": Logs(n=1100, k=24, m=1, step="CARRIED", reverse=True, apart=8),
    "carried, exclusive": Logs(dtype=FP32, n=1000, k=12, m=1, step="CARRIED", exclusive=True),
    "carried, not finite": Logs(dtype=FP32, n=1000, k=8, m=1, step="CARRIED", values="not finite"),
}  # fmt: skip

LOG_MISTAKES = {
    "never too much": ("far apart", "too_much |= upto[j] > MUCH;", ";"),
    "too much is not published": ("far apart", "if (too_much) much[step % 3] = 1;", ";"),
    "walked on from before": ("far apart", "base[c] = Op::finite(top), run[c] =", "float none ="),
    "walked from the beginning": ("far apart", "const i64 skipped = i64(step) * STEP;", "const i64 skipped = 0;"),
    "walked behind the end": ("a short step", "y_n, min(rows, STEP),", "y_n, STEP,"),
    "walked columns of another": ("a step", "x + skipped * x_n - c.own", "x + skipped * x_n"),
    "a sum not moved": ("far apart", "sum = next > top ? sum * e + 1.f : sum + e;", "sum = sum + e;"),
    "infinity less infinity": ("not finite", "next == top ? 0.f : -fabsf", "-fabsf"),
    "infinities are lost": ("not finite, both", "top > Op::LARGEST ? top + sum : sum;", "sum;"),
    "renewed twice": ("one vector", "RENEWED && run[j] <= Op::LARGEST) base[j] = logarithm<T>(base[j], run[j]), run[j] = 1.f;",
                      "RENEWED) base[j] = logarithm<T>(base[j], run[j]);"),
    "groups of a warp": ("two warps", "if (lane >= by) upto[j] += other;", ";"),
    "a warp's first group": ("two warps", "lane < ACROSS ? 0.f : other", "other"),
    "warps in no order": ("two warps", "if (w == warp) before[j] += run[j];", "if (w == 0) before[j] += run[j];"),
    "one buffer": ("reversed", "of_warps[step % 2][warp][c.own + j] = upto[j];", "of_warps[0][warp][c.own + j] = upto[j];"),
    "rows of another thread": ("exclusive", "threadIdx.x / ACROSS * ROWS;", "threadIdx.x / ACROSS * 2;"),
    "the same element": ("exclusive", "e[u ? u - 1 : 0][j];", "e[u][j];"),
    "columns that are not there": ("two warps", "inside = column < K;", "inside = true;"),
    "nothing carried": ("carried", "before = carry[c.unit * K + c.column + j];", ";"),
    "a part too long": ("totals", "end = min(begin + each, N);", "end = N;"),
    "a part for another": ("totals", "totals[c.unit * K", "totals[c.m * K"),
}  # fmt: skip

TEXTS = {source: cuda_as_cpp.whole(dispatch.FOLDER / source) for source in ("columns.cu", "logarithm_columns.cu")}
SUITES = {
    source: Suite(TEXTS[source], Columns, *suite)
    for source, suite in zip(TEXTS, ((CASES, MISTAKES), (LOG_CASES, LOG_MISTAKES)), strict=True)
}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 5)])
def test_what_parts_come_to_is_carried_on(reverse, m, k):
    """Products that no float holds, beside a 0, behind a tiny one, and such that shrink again."""
    parts = 9
    power = torch.randint(-200, 200, (m, parts, k), generator=torch.Generator().manual_seed(m)).float()
    total = 1 + torch.rand(m, parts, k, generator=torch.Generator().manual_seed(k))
    total[0, 1, 0], total[-1, 4, -1], power[-1, 4, -1] = 0.0, 1e-40, 0.0
    carry = torch.full((m, parts, k), 7.0)
    kernels.carry_products_launch(AxisView(m, 1, k, k, k, 1), parts, reverse)(torch.stack([total, power]), carry)
    whole = total.double() * 2.0 ** power.double()
    whole = whole.flip(1) if reverse else whole
    want = torch.cat([torch.ones(m, 1, k, dtype=torch.float64), whole.cumprod(1)[:, :-1]], 1)
    torch.testing.assert_close(carry, (want.flip(1) if reverse else want).float(), rtol=3e-6, atol=1e-44)


def plan_of(scan: Scan, x: torch.Tensor, dim: int, sm: int = 90, *, exclusive: bool = False, reverse: bool = False):
    with compiling_for(sm, lambda *kernel: None):
        return FORWARD.kernel("cuda").of((x,), scan, dim, exclusive, reverse, x.dtype)


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", SCANS)
def test_an_element_takes_few_instructions(name, dtype):
    """Of the loop over steps; at the ceiling there is time for 28 of a 16-bit element and for 56 of a 32-bit one."""
    loop = longest_loop(plan_of(SCANS[name], torch.empty(2**14, 2**14, dtype=dtype, device="meta"), 0).scan)
    if name == "logarithm":
        assert len(loop) / 32 <= (26 if dtype == BF16 else 40)
        assert 2 <= sum(name.startswith("MUFU") for name in loop) / 32 <= 2.6
    else:
        assert len(loop) / (8 * 16 // dtype.itemsize) <= 12


@pytest.mark.share(6)
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_every_kernel_of_columns_in_parts_compiles_and_spills_nothing(scan, sm, dtype):
    made = plan_of(scan, torch.empty(2**20, 64, dtype=dtype, device="meta"), 0, sm, exclusive=True, reverse=True)
    between = made.carries
    carries = [between.scan] if isinstance(between, ScanInParts) else []  # of products Triton's
    assert between is not None and (carries == [] or between.carries is None)
    for kernel in (made.totals, *carries, made.scan):
        assert spills_nothing(kernel, sm)


REFUSED = [
    bad(plan_of, Declined, "16 bytes", running_sum, torch.empty(8, 9, device="meta"), 0),
    bad(plan_of, Declined, "16 bytes", running_sum, torch.empty(8, 9, 10, device="meta")[..., :8], 1),
    bad(plan_of, Declined, "side by side", running_sum, torch.empty(8, 4, 9, 2, device="meta")[..., 0], 1),
]


def test_a_step_is_no_longer_than_its_rows():
    """Threads that would find no row are left out, down to a warp."""
    for n, threads in ((2**14, 256), (40, 64), (3, 32)):
        x = torch.empty(64, n, 64, dtype=BF16, device="meta")
        assert plan_of(running_sum, x, 1).scan.block == threads


@pytest.mark.parametrize(
    ("shape", "chosen"), [((64, 2**9, 64), "cuda"), ((2**12, 8, 64), "triton"), ((2**12, 64, 8), "triton")]
)
def test_triton_takes_few_rows(monkeypatch, shape, chosen):
    monkeypatch.setattr(dispatch, "INTERPRETING", False)
    with compiling_for(90, lambda *kernel: None):
        x = torch.empty(shape, dtype=BF16, device="meta")
        for direction in ("forward", "backward"):
            assert ops.explain("cumsum", x, 1, direction=direction).implementation == chosen

"""Gradients of products and of logarithms of sums down columns without a GPU: ``gradient_columns.cu`` run on a CPU that
plays its PTX (``ptx_on_cpu.hpp``) with the launches that Python computes; what it compiles to and is chosen for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import cuda_as_cpp
import pytest
from cuda_on_cpu import bytes_of, job, player_of_cases, tensor_of
from scan_on_cpu import recurrence

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from scan_columns_on_cpu import loop_of_launch  # noqa: E402

from weft.bench.compile_check import resource_usage  # noqa: E402
from weft.definition import ARCHITECTURES  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.scan import columns, gradient_columns  # noqa: E402
from weft.operators.scan.cumprod import scan as product  # noqa: E402
from weft.operators.scan.gradient_columns import ColumnsGradientPlan  # noqa: E402
from weft.operators.scan.logcumsumexp import scan as logarithm  # noqa: E402
from weft.operators.scan.plans import GradientPlan  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """[m, n, k] along n; ``step``: "TOTALS" or "CARRIED" of parts of n; ``apart``: elements between two rows of y and dy;
    ``overflows``: factors that overflow together where r is 0, though y is finite; ``last``: y's last row."""

    log: bool = True
    dtype: torch.dtype = BF16
    m: int = 2
    n: int = 150
    k: int = 48
    reverse: bool = False
    exclusive: bool = False
    step: str = ""
    apart: int = 0
    overflows: bool = False
    last: float = 0.0
    across: int = 4
    rows: int = 2
    threads: int = 64


CASES = {
    "two warps": Case(),
    "a product": Case(log=False),
    "exclusive": Case(exclusive=True, rows=3),
    "an exclusive product": Case(log=False, exclusive=True, dtype=FP16),
    "reversed": Case(reverse=True, dtype=FP16, apart=8),
    "a reversed product": Case(log=False, reverse=True, apart=16, threads=96),
    "both": Case(dtype=FP32, reverse=True, exclusive=True, k=12),
    "both, a product": Case(log=False, dtype=FP32, reverse=True, exclusive=True),
    "a warp across": Case(dtype=FP32, k=132, across=32, m=1),
    "one vector": Case(log=False, dtype=FP32, k=4, n=700, m=1),
    "few rows": Case(log=False, m=5, n=3),
    "overflows": Case(log=False, dtype=FP32, k=8, overflows=True),
    "overflows, many rows a thread": Case(log=False, dtype=FP32, k=8, overflows=True, rows=4),
    "an infinity that is in no result": Case(log=False, dtype=FP32, k=8, exclusive=True, last=float("inf")),
    "totals": Case(n=1101, k=24, m=1, step="TOTALS"),
    "totals of products": Case(log=False, dtype=FP32, n=1000, k=8, m=1, step="TOTALS", reverse=True),
    "carried": Case(dtype=FP16, n=1100, k=24, m=1, step="CARRIED", reverse=True),
    "carried, a product": Case(log=False, n=1000, k=24, m=1, step="CARRIED", exclusive=True),
}  # fmt: skip

# Mistakes: a case that shows them, what stands in the kernel, what is written instead.
MISTAKES = {
    "steps in the other order": ("two warps", "second.a * first.b + second.b", "first.a * second.b + first.b"),
    "groups of a warp": ("two warps", "if (lane >= by) upto[j] = then<LOG>(other, upto[j]);", ";"),
    "a warp's first group": ("two warps", "lane < ACROSS ? Step{1.f, 0.f} : other", "other"),
    "warps in no order": ("two warps", "if (w == warp) r[j]", "if (w == 0) r[j]"),
    "steps forgotten": ("two warps", "run[j] = after<LOG>(run[j], Step{told.x, told.y});", "run[j] = told.y;"),
    "one buffer": ("a product", "done += STEP, step ^= 1)", "done += STEP)"),
    "the row itself": ("a product", "row_of(x, x_n, at + u - 1, c", "row_of(x, x_n, at + u, c"),
    "the factor of the row itself": ("a product", "at + u + !LATE, wanted", "at + u, wanted"),
    "the gradient of the row itself": ("exclusive", "at + u - LATE, wanted", "at + u, wanted"),
    "no second": ("exclusive", "at + u - 1 - LATE, c", "at + u - 1, c"),
    "a row too few": ("two warps", "at + max(u - 1, 0) < rows", "at + u < rows"),
    "rows of no column": ("a product", "c.begin + row < N", "true"),
    "infinity less infinity": ("exclusive", "near == far ? 1.f : power", "power"),
    "a part's first row has none before it": ("carried", "c.begin + row >= 0", "row >= 0"),
    "an overflow for nothing": ("overflows", "LOG ? a : finite(a)", "a"),
    "what is in no result": ("an infinity that is in no result", "if (LATE && c.begin + from + u == 0) result[j] = 0.f;", ""),
    "rows behind the end": ("few rows", "if (u < here) store", "store"),
    "rows that are not there": ("totals", "if (MODE == TOTALS && at + u >= rows) s = Step{1.f, 0.f};", ""),
    "columns that are not there": ("two warps", "inside = column < K;", "inside = true;"),
    "downwards": ("two warps", "if (DOWN) x_n = -x_n,", "if (false) x_n = -x_n,"),
    "nothing carried": ("carried", "run[j] = carry[c.unit * K + c.column + j];", ";"),
    "nothing scaled": ("totals of products", "scale[j] = all.a,", ""),
    "a part for another": ("totals of products", "totals[c.unit * K", "totals[c.m * K"),
}  # fmt: skip

LAUNCH = """
const Any x{job.buffers[0]}, y{job.buffers[1]}, dy{job.buffers[2]}, carry{job.buffers[3]}, dx{job.buffers[4]},
    totals{job.buffers[8]}, scales{static_cast<char *>(job.buffers[8]) + job.scales[0]};
const i64 *s = job.shape;
job.run([&] {
  KERNEL(x, y, dy, carry, totals, scales, dx, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11]);
});
"""


class Gradients:
    """The tensors of a case, what is right, and the launch that a call computes."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        g = torch.Generator().manual_seed(seed)
        self.scan = logarithm if case.log else product
        how = {"exclusive": case.exclusive, "reverse": case.reverse}
        x = torch.randn(case.m, case.n, case.k, generator=g)
        self.x = (x * 2 if case.log else 1 + x / 16).to(case.dtype)
        if case.overflows:
            self.x.fill_(1.0)[:, :2] = torch.tensor([[1e-30], [1e-8]])
            self.x[:, 100:110] = 1e4
        shape = case.m, case.n, case.k + case.apart
        self.y, self.dy = (torch.empty(shape, dtype=case.dtype)[:, :, : case.k] for _ in range(2))
        self.y.copy_(self.scan.reference(self.x.double(), 1, **how))
        self.dy.copy_(torch.randn(case.m, case.n, case.k, generator=g))
        if case.overflows:
            self.dy[:, 50:] = 0
        config = {"ACROSS": case.across, "ROWS": case.rows, "THREADS": case.threads}
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(self.scan.configured.gradient_columns, "trial", config)
            patch.setattr(columns, "multiprocessors", lambda device: 2 if case.step else 0)
            made = self.scan._vector_backward_plan(self.x, self.y, self.dy, 1, case.exclusive, case.reverse)
        self.parts = made.shape[1]
        assert (self.parts > 1) == bool(case.step)
        self.plan = made.totals if case.step == "TOTALS" else made.gradient
        each = self.plan.scalars[2].value
        spans = [(at, min(at + each, case.n)) for at in range(0, case.n, each)]
        as_rows = (t.transpose(1, 2).reshape(-1, case.n) for t in (self.x, self.y, self.dy))
        found = recurrence(*as_rows, spans, log=case.log, **how)
        self.dx, self.carry, self.scales, self.totals = (
            t.view(case.m, case.k, -1).transpose(1, 2).contiguous() for t in found
        )
        if case.last:  # after what is right was computed: its row has no part in it
            self.y[:, -1] = case.last

    @property
    def launch(self) -> str:
        return LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self) -> bytes:
        carry = self.carry.to(FP32)
        read = {0: self.x, 1: self.y, 2: self.dy, 3: carry}
        buffers = {i: bytes_of(t) for i, t in read.items()}
        buffers |= {4: bytes([0xA5]) * self.x.nbytes, 8: bytes([0xA5]) * (2 * carry.nbytes)}
        plan = dataclasses.replace(self.plan, shared_bytes=cuda_as_cpp.STATIC)
        return job(plan, self.seed, buffers, shape=[s.value for s in self.plan.scalars], scales=(carry.nbytes,))

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or what is further off than rounding allows."""
        size, sums = self.x.nbytes, {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}[self.case.dtype]
        got = {"dx": (tensor_of(found[:size], self.case.dtype).view_as(self.dx), self.dx, sums)}
        if self.case.step == "TOTALS":
            if found[:size] != bytes([0xA5]) * size:
                return "dx was written"
            total, scale = tensor_of(found[size:], FP32).view(2, *self.carry.shape)
            got = {"total": (total, self.totals, 4e-6), "scale": (scale, self.scales, 4e-6)}
        for name, (value, right, rounding) in got.items():
            far = ~((value.double() - right).abs() <= rounding * right.abs() + 4e-6 * (1e-3 + right.abs().amax()))
            if far.any():
                at = tuple(far.nonzero()[0].tolist())
                return f"{name}{list(at)} is {value[at].item()}, not {right[at].item()} ({int(far.sum())} of {far.numel()})"
        return ""


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    text = cuda_as_cpp.whole(Path(columns.__file__).parent / gradient_columns.SOURCE)
    return player_of_cases(tmp_path_factory.mktemp("played"), text, Gradients, CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert [play(name, seed=seed) for seed in range(3)] == [""] * 3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    assert any(play(MISTAKES[mistake][0], mistake, seed) for seed in range(8))


# ---- what it costs and is chosen for -----------------------------------------------------------------------------------


def plan_of(scan, x: torch.Tensor, sm: int = 90, **how: bool) -> ColumnsGradientPlan:
    with compiling_for(sm, lambda *kernel: None):
        return scan._vector_backward_plan(x, x, x, 0, how.get("exclusive", False), how.get("reverse", False))


@pytest.mark.parametrize(("dtype", "most"), [(BF16, (34, 46)), (FP32, (53, 97))])
@pytest.mark.parametrize("scan", [logarithm, product], ids=["logarithm", "product"])
def test_an_element_takes_few_instructions(scan, dtype, most):
    """Of products and of logarithms, of the loop over steps; at the ceiling there is time for 55 of a 16-bit element and for
    110 of a 32-bit one."""
    plan = plan_of(scan, torch.empty(2**14, 2**14, dtype=dtype, device="meta"))
    rows = int(re.findall(r", (\d+)", plan.gradient.expression)[1])
    assert len(loop_of_launch(plan.gradient)) / (rows * 16 // dtype.itemsize) <= most[scan is logarithm]


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("scan", [logarithm, product], ids=["logarithm", "product"])
def test_every_kernel_compiles_and_spills_nothing(scan, dtype, sm):
    made = plan_of(scan, torch.empty(2**20, 64, dtype=dtype, device="meta"), sm, exclusive=True, reverse=True)
    assert made.shape[1] > 1
    for kernel in (made.totals, made.gradient):
        assert resource_usage(compile_cubin(kernel.source, kernel.expression, sm)[0])["STACK"] == 0


def test_the_public_functions_take_it_for_many_rows(monkeypatch):
    monkeypatch.setattr("weft.operators.scan.scan.INTERPRETING", False)
    for shape, kind in (
        ((2**10, 2**10), ColumnsGradientPlan),
        ((2**10, 2**9), GradientPlan),  # few elements
        ((2**10, 2**10 + 1), GradientPlan),  # columns that do not begin on 16 bytes
        ((8, 2**17), GradientPlan),  # few rows
    ):
        x = torch.empty(*shape, dtype=BF16, device="meta")
        with compiling_for(90, lambda *kernel: None):
            assert type(product._public_backward_plan(x, x, x, 0, False, False)) is kind

"""Gradients of products and of logarithms of sums on the CPU emulator; what they compile to, decline, and are chosen for."""

import dataclasses
import re

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, FP32, Launched, Suite, first_difference, job, tensor_of
from emulated import *  # noqa: F403
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import longest_loop, names, sass, spills_nothing
from scan_on_cpu import recurrence

from weft import ops
from weft.definition import ARCHITECTURES, Declined
from weft.operators.cuda import CudaPlan, compile_cubin
from weft.operators.launch import INTERPRETING, compiling_for
from weft.operators.scan import dispatch, kernels
from weft.operators.scan.cumprod import scan as product
from weft.operators.scan.dispatch import BACKWARD
from weft.operators.scan.kernels import GradientInParts
from weft.operators.scan.logcumsumexp import scan as logarithm


def planned(
    scan, x, y, dy, dim: int, sm: int = 90, *, exclusive: bool = False, reverse: bool = False
) -> GradientInParts:
    with compiling_for(sm, lambda *kernel: None):
        return BACKWARD.kernel("cuda").of((x, y, dy), scan, dim, exclusive, reverse)


@dataclasses.dataclass(frozen=True)
class Case:
    """[m, n, k] along n; ``step``: "TOTALS" or "CARRIED" of parts of n; ``apart``: elements between two rows of y and dy."""

    log: bool = True
    dtype: torch.dtype = BF16
    m: int = 2
    n: int = 150
    k: int = 1
    reverse: bool = False
    exclusive: bool = False
    step: str = ""
    apart: int = 0
    threads: int = 64

    @property
    def scan(self):
        return logarithm if self.log else product

    @property
    def how(self) -> dict[str, bool]:
        return {"exclusive": self.exclusive, "reverse": self.reverse}


@dataclasses.dataclass(frozen=True)
class Rows(Case):
    """``each``: bytes a thread; ``part``: elements of a part, where rows are cut."""

    m: int = 3
    n: int = 1000
    each: int = 32
    part: int = 0

    def plan(self, patch, x, y, dy) -> GradientInParts:
        patch.setattr(self.scan.gradient_rows, "trial", {"BYTES": self.each, "THREADS": self.threads})
        if self.part:
            patch.setattr(dispatch, "PART", self.part)
            patch.setattr(dispatch, "MAX_CLUSTER", 1)  # which holds a part, but not a row
        return planned(self.scan, *(t[..., 0] for t in (x, y, dy)), 1, **self.how)

    def part_of(self, plan) -> int:
        return self.part or self.n


@dataclasses.dataclass(frozen=True)
class Columns(Case):
    """``overflows``: factors that overflow together where r is 0, though y is finite; ``last``: y's last row."""

    k: int = 48
    overflows: bool = False
    last: float = 0.0
    across: int = 4
    rows: int = 2

    def plan(self, patch, x, y, dy) -> GradientInParts:
        config = {"ACROSS": self.across, "ROWS": self.rows, "THREADS": self.threads}
        patch.setattr(self.scan.gradient_columns, "trial", config)
        patch.setattr(dispatch, "multiprocessors", lambda device: 2 if self.step else 0)
        return planned(self.scan, x, y, dy, 1, **self.how)

    def part_of(self, plan) -> int:
        return plan.scalars[2].value


CASES = {
    "two warps": Rows(),
    "a product": Rows(log=False),
    "exclusive": Rows(exclusive=True),
    "an exclusive product": Rows(log=False, exclusive=True, dtype=FP16),
    "reversed": Rows(reverse=True, dtype=FP16, apart=8),
    "a reversed product": Rows(log=False, reverse=True, apart=16),
    "both": Rows(reverse=True, exclusive=True),
    "both, a product": Rows(log=False, reverse=True, exclusive=True),
    "rows side by side": Rows(m=13, n=24),
    "products side by side": Rows(log=False, m=9, n=8),
    "fp32 in four blocks": Rows(dtype=FP32, n=940, threads=32, each=16),
    "a product in four blocks": Rows(log=False, n=2000, threads=32),
    "exclusive fp32": Rows(dtype=FP32, n=500, exclusive=True),
    "totals of parts": Rows(m=2, n=1304, part=256, step="TOTALS", threads=32, each=16),
    "totals of parts, a product": Rows(log=False, m=2, n=2608, part=1024, step="TOTALS", reverse=True),
    "from what is carried": Rows(m=2, n=1304, part=512, step="CARRIED", threads=32),
    "from what is carried, a product": Rows(log=False, m=2, n=1304, part=256, step="CARRIED", threads=32),
}  # fmt: skip

MISTAKES = {
    "steps in the other order": ("two warps", "second.a * first.b + second.b", "first.a * second.b + first.b"),
    "a lane's own element for its neighbour's": ("two warps", "begins ? previous : up;", "begins ? previous : last;"),
    "nothing before a warp": ("two warps", "at >= 0 && at < N ? to_float(memory[at]) : other", "other"),
    "nothing before a strip": ("two warps", "previous = __shfl_sync(ALL, last, LANES - 1, LANES)", "previous = 0.f"),
    "no second": ("exclusive", "from_before(y_words, 1, y,", "from_before(y_words, 0, y,"),
    "the gradient of the same element": ("exclusive", "from_before(dy_words, 0,", "from_before(y_words, 0,"),
    "nothing behind a warp": ("a product", "? to_float(y[at]) : 1.f", "? 1.f : 1.f"),
    "nothing behind a strip": ("a product", "y_beside[v] = next;", "y_beside[v] = 1.f;"),
    "the next lane is there": ("a product", "const bool last = first(v) + COUNT >= length;", "const bool last = false;"),
    "what is missing counts": ("totals of parts, a product", "there(v) ? s : Step{1.f, 0.f}", "s"),
    "warps forgotten": ("two warps", "if (warp) carried = earlier;", ";"),
    "blocks forgotten": ("fp32 in four blocks", "carried = then<LOG>(earlier, carried);", ";"),
    "blocks too early": ("fp32 in four blocks", "barrier_wait(arrived);", ""),
    "strips forgotten": ("two warps", "begins ? total : then<LOG>(total, other)", "begins ? Step{1.f, 0.f} : other"),
    "parts begin at the row": ("from what is carried", "begin = parts > 1 ? unit % parts * each : 0", "begin = 0"),
    "a part's end is the row's": ("from what is carried", "at < N ? to_float(memory", "at < begin + each ? to_float(memory"),
    "nothing carried": ("from what is carried", "if (unit < units) r = carried.a * carry[unit] + carried.b;", ";"),
    "totals of the first warp": ("totals of parts, a product", "total = shuffled(all, WARPS - 1, 32);", ";"),
    "a row for another": ("rows side by side", "+ team) * SIDE + lane / LANES;", "+ team) * SIDE;"),
    "upwards": ("two warps", "return DOWN ? COUNT - 1 - i : i;", "return i;"),
    "the factor of another": ("a product", "i + 1 < COUNT ? f[turned(i + 1)] : y_beside[v]", "f[turned(i)]"),
}  # fmt: skip

COLUMN_CASES = {
    "two warps": Columns(),
    "a product": Columns(log=False),
    "exclusive": Columns(exclusive=True, rows=3),
    "an exclusive product": Columns(log=False, exclusive=True, dtype=FP16),
    "reversed": Columns(reverse=True, dtype=FP16, apart=8),
    "a reversed product": Columns(log=False, reverse=True, apart=16, threads=96),
    "both": Columns(dtype=FP32, reverse=True, exclusive=True, k=12),
    "both, a product": Columns(log=False, dtype=FP32, reverse=True, exclusive=True),
    "a warp across": Columns(dtype=FP32, k=132, across=32, m=1),
    "one vector": Columns(log=False, dtype=FP32, k=4, n=700, m=1),
    "few rows": Columns(log=False, m=5, n=3),
    "overflows": Columns(log=False, dtype=FP32, k=8, overflows=True),
    "overflows, many rows a thread": Columns(log=False, dtype=FP32, k=8, overflows=True, rows=4),
    "an infinity that is in no result": Columns(log=False, dtype=FP32, k=8, exclusive=True, last=float("inf")),
    "totals": Columns(n=1101, k=24, m=1, step="TOTALS"),
    "totals of products": Columns(log=False, dtype=FP32, n=1000, k=8, m=1, step="TOTALS", reverse=True),
    "carried": Columns(dtype=FP16, n=1100, k=24, m=1, step="CARRIED", reverse=True),
    "carried, a product": Columns(log=False, n=1000, k=24, m=1, step="CARRIED", exclusive=True),
}  # fmt: skip


COLUMN_MISTAKES = {
    "steps in the other order": ("two warps", "second.a * first.b + second.b", "first.a * second.b + first.b"),
    "groups of a warp": ("two warps", "if (lane >= by) upto[j] = then<LOG>(other, upto[j]);", ";"),
    "a warp's first group": ("two warps", "lane < ACROSS ? Step{1.f, 0.f} : other", "other"),
    "warps in no order": ("two warps", "if (w == warp) r[j]", "if (w == 0) r[j]"),
    "steps forgotten": ("two warps", "run[j] = after<LOG>(run[j], Step{sent.x, sent.y});", "run[j] = sent.y;"),
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


class Gradients(Launched):
    cpp = """
const Any x{job.buffers[0]}, y{job.buffers[1]}, dy{job.buffers[2]}, carry{job.buffers[3]}, dx{job.buffers[4]},
    totals{job.buffers[8]}, scales{static_cast<char *>(job.buffers[8]) + job.scales[0]};
job.run([&] { KERNEL(x, y, dy, carry, totals, scales, dx, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        overflows, last = getattr(case, "overflows", False), getattr(case, "last", 0.0)
        x = torch.randn(case.m, case.n, case.k, generator=g)
        self.x = (x * 2 if case.log else 1 + x / 16).to(case.dtype)
        if overflows:
            self.x.fill_(1.0)[:, :2] = torch.tensor([[1e-30], [1e-8]])
            self.x[:, 100:110] = 1e4
        shape = (case.m, case.n + case.apart, 1) if case.k == 1 else (case.m, case.n, case.k + case.apart)
        self.y, self.dy = (torch.empty(shape, dtype=case.dtype)[:, : case.n, : case.k] for _ in range(2))
        self.y.copy_(case.scan.reference(self.x.double(), 1, **case.how))
        self.dy.copy_(torch.randn(case.m, case.n, case.k, generator=g))
        if overflows:
            self.dy[:, 50:] = 0
        made = case.plan(patch, self.x, self.y, self.dy)
        assert (made.shape[1] > 1) == bool(case.step)
        plan = made.totals if case.step == "TOTALS" else made.gradient
        self._right(case.part_of(plan))
        if last:  # after what is right was computed: its row has no part in it
            self.y[:, -1] = last
        return plan

    def _right(self, part: int) -> None:
        """The recurrence in float64, element by element, with the y that the kernel sees."""
        case = self.case
        spans = [(at, min(at + part, case.n)) for at in range(0, case.n, part)]
        if isinstance(case, Rows) and not case.reverse:  # parts are counted in memory
            spans = [(case.n - end, case.n - begin) for begin, end in spans]
        rows = (t.transpose(1, 2).reshape(-1, case.n) for t in (self.x, self.y, self.dy))
        found = recurrence(*rows, spans, log=case.log, **case.how)
        whole = (t.view(case.m, case.k, -1).transpose(1, 2).contiguous() for t in found)
        self.dx, self.carry, self.scales, self.totals = whole

    def job(self) -> bytes:
        carry = self.carry.to(FP32)
        buffers = {0: self.x, 1: self.y, 2: self.dy, 3: carry}
        buffers |= {4: bytes([0xA5]) * self.x.nbytes, 8: bytes([0xA5]) * (2 * carry.nbytes)}
        return job(self.plan, self.seed, buffers, scales=(carry.nbytes,), static=True)

    def what_is_wrong(self, found: bytes) -> str:
        case, size, sums = self.case, self.x.nbytes, 2e-6 if isinstance(self.case, Rows) else 4e-6
        rounding = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}[case.dtype]
        checked = [("dx", tensor_of(found[:size], case.dtype).view_as(self.dx), self.dx, rounding)]
        if case.step == "TOTALS":
            if found[:size] != bytes([0xA5]) * size:
                return "dx was written"
            total, scale = tensor_of(found[size:], FP32).view(2, *self.carry.shape)
            checked = [("total", total, self.totals, sums), ("scale", scale, self.scales, sums)]
        return first_difference(checked, sums, least=1e-3)


SUITES = {
    source: Suite(cuda_as_cpp.whole(dispatch.FOLDER / source), Gradients, cases, mistakes)
    for source, cases, mistakes in (
        ("gradient.cu", CASES, MISTAKES),
        ("gradient_columns.cu", COLUMN_CASES, COLUMN_MISTAKES),
    )
}


each_scan = pytest.mark.parametrize("scan", [logarithm, product], ids=["logarithm", "product"])


def of_size(scan, *shape: int, dtype: torch.dtype, dim: int, sm: int = 90, **how: bool) -> GradientInParts:
    x = torch.empty(shape, dtype=dtype, device="meta")
    return planned(scan, x, x, x, dim, sm, **how)


@pytest.mark.share(6)
@each_scan
@pytest.mark.parametrize(("dtype", "most"), [(BF16, (55, 62)), (FP32, (90, 122))])
@pytest.mark.parametrize("n", [256, 4096, 65536, 2**28])
def test_an_element_of_a_row_takes_few_instructions(scan, n, dtype, most):
    """Of products and of logarithms, from memory to memory, the exchange between lanes, warps and blocks included; at the
    ceiling there is time for 55 of a 16-bit element and for 110 of a 32-bit one."""
    plan = of_size(scan, 2**28 // n, n, dtype=dtype, dim=-1)
    assert (plan.shape[1] > 1) == (n == 2**28) and spills_nothing(plan.gradient)
    held = int(re.findall(r", (\d+)", plan.gradient.expression)[1]) * 16 // dtype.itemsize
    assert len(names(sass(plan.gradient.source, plan.gradient.expression))) / held <= most[scan is logarithm]


@pytest.mark.share(4)
@each_scan
@pytest.mark.parametrize(("dtype", "most"), [(BF16, (34, 46)), (FP32, (53, 97))])
def test_an_element_of_a_column_takes_few_instructions(scan, dtype, most):
    """Of the loop over steps."""
    plan = of_size(scan, 2**14, 2**14, dtype=dtype, dim=0)
    rows = int(re.findall(r", (\d+)", plan.gradient.expression)[1])
    assert len(longest_loop(plan.gradient)) / (rows * 16 // dtype.itemsize) <= most[scan is logarithm]


@pytest.mark.share(3)
@each_scan
@pytest.mark.parametrize("sm", [90, 100, 120])
def test_every_configuration_of_rows_compiles(scan, sm):
    for n in (512, 2**15):
        found = list(scan.gradient_rows.candidates(sm, BF16, n))
        assert scan.gradient_rows.heuristic(sm, BF16, n) in found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan.gradient_rows, "trial", found[-1])
        plan = of_size(scan, 64, 2**15, dtype=BF16, dim=-1, sm=sm).gradient
        assert compile_cubin(plan.source, plan.expression, sm)[0]


@pytest.mark.share(6)
@each_scan
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_kernel_of_columns_compiles_and_spills_nothing(scan, dtype, sm):
    made = of_size(scan, 2**20, 64, dtype=dtype, dim=0, sm=sm, exclusive=True, reverse=True)
    assert made.shape[1] > 1 and spills_nothing(made.totals, sm) and spills_nothing(made.gradient, sm)


REFUSED = [
    bad(planned, Declined, words, product, x, x, x, -1, *sm)
    for words, x, *sm in (
        ("16 bytes", torch.ones(3, 12, dtype=BF16)),
        ("16 bytes", torch.ones(2 * 64 + 1, dtype=BF16)[1:].view(2, 64)),
        ("side by side", torch.ones(8, 16)[:, ::2].T),
        ("sm_90", torch.ones(2, 8), 80),
        ("a cluster holds none", torch.empty(1, 2**31, dtype=BF16, device="meta")),
    )
]


@pytest.mark.skipif(not INTERPRETING, reason="on a GPU `weft verify` runs it")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the overflow, from the interpreter
def test_what_parts_carry_is_finite_where_factors_overflow():
    totals, scales = torch.tensor([0.0, 0.0, 5.0, 7.0]), torch.tensor([3.4e38, -3.4e38, 2.0, 1.0])
    carry = torch.empty(4)
    launches = kernels.GradientInParts.of(1, 4, 1, lambda mode: None, reverse=False)
    launches.carries(totals, scales, carry)
    assert carry.tolist() == [0.0, 0.0, 0.0, 5.0]


@pytest.mark.parametrize(("shape", "dim", "kernel"), [
    ((64, 2**14), -1, "cuda"),
    ((64, 2**13), -1, "triton"),  # few elements
    ((2**7, 2**13 + 1), -1, "cuda-padded"),  # rows that do not begin on 16 bytes
    ((2**14, 2**8 + 1), -1, "triton"),  # short ones
    ((1, 2**31), -1, "triton"),  # a row of which no cluster holds a part
    ((2**10, 2**10), 0, "cuda"),
    ((2**10, 2**9), 0, "triton"),
    ((2**10, 2**10 + 1), 0, "triton"),
    ((8, 2**17), 0, "triton"),  # few rows
])  # fmt: skip
def test_the_public_functions_take_them_for_many_elements(monkeypatch, shape, dim, kernel):
    monkeypatch.setattr(dispatch, "INTERPRETING", False)
    x = torch.empty(*shape, dtype=BF16, device="meta")
    with compiling_for(90, lambda *kernel: None):
        for name in ("cumprod", "logcumsumexp"):
            assert ops.explain(name, x, dim, direction="backward").implementation == kernel

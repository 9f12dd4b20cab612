"""Logarithms of running sums down columns without a GPU: ``logarithm_columns.cu`` run on a CPU that plays its PTX
(``ptx_on_cpu.hpp``) with the launches that Python computes; what it compiles to and declines."""

from __future__ import annotations

import dataclasses
import re

import cuda_as_cpp
import pytest
from cuda_on_cpu import FRAME, bytes_of, frame_is_whole, framed, job, player_of_cases, tensor_of
from sass import names, sass
from scan_on_cpu import VALUES, further_off_than_a_logarithm

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.bench.compile_check import resource_usage  # noqa: E402
from weft.definition import ARCHITECTURES, Declined  # noqa: E402
from weft.operators.cuda import compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.scan import logarithm_columns  # noqa: E402
from weft.operators.scan.logcumsumexp import scan  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """[m, n, k] along n, ``apart`` elements between two rows; ``step``: "TOTALS" or "CARRIED" of parts of n."""

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


CASES = {
    "two warps": Case(),
    "exclusive": Case(dtype=FP16, exclusive=True, rows=3, apart=8),
    "reversed": Case(dtype=FP32, reverse=True, threads=96, apart=4),
    "both": Case(reverse=True, exclusive=True, k=8),
    "a warp across": Case(dtype=FP16, k=264, across=32, m=1),
    "one vector": Case(dtype=FP32, k=4, n=700, m=1),
    "far apart": Case(values="far apart", n=300, k=24),
    "far apart, both": Case(dtype=FP32, values="far apart", reverse=True, exclusive=True),
    "a step": Case(dtype=FP32, values="a step", apart=12, exclusive=True),
    "a short step": Case(m=1, n=24, k=8, values="a step", across=1),
    "not finite": Case(m=1, k=8, n=220, values="not finite"),
    "not finite, both": Case(dtype=FP32, k=4, n=420, values="not finite", reverse=True, exclusive=True),
    "huge": Case(dtype=FP32, k=4, values="huge"),
    "totals": Case(n=1100, k=24, m=1, step="TOTALS", reverse=True),
    "carried": Case(n=1100, k=24, m=1, step="CARRIED", reverse=True, apart=8),
    "carried, exclusive": Case(dtype=FP32, n=1000, k=12, m=1, step="CARRIED", exclusive=True),
    "carried, not finite": Case(dtype=FP32, n=1000, k=8, m=1, step="CARRIED", values="not finite"),
}  # fmt: skip

# Mistakes: a case that shows them, what stands in the kernel, what is written instead.
MISTAKES = {
    "never too much": ("far apart", "too_much |= upto[j] > MUCH;", ";"),
    "nobody is told of too much": ("far apart", "if (too_much) much[step % 3] = 1;", ";"),
    "walked on from before": ("far apart", "base[c] = Op::finite(top), run[c] =", "float none ="),
    "walked from the beginning": ("far apart", "const i64 skipped = i64(step) * STEP;", "const i64 skipped = 0;"),
    "walked behind the end": ("a short step", "y_n, min(rows, STEP),", "y_n, STEP,"),
    "walked columns of another": ("a step", "x + skipped * x_n - own", "x + skipped * x_n"),
    "a sum not moved": ("far apart", "sum = next > top ? sum * e + 1.f : sum + e;", "sum = sum + e;"),
    "infinity less infinity": ("not finite", "next == top ? 0.f : -fabsf", "-fabsf"),
    "infinities are lost": ("not finite, both", "top > Op::LARGEST ? top + sum : sum;", "sum;"),
    "renewed twice": ("one vector", "RENEWED && run[j] <= Op::LARGEST) base[j] = logarithm<T>(base[j], run[j]), run[j] = 1.f;",
                      "RENEWED) base[j] = logarithm<T>(base[j], run[j]);"),
    "groups of a warp": ("two warps", "if (lane >= by) upto[j] += other;", ";"),
    "a warp's first group": ("two warps", "lane < ACROSS ? 0.f : other", "other"),
    "warps in no order": ("two warps", "if (w == warp) before[j] += run[j];", "if (w == 0) before[j] += run[j];"),
    "one buffer": ("reversed", "of_warps[step % 2][warp][own + j] = upto[j];", "of_warps[0][warp][own + j] = upto[j];"),
    "rows of another thread": ("exclusive", "threadIdx.x / ACROSS * ROWS;", "threadIdx.x / ACROSS * 2;"),
    "the same element": ("exclusive", "e[u ? u - 1 : 0][j];", "e[u][j];"),
    "columns that are not there": ("two warps", "const bool inside = column < K;", "const bool inside = true;"),
    "nothing carried": ("carried", "before = carry[unit * K + column + j];", ";"),
    "a part too long": ("totals", "end = min(begin + each, N);", "end = N;"),
    "a part for another": ("totals", "totals[unit * K", "totals[m * K"),
}  # fmt: skip

LAUNCH = """
const Any x{job.buffers[0]}, carry{job.buffers[1]}, y{static_cast<char *>(job.buffers[4]) + FRAME}, totals{job.buffers[8]};
const i64 *s = job.shape;
job.run([&] { KERNEL(x, carry, y, totals, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]); });
"""


class Columns:
    """The tensors of a case, what is right, and the launch that a call computes."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        columns = torch.randn(case.m * case.k, case.n, generator=torch.Generator().manual_seed(seed))
        VALUES[case.values](columns)
        memory = torch.full((case.m, case.n, case.k + case.apart), 7.0, dtype=case.dtype)
        self.x = memory[:, :, : case.k]
        self.x.copy_(columns.view(case.m, case.k, case.n).transpose(1, 2))
        how = {"exclusive": case.exclusive, "reverse": case.reverse}
        config = {"ACROSS": case.across, "ROWS": case.rows, "THREADS": case.threads}
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(scan.configured.columns_vectors, "trial", config)
            patch.setattr(logarithm_columns, "multiprocessors", lambda device: 2 if case.step else 0)
            made = scan._vector_plan(self.x, 1, case.exclusive, case.reverse, case.dtype)
        parts = made.shape[1]
        assert (parts > 1) == bool(case.step)
        self.plan = made.totals if case.step == "TOTALS" else made.scan
        self.right = scan.reference(self.x.double(), 1, **how)
        x = self.x.double().flip(1) if case.reverse else self.x.double()
        each = self.plan.scalars[2].value
        totals = torch.stack([x[:, at : at + each].logsumexp(1) for at in range(0, case.n, each)], 1)
        self.totals = totals
        self.carry = scan.reference(totals, 1, exclusive=True).float().contiguous()

    @property
    def launch(self) -> str:
        return LAUNCH.replace("KERNEL", self.plan.expression).replace("FRAME", str(FRAME))

    def job(self) -> bytes:
        # y has x's strides
        buffers = {0: bytes_of(self.x), 1: bytes_of(self.carry), 4: framed(self.right.numel() * self.x.itemsize)}
        buffers[8] = bytes([0xA5]) * self.carry.nbytes
        plan = dataclasses.replace(self.plan, shared_bytes=cuda_as_cpp.STATIC)
        return job(plan, self.seed, buffers, shape=[s.value for s in self.plan.scalars])

    def what_is_wrong(self, found: bytes) -> str:
        y, totals = found[: len(found) - self.carry.nbytes], found[len(found) - self.carry.nbytes :]
        if self.case.step == "TOTALS":
            if not frame_is_whole(y, len(y)):
                return "y was written"
            return further_off_than_a_logarithm(tensor_of(totals, FP32).view_as(self.totals), self.totals)
        if not frame_is_whole(y):
            return "written outside of y"
        return further_off_than_a_logarithm(tensor_of(y[FRAME:-FRAME], self.case.dtype).view_as(self.right), self.right)


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    text = cuda_as_cpp.whole(logarithm_columns.SOURCE)
    return player_of_cases(tmp_path_factory.mktemp("played"), text, Columns, CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert [play(name, seed=seed) for seed in range(3)] == [""] * 3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    assert any(play(MISTAKES[mistake][0], mistake, seed) for seed in range(8))


# ---- what it holds, costs and declines -----------------------------------------------------------------------------------


def plan_of(x: torch.Tensor, dim: int, sm: int = 90, **how: bool) -> logarithm_columns.ColumnsPlan:
    with compiling_for(sm, lambda *kernel: None):
        return scan._vector_plan(x, dim, how.get("exclusive", False), how.get("reverse", False), x.dtype)


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 26), (FP32, 40)], ids=["bf16", "fp32"])
def test_an_element_takes_few_instructions(dtype, most):
    """Of the loop over steps; at the ceiling there is time for 28 of a 16-bit element and for 56 of a 32-bit one."""
    made = plan_of(torch.empty(2**14, 2**14, dtype=dtype, device="meta"), 0)
    text = re.split(r"^\$\S+:", sass(made.scan.source, made.scan.expression), flags=re.M)[0]
    labels = {found[1]: found.start() for found in re.finditer(r"^\.(L_x_\d+):", text, flags=re.M)}
    jumps = [(found.start(), labels[found[1]]) for found in re.finditer(r"BRA [^;]*`\(\.(L_x_\d+)\)", text)]
    end, begin = max((jump for jump in jumps if jump[0] > jump[1]), key=lambda jump: jump[0] - jump[1])
    loop = names(text[begin:end])
    assert len(loop) / 32 <= most and 2 <= sum(name.startswith("MUFU") for name in loop) / 32 <= 2.6


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_kernel_compiles_and_spills_nothing(sm, dtype):
    x = torch.empty(2**20, 64, dtype=dtype, device="meta")
    made = plan_of(x, 0, sm, exclusive=True, reverse=True)
    assert made.carries is not None and made.carries.carries is None
    for kernel in (made.totals, made.carries.scan, made.scan):
        assert resource_usage(compile_cubin(kernel.source, kernel.expression, sm)[0])["STACK"] == 0


def test_it_declines_what_it_cannot_take():
    def why(x: torch.Tensor, dim: int = 0) -> str:
        with pytest.raises(Declined) as declined:
            plan_of(x, dim)
        return str(declined.value)

    assert "16 bytes" in why(torch.empty(8, 9, device="meta"))
    assert "16 bytes" in why(torch.empty(8, 9, 10, device="meta")[..., :8], 1)
    assert "side by side" in why(torch.empty(8, 4, 9, 2, device="meta")[..., 0], 1)

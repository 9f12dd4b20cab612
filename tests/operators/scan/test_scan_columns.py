"""Scans down columns without a GPU: ``columns.cu`` and ``logarithm_columns.cu`` emulated on a CPU (``ptx_on_cpu.hpp``) with the
launches that Python computes; what they compile to, decline, and are chosen for."""

from __future__ import annotations

import functools

import pytest
from scan_on_cpu import further_off_than_a_logarithm

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import scan_columns_on_cpu  # noqa: E402
from scan_columns_on_cpu import BF16, FP16, FP32  # noqa: E402

from weft import ops  # noqa: E402
from weft.definition import ARCHITECTURES, Declined  # noqa: E402
from weft.operators.axis_view import AxisView  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.scan import dispatch, kernels  # noqa: E402
from weft.operators.scan.cumprod import scan as product  # noqa: E402
from weft.operators.scan.cumsum import scan as running_sum  # noqa: E402
from weft.operators.scan.logcumsumexp import scan as logarithm  # noqa: E402

SCANS = {"sum": running_sum, "product": product, "logarithm": logarithm}


def further_off(got: torch.Tensor, want: torch.Tensor, sums: float = 2**-20) -> str:
    """An empty string, or where a result is further off than rounding it and its parts, ``sums`` of the largest."""
    limit = torch.finfo(got.dtype).eps * want.abs() + sums * want.abs().amax()
    far = ~((got.double() - want).abs() <= limit)
    if not far.any():
        return ""
    at = tuple(far.nonzero()[0].tolist())
    return f"y{list(at)} is {got[at].item()}, not {want[at].item()} ({int(far.sum())} of {far.numel()})"


Sums = functools.partial(scan_columns_on_cpu.Case, running_sum, torch.sum, further_off)
rounded_often = functools.partial(further_off, sums=2**-17)  # each of a thousand factors rounds
Products = functools.partial(scan_columns_on_cpu.Case, product, torch.prod, rounded_often, values="near one")
Logs = functools.partial(scan_columns_on_cpu.Case, logarithm, torch.logsumexp, further_off_than_a_logarithm)

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

# Mistakes: a case that shows them, what is in the kernel, what is written instead.
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


SUITES = {"sums and products": (CASES, MISTAKES), "logarithms": (LOG_CASES, LOG_MISTAKES)}


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """``emulate(suite)`` runs a case, or one with a mistake in the kernel, and returns what is wrong with its result."""
    return functools.cache(
        lambda suite: scan_columns_on_cpu.emulator(tmp_path_factory.mktemp("emulated"), *SUITES[suite])
    )


@pytest.mark.parametrize(("suite", "name"), [(s, name) for s, (cases, _) in SUITES.items() for name in cases])
def test_it_is_right(emulate, suite, name):
    assert [emulate(suite)(name, seed=seed) for seed in range(3)] == [""] * 3


@pytest.mark.parametrize(("suite", "mistake"), [(s, name) for s, (_, mistakes) in SUITES.items() for name in mistakes])
def test_a_mistake_is_noticed(emulate, suite, mistake):
    of = SUITES[suite][1][mistake][0]
    assert any(emulate(suite)(of, mistake, seed) for seed in range(8))


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


# ---- what it costs, declines and is chosen for -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", SCANS)
def test_an_element_takes_few_instructions(name, dtype):
    """Of the loop over steps; at the ceiling there is time for 28 of a 16-bit element and for 56 of a 32-bit one."""
    loop = scan_columns_on_cpu.loop_of(SCANS[name], dtype)
    if name == "logarithm":
        assert len(loop) / 32 <= (26 if dtype == BF16 else 40)
        assert 2 <= sum(name.startswith("MUFU") for name in loop) / 32 <= 2.6
    else:
        assert len(loop) / (8 * 16 // dtype.itemsize) <= 12


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", SCANS)
def test_every_kernel_compiles_and_spills_nothing(name, sm, dtype):
    scan_columns_on_cpu.check_every_kernel(SCANS[name], dtype, sm)


def test_it_declines_what_it_cannot_take():
    def why(x: torch.Tensor, dim: int = 0) -> str:
        with pytest.raises(Declined) as declined:
            scan_columns_on_cpu.plan_of(running_sum, x, dim)
        return str(declined.value)

    assert "16 bytes" in why(torch.empty(8, 9, device="meta"))
    assert "16 bytes" in why(torch.empty(8, 9, 10, device="meta")[..., :8], 1)
    assert "side by side" in why(torch.empty(8, 4, 9, 2, device="meta")[..., 0], 1)


def test_a_step_is_no_longer_than_its_rows():
    """Threads that would find no row are left out, down to a warp."""
    for n, threads in ((2**14, 256), (40, 64), (3, 32)):
        x = torch.empty(64, n, 64, dtype=BF16, device="meta")
        assert scan_columns_on_cpu.plan_of(running_sum, x, 1).scan.block == threads


@pytest.mark.parametrize(
    ("shape", "chosen"), [((64, 2**9, 64), "cuda"), ((2**12, 8, 64), "triton"), ((2**12, 64, 8), "triton")]
)
def test_triton_takes_few_rows(monkeypatch, shape, chosen):
    monkeypatch.setattr(dispatch, "INTERPRETING", False)
    with compiling_for(90, lambda *kernel: None):
        x = torch.empty(shape, dtype=BF16, device="meta")
        for direction in ("forward", "backward"):
            assert ops.explain("cumsum", x, 1, direction=direction).implementation == chosen

"""Logarithms of running sums down columns without a GPU: ``logarithm_columns.cu`` run on a CPU that plays its PTX
(``ptx_on_cpu.hpp``) with the launches that Python computes; what it compiles to and declines."""

from __future__ import annotations

import functools

import pytest
from scan_on_cpu import further_off_than_a_logarithm

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import scan_columns_on_cpu  # noqa: E402
from scan_columns_on_cpu import BF16, FP16, FP32  # noqa: E402

from weft.definition import ARCHITECTURES  # noqa: E402
from weft.operators.scan.logcumsumexp import scan  # noqa: E402

Case = functools.partial(scan_columns_on_cpu.Case, scan, torch.logsumexp, further_off_than_a_logarithm)

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


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    return scan_columns_on_cpu.player(tmp_path_factory.mktemp("played"), CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert [play(name, seed=seed) for seed in range(3)] == [""] * 3


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    assert any(play(MISTAKES[mistake][0], mistake, seed) for seed in range(8))


# ---- what it costs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 26), (FP32, 40)], ids=["bf16", "fp32"])
def test_an_element_takes_few_instructions(dtype, most):
    """Of the loop over steps; at the ceiling there is time for 28 of a 16-bit element and for 56 of a 32-bit one."""
    loop = scan_columns_on_cpu.loop_of(scan, dtype)
    assert len(loop) / 32 <= most and 2 <= sum(name.startswith("MUFU") for name in loop) / 32 <= 2.6


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_kernel_compiles_and_spills_nothing(sm, dtype):
    scan_columns_on_cpu.check_every_kernel(scan, dtype, sm)

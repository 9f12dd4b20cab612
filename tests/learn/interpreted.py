"""Kernels that are right, out of bounds and racing, recorded; run by test_interpreter.py under each Triton of CI."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from weft.learn import interpreter

ORDERS = ("", "shuffled", "interleaved")


@triton.jit
def add(x, y, out, n, width, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def every_other(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + 2 * i))


@triton.jit
def before(x, out):
    tl.store(out, tl.load(x - 1) + tl.load(x))


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + i, mask=i < n, other=0.0))
    if ATOMIC:
        tl.atomic_add(out, part)
    else:
        tl.store(out, tl.load(out) + part)


@triton.jit
def last_adds_up(x, parts, done, out, n, G, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + program, tl.sum(tl.load(x + i, mask=i < n, other=0.0)))
    if tl.atomic_add(done, 1) == G - 1:
        j = tl.arange(0, 16)
        tl.store(out, tl.sum(tl.load(parts + j, mask=j < G, other=0.0)))


@triton.jit
def same_place(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i // 2, tl.load(x + i))


@triton.jit
def rows(x, out, M, N, stride_m, stride_n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, N, BLOCK):  # with an argument: NumPy 2.4 needs the adapter's help under Triton 3.6
        i = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.exp(tl.load(x + row * stride_m + i * stride_n, mask=i < N, other=float("-inf"))))
    tl.store(out + row, total)


@triton.jit
def sum_of_masked(x, out, n, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < n, other=0) if OTHER else tl.load(x + i, mask=i < n)
    tl.store(out, tl.sum(values.to(tl.float32)))


@triton.jit
def product(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


def run(kernel, grid, *args, order="", **meta):
    with interpreter.recording({"order": order, "seed": 7}) as launches:
        kernel[grid](*args, **meta)
    (launch,) = launches
    return launch.counts, [en for en, _ in launch.problems]


x, y = torch.randn(100), torch.randn(100)
for order in ORDERS:
    out = torch.full((100,), float("nan"))
    counts, problems = run(add, (4,), x, y, out, 100, 100, order=order, BLOCK=32)
    assert torch.equal(out, x + y) and not problems, problems
    assert counts["bytes_read"] == 800 and counts["bytes_written"] == 400 and counts["flops"] == 128, counts
    assert (counts["sectors_read"], counts["loads"], counts["stores"], counts["programs"]) == (26, 8, 4, 4), counts

    guard = torch.full(
        (104,), 7.0
    )  # the mask lets four elements too many through: memory beyond the view stays as it is
    counts, problems = run(add, (4,), x, y, guard[:100], 100, 104, order=order, BLOCK=32)
    assert (guard[100:] == 7).all() and counts["bytes_written"] == 400
    assert (
        "add reads x[100], but x has 100 elements (program 3, position [4] of the block, and 3 more lanes"
        in problems[0]
    )
    assert any("add writes out[100]" in p for p in problems), problems

    for atomic in (True, False):
        out = torch.zeros(1)
        counts, problems = run(total, (4,), x, out, 100, order=order, BLOCK=32, ATOMIC=atomic)
        assert bool(problems) != atomic, (order, problems)
        assert counts["atomics"] == (4 if atomic else 0)
        if atomic:
            torch.testing.assert_close(out[0], x.sum())
        else:
            assert "race: program" in problems[0] and "out[0]" in problems[0], problems
    if order == "interleaved":
        assert abs(out[0] - x.sum()) > 1e-3  # an update was lost, as on a GPU

    parts, done, out = torch.zeros(16), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    _, problems = run(last_adds_up, (4,), x, parts, done, out, 100, 4, order=order, BLOCK=32)
    torch.testing.assert_close(out[0], x.sum())
    assert not problems, problems  # the atomic orders the writes before the reads

counts, problems = run(every_other, (1,), torch.randn(128), torch.empty(64), BLOCK=64)
assert (counts["sectors_read"], counts["sectors_written"], counts["bytes_read"]) == (16, 8, 256), counts

two = torch.randn(4)
_, problems = run(before, (1,), two[2:], torch.empty(1))
assert "before reads x[-1], but x has 2 elements (program 0" in problems[0], problems

_, problems = run(same_place, (1,), torch.randn(32), torch.empty(16), BLOCK=32)
assert "two positions of one store write different values to out[0]" in problems[0], problems

matrix = torch.randn(8, 5).T  # strided: 5 rows of 8, neighbours 5 apart
out = torch.empty(5)
counts, problems = run(rows, (5,), matrix, out, 5, 8, *matrix.stride(), BLOCK=4)
torch.testing.assert_close(out, matrix.exp().sum(1))
assert not problems and counts["flops"] == 5 * (8 + 6 + 2), counts

for kind in (torch.float32, torch.float16, torch.int32):  # masked off without other: undefined on a GPU, so not 0
    for other in (True, False):
        out = torch.zeros(1)
        _, problems = run(sum_of_masked, (1,), torch.ones(10).to(kind), out, 10, BLOCK=16, OTHER=other)
        assert (out[0] == 10) == other and not problems, (kind, other, out)

a, b, c = torch.randn(32, 32), torch.randn(32, 32), torch.empty(32, 32)
counts, problems = run(product, (1,), a, b, c, N=32)
torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)
assert counts["flops"] == 2 * 32**3 and not problems, counts

out = torch.full((100,), float("nan"))
add[(4,)](x, y, out, 100, 100, BLOCK=32)  # outside a recording the interpreter is as it was
assert torch.equal(out, x + y)
sys.stdout.write(f"all right with Triton {triton.__version__}\n")

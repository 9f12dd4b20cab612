"""Logarithms of running sums of exponentials on the CPU emulator; what they compile to and decline."""

import dataclasses
import re

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, FP32, FRAME, Launched, Suite, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from sass import names, sass, spills_nothing
from scan_on_cpu import VALUES, further_off_than_a_logarithm

from weft import ops
from weft.definition import ARCHITECTURES, Declined
from weft.operators.configs import Config
from weft.operators.cuda import CudaPlan
from weft.operators.launch import compiling_for
from weft.operators.scan import dispatch
from weft.operators.scan.dispatch import FORWARD
from weft.operators.scan.kernels import RowsPlan
from weft.operators.scan.logcumsumexp import scan


def rows_of(bytes_each: int, threads: int) -> Config:
    return {"BYTES": bytes_each, "THREADS": threads}


def ring_of(teams: int, warps: int, held: int, slots: int, adders: int) -> Config:
    return dict(zip(dispatch.RING, (teams, warps, held, slots, slots, adders, 1), strict=True))


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows [m, n], ``apart`` elements between two."""

    config: Config
    dtype: torch.dtype = BF16
    m: int = 3
    n: int = 1000
    reverse: bool = False
    exclusive: bool = False
    values: str = "normal"
    apart: int = 0


TWO_WARPS, BLOCKS = rows_of(32, 64), rows_of(16, 64)
RING, NARROW = ring_of(2, 2, 1, 3, 2), ring_of(1, 2, 2, 2, 1)

CASES = {
    "two warps": Case(TWO_WARPS),
    "a warp": Case(rows_of(64, 64), m=5),
    "exclusive": Case(TWO_WARPS, dtype=FP16, exclusive=True, apart=8),
    "reversed": Case(TWO_WARPS, dtype=FP16, reverse=True, apart=16),
    "both": Case(TWO_WARPS, dtype=FP32, n=400, reverse=True, exclusive=True),
    "rows side by side": Case(TWO_WARPS, m=13, n=24),
    "several rows of a warp": Case(rows_of(64, 64), m=11, n=248, reverse=True),
    "blocks": Case(BLOCKS, n=2000),
    "exclusive blocks": Case(BLOCKS, dtype=FP32, n=900, exclusive=True),
    "far apart": Case(TWO_WARPS, values="far apart"),
    "far apart, reversed": Case(rows_of(32, 32), dtype=FP32, n=500, values="far apart", reverse=True),
    "far apart, exclusive": Case(TWO_WARPS, dtype=FP32, n=500, values="far apart", exclusive=True),
    "low ends": Case(TWO_WARPS, m=13, n=32, values="low ends", reverse=True),
    "a step, exclusive": Case(TWO_WARPS, dtype=FP32, n=512, values="a step", exclusive=True),
    "not finite": Case(TWO_WARPS, m=5, n=1000, values="not finite"),
    "not finite, both": Case(BLOCKS, dtype=FP32, m=5, n=900, values="not finite", reverse=True, exclusive=True),
    "huge": Case(TWO_WARPS, m=4, values="huge"),
    "huge, exclusive": Case(TWO_WARPS, dtype=FP32, m=4, n=500, values="huge", exclusive=True),
    "rows alike": Case(TWO_WARPS, m=9, n=1003),
    "rows alike, exclusive": Case(TWO_WARPS, dtype=FP32, m=6, n=403, exclusive=True),
    "rows alike, reversed, far apart": Case(TWO_WARPS, dtype=FP16, m=9, n=999, reverse=True, values="far apart"),
    "rows alike, both, of blocks": Case(BLOCKS, dtype=FP32, m=5, n=901, values="not finite", reverse=True, exclusive=True),
    "rows alike, side by side": Case(TWO_WARPS, m=29, n=29, values="low ends"),
    "rows alike, reversed": Case(TWO_WARPS, m=9, n=999, reverse=True),
    "rows anywhere": Case(TWO_WARPS, m=9, n=1003, apart=2, values="far apart"),
    "rows anywhere, reversed": Case(rows_of(64, 64), dtype=FP16, m=11, n=251, apart=1, reverse=True, exclusive=True),
    "a ring": Case(RING, m=2, n=512 * 35 + 40),
    "a reversed ring": Case(NARROW, dtype=FP32, n=256 * 3 + 12, reverse=True, m=4),
    "a ring, far apart": Case(RING, n=512 * 5 + 40, values="far apart", exclusive=True),
    "a ring, not finite": Case(NARROW, dtype=FP16, m=5, n=1024 * 2 + 8, values="not finite", reverse=True),
}  # fmt: skip

MISTAKES = {
    "strips are never apart": ("far apart", "&& first < Op::LEAST &&", "&& false &&"),
    "the other end of a vector": ("low ends", "e[0][REVERSE ? COUNT - 1 : 0]", "e[0][0]"),
    "of the first row only": ("low ends", "lane % LANES == 0 && first", "lane == 0 && first"),
    "nothing before a strip apart": ("far apart", "carry = Op::join(carry, strip.total);", ";"),
    "vectors apart in another place": ("far apart, reversed", "(REVERSE ? -LANES : LANES) * COUNT", "LANES * COUNT"),
    "a strip apart has no end": ("far apart", "const bool there = v * LANES < left;", "const bool there = true;"),
    "alone a carry is lost": ("a step, exclusive", "i == 0 && before[v] == 0.f ? Op::value(carry) :", ""),
    "infinite tops": ("not finite", "return fminf(fmaxf(x, -LARGEST), LARGEST);", "return x;"),
    "infinities apart": ("not finite", "a == b ? 0.f : fabsf(a - b)", "fabsf(a - b)"),
    "the smaller is the top": ("a ring", "fmaxf(a, b), 1.f +", "fminf(a, b), 1.f +"),
    "a share of all": ("two warps", "share = exponential(top - base)", "share = 1.f"),
    "a carry of all": ("two warps", "run = carry.y * exponential(carry.x - base) +", "run = carry.y +"),
    "warps of other tops": ("blocks", "warp_sum(total.y * exponential(total.x - top))", "warp_sum(total.y)"),
    "blocks before of another top": ("blocks", "a.y * exponential(a.x - top) +", "a.y +"),
    "a tile's carry counts once": ("a ring", "exponential(value - finite(value))}", "2.f}"),
    "tops of lanes": ("two warps", "top = fmaxf(top, __shfl_xor_sync(ALL, top, step));", "top = top;"),
    "nothing has a logarithm": ("not finite, both", "bits - 0x00800000u < 0x7f000000u ? beyond : 0u", "beyond"),
    "an adder of other strips": ("a ring", "((s * ADDERS + adder) * VECTORS + v) * 32 + lane));\n          sum",
                                 "(s * ADDERS * VECTORS + v) * 32 + lane));\n          sum"),
    "groups of sums": ("a ring", "joined[i] = Op::of_lanes(joined[i]);", ";"),
    "published too early": ("blocks", "phase_wait(arrived, 0);", ""),
    "nothing before a strip apart, anywhere": ("rows anywhere", "carry = Logarithms<T>::join(carry, strip.total);", ""),
    "the wrong way through a strip apart": (
        "rows alike, reversed, far apart", "first += REVERSE ? -STEP : STEP;", "first += STEP;"),
    "what lies before a row": ("rows alike", "if (at(0) == 0) held", "if (false) held"),
    "what lies behind a reversed row": ("rows alike, reversed", "if (at(0) == 0) held", "if (false) held"),
    "a strip apart from its tile": ("a ring, far apart", "- at(0), lane, before);", "- at(0), lane, carry[entry]);"),
}  # fmt: skip


class Rows(Launched):
    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        x = torch.randn(case.m, case.n, generator=g)
        VALUES[case.values](x)
        self.x = torch.full((case.m, case.n + case.apart), 7.0, dtype=case.dtype)[:, : case.n]
        self.x.copy_(x)
        self.want = scan.reference(self.x.double(), -1, exclusive=case.exclusive, reverse=case.reverse)
        patch.setattr(scan.rows, "trial", case.config)
        patch.setattr(dispatch, "multiprocessors", lambda device: 3)
        with compiling_for(90, lambda *kernel: None):
            made = FORWARD.kernel("cuda").of((self.x,), scan, -1, case.exclusive, case.reverse, case.dtype)
        assert bool(made.words) == ("TEAMS" in case.config)
        self.words = made.words
        self.cpp = f"""
const Any x{{job.buffers[0]}}, y{{static_cast<char *>(job.buffers[4]) + FRAME}}, state{{job.buffers[10]}};
job.run([&] {{ KERNEL({"x, state, y" if made.words else "x, y"}, SCALARS); }});
"""
        return made.launch

    def job(self) -> bytes:
        buffers = {0: self.x, 4: framed(self.want.numel() * self.x.itemsize), 10: bytes(8 * self.words)}
        return job(self.plan, self.seed, buffers, static=True)

    def what_is_wrong(self, found: bytes) -> str:
        found = found[: len(found) - 8 * self.words]
        if not frame_is_whole(found):
            return "written outside of y"
        got = tensor_of(found[FRAME:-FRAME], self.case.dtype).view_as(self.want)
        return further_off_than_a_logarithm(got, self.want)


SUITES = {"scan.cu": Suite(cuda_as_cpp.whole(dispatch.FOLDER / "scan.cu"), Rows, CASES, MISTAKES)}


def plan_of(m: int, n: int, dtype: torch.dtype, sm: int = 90, *, exclusive: bool = False) -> RowsPlan:
    x = torch.empty(m, n, dtype=dtype, device="meta")
    with compiling_for(sm, lambda *kernel: None):
        return FORWARD.kernel("cuda").of((x,), scan, -1, exclusive, False, dtype)


@pytest.mark.share(3)
@pytest.mark.parametrize(("dtype", "most"), [(BF16, (25, 2.6)), (FP32, (45, 3.0))], ids=["bf16", "fp32"])
@pytest.mark.parametrize("n", [256, 4096, 65536])
def test_an_element_takes_few_instructions(n, dtype, most):
    """Of a row in registers, from memory to memory, exchange included. At the ceiling there is time for 28 of a 16-bit element,
    3.5 of them exponentials and logarithms, and for twice as many of a 32-bit one. Strips apart have a function of their own.
    """
    plan = plan_of(2**28 // n, n, dtype).launch
    text = re.split(r"^\$\S+:", sass(plan.source, plan.expression), flags=re.M)[0]
    numbers = [int(number) for number in re.findall(r", (\d+)", plan.expression)]  # lanes, vectors, rows
    held, found = numbers[1] * numbers[2] * 16 // dtype.itemsize, names(text)
    assert len(found) / held <= most[0] and sum(name.startswith("MUFU") for name in found) / held <= most[1]


@pytest.mark.share(4)
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_nothing_is_spilled(sm, dtype):
    with pytest.MonkeyPatch.context() as patch:
        for n in (2**14, 2**20)[: 1 + (sm >= 90)]:
            patch.setattr(scan.rows, "trial", scan.rows.heuristic(sm, dtype, n))
            plan = plan_of(2**22 // n, n, dtype, sm, exclusive=True).launch
            assert spills_nothing(plan, sm)


REFUSED = [
    bad(plan_of, Declined, "registers hold none", 4, 2**20 + 1, FP32),
    bad(plan_of, Declined, "sm_90", 1, 2**15, FP32, 80),
]


def test_the_public_function_takes_it(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETING", False)
    x = torch.empty(2**6, 2**14, device="meta")
    with compiling_for(90, lambda *kernel: None):
        calls = [(dim, direction) for dim in (0, 1) for direction in ("forward", "backward")]
        chosen = {ops.explain("logcumsumexp", x, dim, direction=direction).implementation for dim, direction in calls}
    assert chosen == {"cuda"}

"""What top-k, top-p and min-p keep: ``least_kept.cu`` on the CPU emulator, the draw behind it in Triton's interpreter, and both
on a GPU beside the CPU's."""

import dataclasses

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, FP32, Launched, Suite, frame_is_whole, framed, job, tensor_of
from emulated import *  # noqa: F403
from sass import spills_nothing
from tensors import meta

from weft import ops
from weft.definition import workload
from weft.operators.cuda import CudaPlan
from weft.operators.launch import INTERPRETING, compiling_for
from weft.operators.softmax import draw_tokens as operator
from weft.operators.softmax.draw_tokens import FILTERS, DrawCall, kept_weights

NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: torch.dtype = BF16
    rows: int = 5
    v: int = 3000
    keep: str = "all"
    values: str = "normal"
    layout: str = "contiguous"
    blocks: int = 1
    temperature: float | None = None
    more: tuple[tuple[str, float], ...] = ()


CASES = {
    "top_k": Case(rows=7, keep="top_k"),
    "top_p": Case(keep="top_p"),
    "min_p": Case(rows=4, keep="min_p"),
    "all, fp32": Case(FP32, rows=10),
    "all, fp16, unaligned": Case(FP16, rows=6, v=1001, layout="sliced"),
    "few tokens": Case(rows=6, v=7),
    "one token": Case(rows=3, v=1),
    "a cluster of two": Case(rows=2, v=2001, keep="top_p", blocks=2),
    "a cluster of four": Case(FP32, rows=3, v=4001, blocks=4),
    "ties": Case(rows=6, values="ties"),
    "zeros": Case(rows=4, v=1000, values="zeros"),
    "masked": Case(FP32, rows=6, values="masked"),
    "apart": Case(FP32, rows=7, values="apart"),
    "not finite": Case(rows=6, v=600, values="nonfinite"),
    "cold": Case(FP32, rows=5, v=600, temperature=1e-29),
    "hot": Case(rows=5, v=600, temperature=100.0),
}
MISTAKES = {
    "k - 1": ("top_k", "top, from, from, 1.f, k)", "top, from, from, 1.f, k - 1)"),
    "top_p of all tokens": ("all, fp32", "search<true>(top, from, floor,", "search<true>(top, from, -infinity(),"),
    "temperature left out": ("top_p", "LOG2_E * (width / (BINS - 1) / temperature)", "LOG2_E * (width / (BINS - 1))"),
    "weights of the bin": ("all, fp32", "(bin - distance) * per_bin", "0.f * per_bin"),
    "bins beyond top_p's are left out": ("top_p", "below += scale", "below += 0 * scale"),
    "no second pass": ("all, fp32", "if (shift == 0) return", "return"),
    "-0 below 0": ("zeros", "__float_as_uint(x + 0.f)", "__float_as_uint(x)"),
    "order of negative numbers": ("apart", "bits >> 31 ? ~bits :", "bits >> 31 ? bits :"),
    "one block's sums": ("a cluster of two", "from < blocks; from++) all", "from < 1; from++) all"),
    "the same half of the row": ("a cluster of two", "int g = int(rank) * THREADS +", "int g ="),
    "the tail left out": ("a cluster of four", "g < groups(); g += step", "g < whole; g += step"),
    "past the row's end": ("few tokens", "f[i] = at < V ? to_float(logits[at]) : -infinity();", "f[i] = to_float(logits[at]);"),
    "not waited for": ("a cluster of two", "if (threadIdx.x < 32) phase_wait(told, exchanges / 2 % 2);", ""),
    "one buffer": ("a cluster of two", "arrived + (exchanges % 2) * blocks * SENT", "arrived"),
    "not cleared": ("all, fp32", "shared.sums[i] = 0;", ";"),
}  # fmt: skip


def arguments_of(case: Case, seed: int) -> dict:
    more = {} if case.temperature is None else {"temperature": case.temperature}
    w = workload(
        NAMES[case.dtype], R=case.rows, V=case.v, keep=case.keep, values=case.values, layout=case.layout, **more
    )
    given = operator.inputs(w, torch.Generator().manual_seed(seed), "cpu")
    if case.values == "zeros":
        given["logits"][1::2, ::2] = -0.0  # among others, so that 0 and -0 are equal
        given["logits"][::2, ::3] = -0.0
    return given


def call_of(given: dict) -> DrawCall:
    names = tuple(n for n in FILTERS if given[n] is not None)
    return DrawCall(given["logits"], given["temperature"], given["uniform"], *(given[n] for n in names), names)


class Kept(Launched):
    cpp = """
const Any x{job.buffers[0]}, t{job.buffers[1]}, k{job.buffers[2]}, p{job.buffers[3]}, m{job.buffers[5]},
    least{static_cast<char *>(job.buffers[4]) + 64};
job.run([&] { KERNEL(x, t, k, p, m, least, SCALARS); });
"""

    def planned(self, case: Case, g: torch.Generator, patch) -> CudaPlan:
        self.given = arguments_of(case, self.seed)
        if case.temperature is None:
            self.given["temperature"] = self.given["temperature"].where(self.given["temperature"] > 0, 0.7)
            self.given["temperature"][-1] = 0 if case.rows > 3 else 0.7
        patch.setattr(operator, "THREADS", 128)
        patch.setattr(operator, "multiprocessors", lambda device: case.blocks * case.rows)
        return operator.least_kept(call_of(self.given))

    def job(self) -> bytes:
        numbers = {i: self.given[n] for n, i in (("temperature", 1), ("top_k", 2), ("top_p", 3), ("min_p", 5))}
        buffers = {i: t if t is not None else b"" for i, t in numbers.items()}
        return job(self.plan, self.seed, {0: self.given["logits"], 4: framed(4 * self.case.rows), **buffers})

    def what_is_wrong(self, found: bytes) -> str:
        if not frame_is_whole(found):
            return "something is written beside the result"
        x = self.given["logits"].double()
        finite = x.amax(-1).isfinite() & ~x.isnan().any(-1)
        least = tensor_of(found[64:-64], FP32).double()[:, None]
        got = (x >= least) & (x > -INF)
        cold = self.given["temperature"][:, None] <= 0
        want = (kept_weights(x, self.given["temperature"], *(self.given[n] for n in FILTERS)) > 0) | (cold & (x > -INF))
        # weights that are 0 in float64 too are kept or not, which is the same
        t = self.given["temperature"].clamp(min=1e-30).double()[:, None]
        seen = (((x - x.amax(-1, keepdim=True)) / t) > -80) | cold
        wrong = ((got != want) & seen & finite[:, None]).any(-1)
        if not wrong.any():
            return ""
        r = int(wrong.nonzero()[0])
        return f"row {r} keeps {int(got[r].sum())} tokens, not {int(want[r].sum())}"


SUITES = {"least_kept.cu": Suite(cuda_as_cpp.whole(operator.SOURCE), Kept, CASES, MISTAKES)}


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("v", [128256, 1001])
def test_no_registers_are_spilled(dtype, v, monkeypatch):
    monkeypatch.setattr(operator, "multiprocessors", lambda device: 132)
    with compiling_for(90, lambda *kernel: None):
        for rows in (1, 256):
            numbers = [meta(rows, dtype=FP32) for _ in range(3)]
            call = DrawCall(meta(rows, v, dtype=dtype), *numbers[:2], numbers[2], ("top_p",))
            plan = operator.least_kept(call)
            assert plan.cluster == (1 if rows == 256 or v < 8192 else 8)
            assert spills_nothing(plan)


@pytest.mark.skipif(not INTERPRETING, reason="for Triton's interpreter")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_draw_from_what_is_kept(monkeypatch, dtype):
    def found(c):
        def run(logits, *rest):
            weights = kept_weights(logits.double(), c.numbers["temperature"], *(c.filters.get(n) for n in FILTERS))
            rest[-1].copy_(torch.where(weights > 0, logits.float(), INF).amin(-1))

        return run

    monkeypatch.setattr(operator, "least_kept", found)
    for seed, v in enumerate((33, 1000, 9000)):
        w = workload(dtype, R=20, V=v, keep="all")
        given = operator.inputs(w, torch.Generator().manual_seed(seed), "cpu")
        call, y = call_of(given), torch.empty(20, dtype=torch.int64)
        operator.launch(call)(*[call.logits, *call.numbers.values()], y)
        assert y.equal(operator.reference(**given))


def test_ties_stay_together():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0]]).expand(4, -1)
    none, u = torch.zeros(4), torch.tensor([0.0, 0.4, 0.7, 0.999])
    wanted = {"top_k": 2, "top_p": 0.5, "min_p": 0.9}
    for name, dtype in FILTERS.items():
        numbers = {name: torch.full((4,), wanted[name], dtype=dtype)}
        assert ops.draw_tokens(logits, none + 1, u, **numbers).tolist() == [1, 2, 4, 4]
        assert ops.draw_tokens(logits, none, u, **numbers).tolist() == [1] * 4  # greedy


def test_shares_are_those_of_the_distribution():
    """Chi squared of 40,000 draws with random numbers, of top-k, then min-p, then top-p."""
    g = torch.Generator().manual_seed(0)
    logits, draws = torch.randn(1, 30, generator=g) * 2, 40000
    rows = torch.ones(draws)
    k, p, m = torch.full((draws,), 12, dtype=torch.int32), rows * 0.9, rows * 0.02
    tokens = ops.draw_tokens(logits.expand(draws, -1), rows * 1.5, torch.rand(draws, generator=g), k, p, m)
    weights = kept_weights(logits.double(), rows[:1] * 1.5, k[:1], p[:1], m[:1])[0]
    wanted = weights / weights.sum() * draws
    counts = torch.bincount(tokens, minlength=30)
    kept = wanted > 0
    assert 3 < int(kept.sum()) < 12 and not counts[~kept].any()
    assert (
        float(((counts - wanted)[kept] ** 2 / wanted[kept]).sum()) < 35
    )  # of at most 11 free ones: 1 in 4000 is above


@pytest.mark.parametrize(("name", "value", "error", "said"), [
    ("top_k", torch.ones(2), TypeError, "'top_k' has dtype float32; expected int32"),
    ("top_p", torch.ones(3), ValueError, r"'top_p' has shape \(3,\)"),
    ("min_p", 0.5, TypeError, "'min_p' is a float"),
])  # fmt: skip
def test_what_is_refused(name, value, error, said):
    with pytest.raises(error, match=said):
        ops.draw_tokens(torch.randn(2, 5), torch.ones(2), torch.zeros(2), **{name: value})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("v", [50, 5000, 32001, 128256])
def test_a_gpu_draws_what_a_cpu_draws(dtype, v):
    """With random numbers and limits that lie anywhere: all but a few rows, alone and among others the same."""
    for seed, keep in enumerate(("top_k", "top_p", "min_p", "all")):
        g = torch.Generator().manual_seed(seed)
        given = operator.inputs(workload(dtype, R=140, V=v, keep=keep), g, "cpu")
        given["uniform"] = torch.rand(140, generator=g)
        if given["top_p"] is not None:
            given["top_p"] = torch.rand(140, generator=g)
        there = {n: t if t is None else t.cuda() for n, t in given.items()}
        got = ops.draw_tokens(**there)
        assert int((got.cpu() != operator.reference(**given)).sum()) <= 1
        for rows in (slice(0, 1), slice(3, 4), slice(40, 60)):
            some = {n: t if t is None else t[rows] for n, t in there.items()}
            assert ops.draw_tokens(**some).equal(got[rows])


@pytest.mark.gpu
def test_a_gpu_s_shares_are_those_of_the_distribution():
    g = torch.Generator("cuda").manual_seed(0)
    logits, draws = torch.randn(1, 20000, generator=g, device="cuda").bfloat16() * 3, 30000
    rows = torch.ones(draws, device="cuda")
    k, p = torch.full((draws,), 40, dtype=torch.int32, device="cuda"), rows * 0.95
    u = torch.rand(draws, generator=g, device="cuda")
    counts = torch.zeros(20000, device="cuda", dtype=torch.int64)
    for part in range(0, draws, 10000):
        at = slice(part, part + 10000)
        tokens = ops.draw_tokens(logits.expand(10000, -1), rows[at], u[at], k[at], p[at])
        counts += torch.bincount(tokens, minlength=20000)
    weights = kept_weights(logits.double(), rows[:1], k[:1], p[:1], None)[0]
    wanted = weights / weights.sum() * draws
    kept = wanted > 0
    free = int(kept.sum()) - 1
    assert not counts[~kept].any()
    assert float(((counts - wanted)[kept] ** 2 / wanted[kept]).sum()) < free + 4 * (2 * free) ** 0.5 + 8

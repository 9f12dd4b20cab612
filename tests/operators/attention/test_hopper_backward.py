"""Attention's gradients on Hopper: the kernel emulated on a CPU, what it is chosen for, and on a GPU right gradients in little
memory."""

import math
import struct
from dataclasses import dataclass
from typing import Any

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, Suite, bytes_of, difference, job, tensor_of
from emulated import *  # noqa: F403
from hopper_on_cpu import packed_maps
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE

from weft import ops
from weft.operators.attention import dispatch, hopper_backward
from weft.operators.attention.points import SCORES
from weft.operators.attention.reference import reference
from weft.operators.cuda import CTYPES
from weft.operators.launch import compiling_for

SIZES = """
const Sizes sizes = {int(job.shape[0]), int(job.shape[1]), int(job.shape[2]), int(job.shape[3]), int(job.shape[4]),
                     int(job.shape[5]), int(job.shape[6]), int(job.shape[7]), int(job.shape[8]), int(job.shape[9]),
                     int(job.shape[10])};
"""
KERNEL = """
  KERNEL(job.buffer(5), SUMS, job.buffer(10), DK, DV, job.buffer(6), job.buffer(7), job.buffer(9),
         job.map<TensorMap>(0), job.map<TensorMap>(1), job.map<TensorMap>(2), job.map<TensorMap>(3), job.map<TensorMap>(4),
         job.map<TensorMap>(5), sizes, of_k, of_k, Strides{STRIDES}, float(job.factors[0]), float(job.factors[1]), Cap{CAP});
"""
LAUNCH = f"{SIZES} const Strides of_k = {{}}; job.run([&] {{ {KERNEL} }});"
LAUNCH = LAUNCH.replace("SUMS", "job.buffer(4)").replace("DK", "job.buffer(8)").replace("DV", "job.buffer(8)")
# Of [tokens, heads, D] also what runs before and after; outputs are dq, and dk beside dv.
PACKED = (
    f"""{SIZES}
const i64 d = i64(job.factors[2]);
const Strides of_q = {{0, d, sizes.heads * d}}, of_k = {{0, d, sizes.heads / sizes.group * d}};
float *const peak = job.buffer(12), *const log_sum = peak + sizes.heads * sizes.queries;
T *const dk = job.buffer(8), *const dv = dk + sizes.keys * of_k.row;
const int tiles = sizes.heads * sizes.query_tiles;
launch(tiles, 256, 1, 0, [&] {{
  BEFORE(job.buffer(11), job.buffer(3), peak, log_sum, peak, job.buffer(5), job.buffer(9), job.buffer(6), sizes, of_q,
         of_q, 0, 1.f);
}}, tiles);
launch(job.scales[0], THREADS, 1, job.scales[1], [&] {{ {KERNEL} }}, job.scales[0]);
job.run([&] {{ AFTER(job.buffer(9), job.buffer(4), job.buffer(6), sizes, of_q, float(job.factors[0])); }});
""".replace("SUMS", "job.buffer(9)")
    .replace("DK", "dk")
    .replace("DV", "dv")
)


@dataclass(frozen=True)
class Case:
    """A call, and how many blocks draw tiles of keys."""

    b: int = 1
    h: int = 1
    g: int = 1
    s: int = 150
    t: int = 150
    d: int = 64
    dtype: torch.dtype = BF16
    causal: bool = False
    window: Any = None
    apart: bool = False
    packed: tuple = ()  # bounds of queries and of keys, among s and t tokens
    softcap: float | None = None
    mask: tuple = ()  # its shape
    blocks: int = 2


class Call:
    """The tensors of a case, and the launch of ``gradients`` that is planned for them."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        g = torch.Generator().manual_seed(seed)

        def random(heads: int, rows: int) -> torch.Tensor:
            room = torch.randn((case.b, rows, heads, case.d + 8), generator=g).to(case.dtype)
            if case.packed:
                return room[0, ..., : case.d].contiguous()  # [tokens, heads, D]
            return (
                room[..., : case.d].transpose(1, 2) if case.apart else room[..., : case.d].transpose(1, 2).contiguous()
            )

        self.q, self.do, self.k, self.v = (
            random(*n) for n in ((case.h, case.s), (case.h, case.s), (case.g, case.t), (case.g, case.t))
        )
        self.named = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
        self.mask = torch.rand(case.mask, generator=g) > 0.3
        if case.mask:
            self.mask[-1, ..., :140] = False  # a tile of keys that nothing sees
            self.named["mask"] = self.mask
        self.bounds = [torch.tensor(b, dtype=torch.int32) for b in case.packed]
        cu = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.bounds, strict=False))
        given = ({"mask": self.mask} if case.mask else {}) | cu
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        o, lse = reference(*leaves, return_lse=True, **self.named, **cu)
        self.want = torch.autograd.grad(o, leaves, self.do.double())
        self.rows = lse * hopper_backward.LOG2E  # stands for both numbers of a row
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(hopper_backward, "IN_L2", 2 * case.h // case.g * case.s * case.d * 8)
            patch.setattr(hopper_backward, "multiprocessors", lambda device: case.blocks)
            made = dispatch.options(tuple(given), case.causal, case.window, None, case.softcap, None, 0.0)
            self.o = o.detach().to(case.dtype).contiguous()
            call = dispatch.GradientCall(self.q, self.k, self.v, self.o, self.do, *given.values(), made)
            assert hopper_backward.unsupported(call) == ""
            self.plan = hopper_backward.HopperGradients(call)
        self.sums = torch.zeros(self.plan.sums)
        if case.packed:
            self.statistics = torch.full(self.plan.statistics, torch.nan)
            for t, (first, *_, end) in ((self.q, case.packed[0]), (self.do, case.packed[0]), (self.k, case.packed[1]),
                                        (self.v, case.packed[1])):  # fmt: skip
                t[:first] = t[end:] = torch.nan  # tokens of no sequence
        else:
            m, tiles = 8192 // case.d, -(-case.s // (8192 // case.d))
            base = torch.full((case.b, case.h, tiles * m), -torch.inf)
            base[..., : case.s] = torch.where(lse == -torch.inf, -torch.inf, -self.rows)
            delta = torch.zeros_like(base)
            delta[..., : case.s] = (o * self.do.double()).sum(-1).float()
            self.statistics = torch.stack([x.unflatten(-1, (tiles, m)) for x in (base, delta)], 3).contiguous()
        self.found = torch.full((2, *self.k.shape), torch.nan, dtype=case.dtype)

    @property
    def launch(self) -> str:
        _, _, _, strides, _, _, cap = self.plan.scalars
        text = PACKED if self.case.packed else LAUNCH
        text = text.replace("STRIDES", f"{strides.batch}, {strides.head}, {strides.row}")
        text = text.replace("CAP", f"{cap.cap}f, {cap.in_cap}f, {cap.out_of_cap}f").replace(
            "KERNEL", self.plan.main.expression
        )
        text = text.replace("BEFORE", self.plan.prepare[0].expression).replace("AFTER", self.plan.finish.expression)
        return text.replace("T *const", f"{CTYPES[self.case.dtype]} *const")

    def job(self) -> bytes:
        counter = torch.zeros(1, dtype=torch.int32)
        buffers = {
            0: self.q,
            1: self.k,
            2: self.v,
            3: self.do,
            4: self.sums,
            5: self.statistics,
            8: self.found,
            10: counter,
        }
        tensors = self.q, self.k, self.v, self.do, *self.found
        buffers |= dict(zip((6, 7), self.bounds, strict=False)) | {9: self.mask.view(torch.uint8)}
        maps, sizes, _, _, _, scale, log_scale, _ = packed_maps(
            lambda: self.plan.of_tensors(*tensors), buffers, [0, 1, 2, 3, 8, 8]
        )
        shape, factors = [getattr(sizes, n) for n in sizes.names], [scale.value, log_scale.value, self.case.d]
        if not self.case.packed:
            return job(self.plan.main, self.seed, buffers, maps=maps, shape=shape, factors=factors)
        buffers |= {4: torch.full_like(self.q, torch.nan), 9: torch.full_like(self.sums, torch.nan)}
        main = self.plan.main
        made = job(self.plan.finish, self.seed, buffers, maps=maps, shape=shape, factors=factors,
                   scales=(main.grid[0], main.shared_bytes))  # fmt: skip
        peak, log_sum = self.rows.floor(), self.rows - self.rows.floor()
        rows = torch.stack([peak, torch.where(peak.isinf(), 0.0, log_sum)]).float()
        more = [bytes_of(t) for t in (self.o, rows)]
        return made + struct.pack("<2q", *map(len, more)) + b"".join(more)

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or where a gradient is further off than rounding of p, ds and the result allows."""
        case = self.case
        size = self.q.nbytes if case.packed else self.sums.nbytes
        end = size + self.found.nbytes
        if case.packed:
            dq = tensor_of(found[:size], case.dtype).view(self.q.shape)
        else:
            dq = self.unpacked(tensor_of(found[:size], torch.float32))
            if dq[..., case.s :, :].any():
                return "sums behind the last query"
            dq = dq[..., : case.s, :] * self.plan.scale
        dk, dv = tensor_of(found[size:end], case.dtype).view(self.found.shape)
        if any(found[end:]):
            return "the counter is left for the next launch"
        eps = torch.finfo(case.dtype).eps
        for name, got, want in zip(("dq", "dk", "dv"), (dq, dk, dv), self.want, strict=True):
            if wrong := difference(name, got, want, eps * want.abs() + eps * want.abs().amax()):
                return wrong
        return ""

    def unpacked(self, sums: torch.Tensor) -> torch.Tensor:
        """dq, unscaled, of the order of sums in memory."""
        case = self.case
        sums = sums.view(case.b, case.h, -1, 2, 8, 4, 8, 4, 2, 2)  # .. part, column / 8, warp, r, q, half, e
        dq = sums.permute(0, 1, 2, 3, 5, 8, 6, 4, 7, 9).reshape(case.b, case.h, -1, 2, 64, 64)
        if case.d == 128:
            dq = dq.transpose(3, 4)
        return dq.reshape(case.b, case.h, -1, case.d)


CASES = {
    "causal": Case(h=4, g=2, s=140, t=140, causal=True, blocks=1),
    "128 columns": Case(d=128, s=130, t=300, causal=True, dtype=FP16, apart=True),
    "fewer keys than queries": Case(s=200, t=70, causal=True, d=128, h=2, g=1),
    "window": Case(s=260, t=250, window=(40, 30)),
    "keys that nothing sees": Case(s=70, t=400, window=(20, 0), d=128, blocks=1),
    "packed": Case(h=2, g=1, s=230, t=330, packed=((7, 80, 80, 81, 220), (5, 20, 90, 150, 320)), causal=True, blocks=3),
    "soft cap": Case(h=2, g=1, s=150, t=200, softcap=1.5, causal=True),
    "masks of keys": Case(b=2, h=4, g=2, s=70, t=270, d=128, mask=(2, 4, 1, 270), causal=True),
    "packed, 128 columns": Case(d=128, s=200, t=290, packed=((0, 70, 200), (0, 150, 290)), window=(90, 20), dtype=FP16),
}
NEXT_HEAD = "task.begin, mask_at += of_mask.head, to += i64(sizes.query_tiles - (task.end - task.begin)) * (2 * PART)"
ADD_DK = "add_product<T, D>(dk, ds"
FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
READ = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");'
MISTAKES = {
    "scores are taken before they are there": ("causal", "wgmma_wait<0>();\n        hold(s);\n        scores(", "scores("),
    "dp is taken before it is there": ("128 columns", "wgmma_wait<1>();\n          hold(dp)", "hold(dp)"),
    "dq is taken before it is there": ("causal", "wgmma_wait<1>();\n        hold(of_q)", "hold(of_q)"),
    "ds is multiplied before it is stored": ("128 columns", "if (step) barrier_wait(&ds_full[ds_before], before_parity);", ""),
    "the last ds is multiplied before it is stored": (
        "causal", "barrier_wait(&ds_full[ds_before], before_parity);\n        float of_q", "float of_q",
    ),
    "ds is not fenced": ("causal", f"{FENCE}\n        __syncwarp", "__syncwarp"),
    "two places of ds": ("128 columns", "DS_TILES = 3", "DS_TILES = 2"),
    "queries are let go before they are read": (
        "causal", "release(&q_empty[slot]), release", "release", ADD_DK, f"release(&q_empty[slot]);\n        {ADD_DK}",
    ),
    "keys are let go before dk is stored": ("causal", f"{READ}\n        barrier_arrive", "barrier_arrive"),
    "a tile of values lies where the last one did": ("causal", "v_tile = v_tiles + half * OF_KEYS", "v_tile = v_tiles"),
    "the counter stays": ("causal", "*drawn = 0;", ";"),
    "sums of another head": ("causal", NEXT_HEAD, "task.begin"),
    "a key more on the left": ("window", "sizes.left + sizes.right : -1", "sizes.left + sizes.right + 1 : -1"),
    "keys of the next sequence": ("packed", "task.own - task.n, task.key_start", "0, task.key_start"),
    "queries of the next sequence": ("packed", "max((tile + 1) * M - task.queries, 0), task", "0, task"),
    "gradients of the tile before": ("packed, 128 columns", "task.n + row >= task.own", "true"),
    "sums of the sequence before": ("packed", "(b < 0 ? 0 : min(max(bounds[b], 0), tokens) / SIZE) + b + 1", "0"),
    "rows of the tile before": ("packed", "row < rows.end && (!PACKED || row >= rows.own)", "row < rows.end"),
    "a slope of another row": ("soft cap", "of_rows + 8 * i);\n              s[at]", "of_rows);\n              s[at]"),
    "what is hidden is capped": ("soft cap", "x == -INFINITE ? x : cap", "cap"),
    "the mask of the first head": ("masks of keys", "mask_at += of_mask.head, ", ""),
    "tiles in which nothing is hidden": ("masks of keys", "!agreed(hidden[0] || hidden[1])", "true"),
    "no mask at the left edge": ("window", "task.n >= m + M - 1 + shift - sizes.left", "true"),
}  # fmt: skip
LONG = ["fewer keys than queries", "keys that nothing sees", "packed, 128 columns"]


class Statistics(Call):
    """Of packed sequences ``prepare`` alone, with a gradient of the log-sum-exp too: what the gradient of sinks is made of."""

    def __init__(self, case: Case, seed: int = 0):
        super().__init__(case, seed)
        g = torch.Generator().manual_seed(seed)
        self.sinks, self.dlse = torch.randn(case.h, generator=g), torch.randn(case.h, case.s, generator=g)
        leaf = self.sinks.double().requires_grad_()
        cu = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.bounds, strict=True))
        q, k, v = (t.double().nan_to_num() for t in (self.q, self.k, self.v))
        o, lse = reference(q, k, v, return_lse=True, sinks=leaf, **self.named, **cu)
        self.o = o.detach().to(case.dtype).contiguous()
        loss = o * self.do.double().nan_to_num()
        (self.want,) = torch.autograd.grad(loss.sum() + (lse * self.dlse).sum(), leaf)
        self.rows = torch.stack([lse.detach() * hopper_backward.LOG2E, torch.zeros_like(lse)]).float()

    @property
    def launch(self) -> str:
        return f"""{SIZES}
const i64 d = {self.case.d};
const Strides of_q = {{0, d, sizes.heads * d}};
float *const peak = job.buffer(8), *const log_sum = peak + sizes.heads * sizes.queries;
job.run([&] {{
  {self.plan.prepare[1].expression}(job.buffer(0), job.buffer(1), peak, log_sum, job.buffer(2), job.buffer(4), job.buffer(9),
                                    job.buffer(6), sizes, of_q, of_q, 1, 1.f);
}});
"""

    def job(self) -> bytes:
        sizes, statistics = self.plan.scalars[0], torch.full(self.plan.statistics, torch.nan)
        buffers = {0: self.o, 1: self.do, 2: self.dlse, 4: statistics, 6: self.bounds[0], 8: self.rows, 9: self.sums}
        numbers = [getattr(sizes, n) for n in sizes.names]
        return job(self.plan.prepare[1], self.seed, buffers, shape=numbers, factors=[])

    def what_is_wrong(self, found: bytes) -> str:
        made = tensor_of(found[: 4 * math.prod(self.plan.statistics)], torch.float32).view(self.plan.statistics)
        got = hopper_backward.gradient_of_sinks(self.sinks, made)
        return difference("the gradient of sinks", got, self.want, 2e-2 * self.want.abs().max())


OF_STATISTICS = {
    "NaN of no sequence": ("packed", "if (PACKED && !rows.of_sequence) delta = 0.f;", ""),
    "statistics of no tile": (
        "packed",
        "if (threadIdx.x < M) to[threadIdx.x] = -INFINITE, to[M + threadIdx.x] = 0.f;",
        "",
    ),
}
SUITES = {
    "hopper_backward.cu": Suite(cuda_as_cpp.whole(hopper_backward.SOURCE), Call, CASES, MISTAKES, long=LONG),
    "prepare": Suite(cuda_as_cpp.whole(hopper_backward.SOURCE), Statistics, {"packed": CASES["packed"]}, OF_STATISTICS),
}


def chosen(d=64, dv=None, dtype=BF16, sm=90, rows=100, do=None, **call):
    q, k, v = (torch.empty(2, h, rows, n, dtype=dtype, device="meta") for h, n in ((4, d), (2, d), (2, dv or d)))
    given = {n: call.pop(n) for n in ("mask", "bias", "sinks", "alibi") if n in call}
    window, scale, cap, score = (call.pop(n, None) for n in ("window", "scale", "softcap", "score"))
    made = dispatch.options(
        tuple(given), call.pop("causal", False), window, scale, cap, score, call.pop("dropout", 0.0), **call
    )
    o = torch.empty(2, 4, rows, v.shape[-1], dtype=dtype, device="meta")
    arguments = (q, k, v, o, o if do is None else do(o), *given.values(), made)
    with compiling_for(sm, lambda *kernel: None):
        declined = dispatch.BACKWARD.routes[0].why_not(dispatch.GradientCall(*arguments))
        return dispatch.BACKWARD.choose(*arguments).implementation, declined


TAKEN = [{}, {"d": 128, "dtype": FP16}, {"causal": True}, {"window": (3, 5)}, {"scale": 2.0}, {"rows": 1},
         {"sinks": torch.empty(4, device="meta")}, {"softcap": 3.0, "scale": -1.0},
         {"mask": torch.empty(2, 1, 1, 100, dtype=torch.bool, device="meta")}]  # fmt: skip


@pytest.mark.parametrize("call", TAKEN, ids=str)
def test_hopper_takes_what_it_can(call):
    assert chosen(**call) == ("hopper", "")


DECLINED = [
    ({"sm": 80}, "needs sm_90"), ({"sm": 100}, "sm_100"), ({"dtype": torch.float32}, "float32; it takes 16-bit floats"),
    ({"d": 96}, "head dims 96 and 96; it takes 64 and 128"), ({"d": 128, "dv": 64}, "head dims 128 and 64"),
    ({"softcap": 1e-9}, "a softcap of 1e-09"), ({"scale": -1.0}, "a scale of -1.0"), ({"dropout": 0.5}, "dropout"),
    ({"score": SCORES["near"]}, "score; it takes"), ({"alibi": torch.empty(4, device="meta")}, "alibi; it takes causal"),
    ({"mask": torch.empty(100, 100, dtype=torch.bool, device="meta")}, "a mask of shape (100, 100); it takes masks of keys"),
    ({"bias": torch.empty(1, 1, 1, 100, dtype=BF16, device="meta")}, "bias; it takes causal"),
    ({"do": lambda o: o[:1, :1, :1, :1].expand_as(o)}, "'do' has no contiguous dimension"),
    ({"do": lambda o: torch.empty(2, 4, 100, 68, dtype=BF16, device="meta")[..., :64]}, "do not begin on 16 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "reason"), DECLINED, ids=[reason for _, reason in DECLINED])
def test_what_it_declines_triton_takes(call, reason):
    name, declined = chosen(**call)
    assert name == "triton" and reason in declined


def test_deterministic_gradients_are_those_of_triton():
    assert chosen(deterministic=True) == ("triton", "")
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen() == ("triton", "")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("d", [64, 128])
def test_a_block_fits(d):
    assert 192 * 1024 < hopper_backward.shared_bytes(d) <= 227 * 1024


def test_tiles_of_a_section_are_counted_in_32_bits():
    q, k = (torch.empty(1, h, s, 64, dtype=BF16, device="meta") for h, s in ((4, 1), (2, 2**24)))
    call = dispatch.GradientCall(q, k, k, q, q, dispatch.options((), False, None, None, None, None, 0.0))
    sizes = hopper_backward.HopperGradients(call).scalars[0]
    assert sizes.section == 2 and sizes.section * sizes.key_tiles < 2**31


def gradients(function, tensors, do, dlse, **call):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    o, lse = function(*leaves, return_lse=True, **call)
    outputs = (o, lse) if dlse is not None else (o,)
    return torch.autograd.grad(outputs, leaves, (do, dlse)[: len(outputs)])


CALLS = [{"causal": True}, {"window": (100, 3)}, {"causal": True, "scale": 0.3}, {}]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (64, 129), (333, 300), (1025, 1025), (257, 700)])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_are_as_near_to_float64s_as_tritons(dtype, d, s, t, call):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel of sm_90")
    random = torch.Generator(DEVICE).manual_seed(s)
    q, k, v, do = (
        torch.randn(2, n, h, d, generator=random, device=DEVICE).to(dtype).transpose(1, 2)
        for n, h in ((s, 6), (t, 2), (t, 2), (s, 6))
    )
    dlse = torch.randn(2, 6, s, generator=random, device=DEVICE)
    assert ops.explain("attention", q, k, v, direction="backward", **call).implementation == "hopper"
    mine = gradients(ops.attention, (q, k, v), do, dlse, **call)
    tritons, again = (gradients(ops.attention, (q, k, v), do, dlse, deterministic=True, **call) for _ in range(2))
    exact = gradients(reference, [x.double() for x in (q, k, v)], do.double(), dlse.double(), **call)
    for x, other, same, want in zip(mine, tritons, again, exact, strict=True):
        assert other.equal(same)
        error, usual = (float((y.double() - want).norm()) for y in (x, other))
        assert error <= 1.1 * usual + 1e-3 * torch.finfo(dtype).eps * want.numel() ** 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "call", [{"causal": True, "sinks": torch.zeros(4)}, {"window": (100, 3)}], ids=["causal", "window"]
)
def test_gradients_of_packed_sequences_are_as_near_to_float64s_as_tritons(d, call):
    """With NaN in the tokens of no sequence, which get zeros."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel of sm_90")
    call = {n: t.to(DEVICE, BF16) if n == "sinks" else t for n, t in call.items()}
    bounds = [37, 37, 170, 171, 700, 828], [20, 60, 200, 200, 650, 800]
    cu = [torch.tensor(b, dtype=torch.int32, device=DEVICE) for b in bounds]
    call |= {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
    random = torch.Generator(DEVICE).manual_seed(d)
    clean = [torch.randn(900, h, d, generator=random, device=DEVICE).to(BF16) for h in (4, 2, 2, 4)]
    for t, (first, *_, end) in zip(clean, (bounds[0], bounds[1], bounds[1], bounds[0]), strict=True):
        t[:first] = t[end:] = 0.0
    *tensors, do = (torch.where(t == 0, torch.nan, t) for t in clean)
    assert ops.explain("attention", *tensors, direction="backward", **call).implementation == "hopper"
    mine, tritons = (gradients(ops.attention, tensors, do, None, deterministic=x, **call) for x in (False, True))
    wide = {n: t.double() if n == "sinks" else t for n, t in call.items()}
    exact = gradients(reference, [t.double() for t in clean[:3]], clean[3].double(), None, **wide)
    for x, other, want in zip(mine, tritons, exact, strict=True):
        error, usual = (float((y.double() - want).norm()) for y in (x, other))
        assert error <= 1.1 * usual + 1e-3 * torch.finfo(BF16).eps * want.numel() ** 0.5
    for x, (first, *_, end) in zip(mine, (bounds[0], bounds[1], bounds[1]), strict=True):
        assert not x[:first].any() and not x[end:].any()


@pytest.mark.gpu
def test_memory_beside_the_results_is_an_fp32_dq():
    q, k, v, do = (torch.randn(1, 4, 8192, 64, device="cuda", dtype=BF16) for _ in range(4))
    for t in (q, k, v):
        t.requires_grad_()
    o = ops.attention(q, k, v, causal=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o.backward(do)
    rows = 4 * 8192 * 4 * 3  # statistics
    assert torch.cuda.max_memory_allocated() - before < 5 * q.nbytes + rows + 2**20


REFUSED = [
    bad("attention", TypeError, "'deterministic' is 1; True or False", *(torch.randn(1, 2, 5, 16, device=DEVICE),) * 3,
        deterministic=1),
]  # fmt: skip

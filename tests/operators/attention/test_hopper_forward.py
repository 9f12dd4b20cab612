"""Attention's forward on Hopper: its kernel emulated on a CPU, what a launch asks for, takes and compiles to."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import BF16, FP16, Suite, difference, job, tensor_of
from emulated import *  # noqa: F403
from hopper_on_cpu import OnGpu, packed_maps
from sass import names, parts, sass

from weft.operators.attention import dispatch, hopper_forward
from weft.operators.attention.reference import reference
from weft.operators.attention.statistics import log_sum_exp
from weft.operators.launch import compiling_for

LAUNCH = """
const Sizes sizes = {int(job.shape[0]), int(job.shape[1]), int(job.shape[2]), int(job.shape[3]), int(job.shape[4]),
                     int(job.shape[5]), int(job.shape[6]), int(job.shape[7]), int(job.shape[8]), int(job.shape[9]),
                     int(job.shape[10]), int(job.shape[11]), i64(job.factors[0]), job.scales[0], job.scales[1],
                     MASK, float(job.factors[1]), CAP};
float *const statistics = job.buffer(8);
job.run([&] {
  KERNEL(job.buffer(4), statistics, statistics + sizes.all * sizes.queries, job.buffer(3), job.buffer(10),
         job.buffer(5), job.buffer(6), job.buffer(7), job.map<TensorMap>(0), job.map<TensorMap>(1),
         job.map<TensorMap>(2), sizes);
});
"""


@dataclass(frozen=True)
class Case:
    """A call, the tile of the kernel that takes it, and how many blocks draw tiles."""

    b: int = 1
    h: int = 1
    g: int = 1
    s: int = 150
    t: int = 150
    d: int = 64
    dv: int = 64
    dtype: torch.dtype = BF16
    causal: bool = False
    window: Any = None
    sinks: Any = None  # their dtype
    apart: bool = False  # [B, S, H, D] in memory, with room between rows
    packed: tuple = ()  # bounds of queries and of keys, among s and t tokens
    softcap: float | None = None
    mask: tuple = ()  # its shape
    groups: int = 2
    keys: int = 64
    stages: int = 2
    q_stages: int = 1
    turns: int = 1
    blocks: int = 2


class Call:
    """The tensors of a case, and the launch that is planned for them."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        g = torch.Generator().manual_seed(seed)

        def random(heads: int, rows: int, columns: int) -> torch.Tensor:
            if case.apart:
                room = torch.randn((case.b, rows, heads, columns + 8), generator=g).to(case.dtype)
                return room[..., :columns].transpose(1, 2)
            if case.packed:
                return torch.randn((rows, heads, columns), generator=g).to(case.dtype)
            return torch.randn((case.b, heads, rows, columns), generator=g).to(case.dtype)

        shapes = (case.h, case.s, case.d), (case.g, case.t, case.d), (case.g, case.t, case.dv)
        self.q, self.k, self.v = (random(*shape) for shape in shapes)
        self.named: dict[str, Any] = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
        self.sinks = torch.randn(case.h, generator=g).to(case.sinks or case.dtype)
        self.mask = torch.rand(case.mask, generator=g) > 0.3
        given = {"mask": self.mask} if case.mask else {}
        if case.mask:
            self.mask[..., 70:150] = False
            self.mask[-1, ..., 70:] = False  # the last tiles of keys, which are the first that are walked
            self.named["mask"] = self.mask
        given |= {"sinks": self.sinks} if case.sinks else {}
        self.bounds = [torch.tensor(b, dtype=torch.int32) for b in case.packed]
        if case.packed:
            given |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.bounds, strict=True))
            for t, (first, *_, end) in ((self.q, case.packed[0]), (self.k, case.packed[1]), (self.v, case.packed[1])):
                t[:first] = t[end:] = torch.nan  # tokens of no sequence
        made = dispatch.options(tuple(given), case.causal, case.window, None, case.softcap, None, 0.0)
        config = {name.upper(): getattr(case, name) for name in ("groups", "keys", "stages", "q_stages", "turns")}
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(hopper_forward.configuration, "trial", config)
            patch.setattr(hopper_forward, "multiprocessors", lambda device: case.blocks)
            patch.setattr(hopper_forward, "L2_SHARE", 3 * case.t * (case.d + case.dv))  # a head or two
            call = dispatch.AttentionCall(self.q, self.k, self.v, *given.values(), made)
            assert hopper_forward.unsupported(call) == ""
            self.plan = dispatch.hopper_launch(call)
        self.o = torch.full_like(dispatch.result_like(self.q, case.dv), torch.nan)
        self.statistics = torch.full((2, *(() if case.packed else (case.b,)), case.h, case.s), torch.nan)

    @property
    def launch(self) -> str:
        sizes = self.plan.sizes
        strides = f"{sizes.mask_batch}, {sizes.mask_head}, {sizes.mask_key}"
        text = LAUNCH.replace("MASK", strides).replace("CAP", f"{sizes.cap}f, {sizes.in_cap}f")
        return text.replace("KERNEL", self.plan.launch.expression)

    def job(self) -> bytes:
        counter = torch.zeros(1, dtype=torch.int32)
        buffers = {0: self.q, 1: self.k, 2: self.v, 3: self.sinks, 4: self.o, 8: self.statistics, 10: counter}
        buffers |= dict(zip((5, 6), self.bounds, strict=False)) | {7: self.mask.view(torch.uint8)}
        maps, sizes = packed_maps(lambda: self.plan.scalars(self.q, self.k, self.v), buffers, [0, 1, 2])
        numbers = [getattr(sizes, name) for name, _ in sizes._fields_]
        return job(self.plan.launch, self.seed, buffers, maps=maps, shape=numbers[:12], scales=numbers[13:15],
                   factors=[numbers[12], sizes.unit])  # fmt: skip

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or where o is further off than rounding of probabilities and result allows, or a statistic off."""
        size, end = self.o.nbytes, self.o.nbytes + self.statistics.nbytes
        o = tensor_of(found[:size], self.o.dtype).as_strided(self.o.shape, self.o.stride())
        peak, log_sum = tensor_of(found[size:end], torch.float32).view(self.statistics.shape)
        if any(found[end:]):
            return "the counter is left for the next launch"
        sinks = self.sinks.double() if self.case.sinks else None
        operands = (t.double() for t in (self.q, self.k, self.v))
        if self.case.packed:
            operands = (t.nan_to_num() for t in operands)
        cu = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.bounds, strict=False))
        want, lse = reference(*operands, sinks=sinks, return_lse=True, **self.named, **cu)
        eps = torch.finfo(self.case.dtype).eps
        wrong = difference("o", o, want, eps * want.abs() + eps * want.abs().amax())
        got = log_sum_exp(peak, log_sum, self.case.softcap is None)
        return wrong or difference("lse", got, lse, 1e-5 * lse.abs() + 1e-5)


CASES = {
    "causal": Case(b=2, h=3, g=1, s=200, t=200, causal=True, sinks=BF16),
    "fewer keys than queries": Case(s=200, t=70, causal=True, h=2, g=2, sinks=torch.float32),
    "window": Case(s=260, t=250, window=(40, 30), sinks=BF16),
    "packed": Case(
        h=3, g=1, s=250, t=260, packed=((7, 80, 80, 81, 230), (5, 20, 90, 150, 240)), causal=True, sinks=BF16
    ),
    "128 columns": Case(d=104, dv=72, s=100, t=140, keys=112, q_stages=2, apart=True),
    "more keys than queries": Case(s=70, t=300, causal=True, groups=3, dtype=FP16, blocks=3),
    "packed, window": Case(
        s=200, t=210, packed=((0, 150, 200), (0, 100, 210)), window=(30, 20), d=128, dv=128, keys=80
    ),
    "256 columns": Case(d=256, dv=256, s=70, t=120, keys=80, turns=0),
    "soft cap": Case(h=2, s=100, t=150, softcap=1.5, causal=True, sinks=BF16),
    "masks of keys": Case(b=2, h=2, s=70, t=300, mask=(2, 2, 1, 300), causal=True, keys=80),
    "160 keys": Case(d=128, dv=128, s=66, t=400, keys=160, q_stages=2),
}
MISTAKES = {
    "scores are taken before they are there": ("causal", "wgmma_wait<1>();", "wgmma_wait<2>();"),
    "values are let go before they are read": (
        "causal", "multiply_values();\n        if", "release(&v_empty[v_slot]);\n        multiply_values();\n        if",
        "multiply_values();\n        wgmma", "release(&v_empty[v_slot]);\n        multiply_values();\n        wgmma",
        "release(&v_empty[v_slot]);\n        if (++v_slot", "if (++v_slot",
    ),
    "queries are let go before they are read": (
        "causal", "int at = tile.to - 1;\n      if", "int at = tile.to - 1;\n      release(&q_empty[q_slot]);\n      if",
        "release(&q_empty[q_slot]);\n      if (++q_slot", "if (++q_slot",
    ),
    "sums are taken before they are there": ("causal", "wgmma_wait<0>();\n        hold(o_sums);\n        hold(p);", ""),
    "slots of values end in their first round": (
        "causal", "release(&v_empty[v_slot]);\n        if (++v_slot == STAGES) v_slot = 0, v_parity ^= 1;",
        "release(&v_empty[v_slot]);\n        if (++v_slot == STAGES) v_slot = 0;",
    ),
    "no warpgroup begins": ("causal", "turn_pass(next_turn);  // the first warpgroup begins", ";"),
    "the counter stays": ("causal", "if (drawn == count - 1) *counter = 0;", ""),
    "a key less on the right": ("causal", "position + sizes.right + 1)", "position + sizes.right)"),
    "no mask at the right edge": ("causal", "first + shift + sizes.right + 1)", "first + 64 + shift + sizes.right + 1)"),
    "a key less on the left": ("window", ": position - sizes.left) - begin", ": position - sizes.left + 1) - begin"),
    "no mask at the left edge": ("window", "first + 63 + shift", "first - 64 + shift"),
    "a row without keys": ("fewer keys than queries", "(masked || hidden) && now", "false && now"),
    "lanes keep their own pairs": ("causal", "upper ? w.word[k] : w.word[k | apart], apart)", "w.word[k], apart)"),
    "keys of the next sequence": ("packed", "c * 64, -lacking, tile", "c * 64, 0, tile"),
    "tiles of the sequence before": ("packed", "middle, tokens) <= tile", "middle, tokens) <= tile + 1"),
    "a cap twice as high": ("soft cap", "sizes.cap - 2.f * sizes.cap", "2.f * sizes.cap - 4.f * sizes.cap"),
    "the mask of the tile before": ("masks of keys", "const int key = at * KEYS", "const int key = (at + 1) * KEYS"),
    "other lanes' masks": ("masks of keys", "hidden[w] >>= lane % 4 * 2", "hidden[w] >>= lane % 4"),
    "a row without keys under a mask": ("masks of keys", "(masked || hidden) && now", "masked && now"),
    "columns that are not there": ("128 columns", "8 * (j + lane % 4) < sizes.columns", "true"),
}  # fmt: skip
LONG = [name for name in list(CASES)[5:] if name not in ("soft cap", "masks of keys")]
SUITES = {"hopper_forward.cu": Suite(cuda_as_cpp.whole(hopper_forward.SOURCE), Call, CASES, MISTAKES, long=LONG)}


def call_of(q, k, v, dtype=BF16, **named) -> dispatch.AttentionCall:
    """Of shapes."""
    given = {name: named.pop(name) for name in dispatch.OPTIONAL if name in named}
    chosen = [named.get(name) for name in ("window", "scale", "softcap", "score")]
    made = dispatch.options(
        tuple(given),
        named.get("causal", False),
        *chosen,
        named.get("dropout", 0.0),
        batch_invariant=named.get("batch_invariant", False),
    )
    operands = (torch.empty(shape, dtype=dtype, device="meta") for shape in (q, k, v))
    return dispatch.AttentionCall(*operands, *given.values(), made)


@pytest.mark.parametrize("d, dv", [(64, 64), (40, 24), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("masked", [False, True])
def test_what_a_launch_asks_for_fits(d, dv, masked):
    of = hopper_forward.widths(d, dv)
    for queries in (64, 1024, 2**20):
        key = 90, BF16, *of, masked, queries
        assert hopper_forward.heuristic(*key) in [*hopper_forward.candidates(*key)], "what is chosen is measured too"
    for config in hopper_forward.candidates(*key):
        assert hopper_forward.shared_bytes(config, *of) <= hopper_forward.SHARED
        assert config["KEYS"] % 16 == 0 and 64 * config["GROUPS"] <= 256 and config["KEYS"] <= 256, "a box of TMA"


def test_a_launch_maps_the_tensors_where_they_lie(launched, monkeypatch):
    monkeypatch.setattr(hopper_forward, "flags_of", lambda device, count: torch.zeros(count, dtype=torch.int32))
    q, k, v = (torch.empty(2, 300, h, 128, dtype=BF16).transpose(1, 2).as_subclass(OnGpu) for h in (8, 2, 2))
    o = dispatch.result_like(q, 128)
    with compiling_for(90, lambda *kernel: None):
        causal = dispatch.options((), True, None, None, None, None, 0.0)
        made = dispatch.hopper_launch(dispatch.AttentionCall(q, k, v, causal))
    peak, log_sum = torch.empty(2, 2, 8, 300).unbind()
    made(q, k, v, o, peak, log_sum, *[q] * 7, 0, 0)
    ((plan, tensors),) = launched
    assert [m.opaque[0] for m in plan.scalars[:3]] == [t.data_ptr() for t in (q, k, v)]
    assert list(plan.scalars[0].opaque[2:6]) == [128, 300, 8, 2], "columns, queries, heads, batches"
    assert list(plan.scalars[0].opaque[6:9]) == [8 * 256, 256, 300 * 8 * 256], "bytes from one to the next"
    assert [t.data_ptr() for t in tensors[:4]] == [t.data_ptr() for t in (o, peak, log_sum, q)] and not tensors[4].any()
    sizes = plan.scalars[3]
    assert (sizes.o_batch, sizes.o_head, sizes.o_row) == o.stride()[:3] and sizes.all == 16 and sizes.group == 4


def test_what_it_does_not_take_has_a_reason():
    heads, mask = (2, 4, 100, 64), torch.empty(100, 100, dtype=torch.bool, device="meta")
    bias = torch.empty(100, dtype=BF16, device="meta")
    declined = {
        "float32": {"dtype": torch.float32}, "a mask of shape (100, 100)": {"mask": mask}, "softcap": {"softcap": 1e-9},
        "dropout": {"dropout": 0.1}, "bias": {"bias": bias},
        "not positive": {"scale": -1.0}, "head dims 60": {"d": 60}, "and 264": {"dv": 264},
    }  # fmt: skip
    with compiling_for(90, lambda *kernel: None):
        assert hopper_forward.unsupported(call_of(heads, heads, heads, causal=True, window=(3, None))) == ""
        taken = {"mask": mask[None, :1], "softcap": 30.0, "scale": -1.0}
        assert hopper_forward.unsupported(call_of(heads, heads, heads, **taken)) == ""
        for words, named in declined.items():
            d = named.pop("d", 64)
            of_v = named.pop("dv", d)
            call = call_of((2, 4, 100, d), (2, 4, 100, d), (2, 4, 100, of_v), **named)
            assert words in hopper_forward.unsupported(call)
        assert "0 keys" in hopper_forward.unsupported(call_of(heads, (2, 4, 0, 64), (2, 4, 0, 64)))
        sliced = call_of(heads, heads, heads)
        sliced.views["k"] = torch.empty(2, 4, 100, 65, device="meta", dtype=BF16)[..., :64]
        assert "16 bytes" in hopper_forward.unsupported(sliced)
    with compiling_for(100, lambda *kernel: None):
        assert "sm_100" in hopper_forward.unsupported(call_of(heads, heads, heads))


def test_batch_invariant_launches_depend_on_a_sequence_alone():
    """Kernel and tiles of few and of many sequences, of short and of long ones packed with the same one."""

    def made(batches, tokens, packed, invariant):
        q, k = ((batches * tokens, h, 64) if packed else (batches, h, tokens, 64) for h in (4, 2))
        cu = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.empty(batches + 1, dtype=torch.int32, device="meta"))
        call = call_of(q, k, k, window=(700, None), causal=True, batch_invariant=invariant, **(cu if packed else {}))
        with compiling_for(90, lambda *kernel: None):
            name = dispatch.FORWARD.choose(call.q, call.k, call.v, *call.given.values(), call.options).implementation
            launch = dispatch.hopper_launch(call)
        return name, launch.launch.expression

    for few, many in (((1, 50, False), (100, 50, False)), ((1, 600, True), (40, 5000, True))):
        assert made(*few, False) != made(*many, False)
        assert made(*few, True) == made(*many, True)


@pytest.mark.share(2)
@pytest.mark.parametrize("d", [64, 128])
def test_products_run_beside_the_softmax(d):
    """Two groups of products a step, none of which waits for another; the inner loop has nothing but an exponential, a
    multiply-add, a maximum and a sum for each score, its rounding, and a product for each sum."""
    shape = (1, 16, 4096, d)
    with compiling_for(90, lambda *kernel: None):
        launch = dispatch.hopper_launch(call_of(shape, shape, shape, causal=True)).launch
    text = sass(launch.source, launch.expression)
    assert len(re.findall(r"GMMA.*gsb0", text)) == 6, "of the first and the last product, and of two kinds of steps"
    unmasked = (names(part) for part in parts(text) if "FSEL" not in part)
    count = Counter(name.split(".")[0] for name in max(unmasked, key=lambda part: part.count("MUFU.EX2")))
    assert count["MUFU"] <= 66 and count["FFMA"] <= 70 and count["FMNMX"] <= 70 and count["F2FP"] == 32
    assert count["FADD"] <= 66 and count["FMUL"] <= d // 2 + 4 and count["MOV"] <= 8

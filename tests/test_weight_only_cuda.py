"""The CUDA C++ kernel of products with quantised weights without a GPU: run on a CPU that plays its PTX (``ptx_on_cpu.hpp``)
with the launch that Python computes; what it compiles to; what it declines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from cuda_as_cpp import whole
from cuda_on_cpu import bytes_of, further_off_than_rounding, job, player, tensor_of
from sass import names, parts, sass

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from few_row_products import FewRows  # noqa: E402

from weft.definition import ARCHITECTURES, Declined  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.matmul import skinny_cuda, weight_only_cuda  # noqa: E402
from weft.operators.matmul.quantized_weight import (  # noqa: E402
    QuantizedWeight,
    quantize_weight,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A product, and the block that computes it: ``shape`` is warps down, warps along K, blocks of a cluster."""

    format: str
    group: int = 0
    zero: bool = False
    biased: bool = False
    dtype: torch.dtype = BF16
    scale: torch.dtype = FP32
    m: int = 3
    n: int = 20
    k: int = 1032
    x: str = "rows"  # "padded", "off by one", "across" or "strided"
    shape: tuple[int, int, int] = (2, 1, 1)
    room: int = 0  # bytes of shared memory; 0: as much as there is
    codes: str = "random"  # or "all"


CASES = {
    "int4": Case("int4", 128, k=1152),
    "int4, fp16, all codes": Case("int4", 128, dtype=FP16, scale=FP16, k=512, m=8, codes="all"),
    "int4, all codes": Case("int4", 128, scale=BF16, k=512, m=8, codes="all"),
    "int4, 16 tokens, zero points, bias": Case("int4", 128, True, True, scale=BF16, m=16, k=1664, shape=(1, 2, 2)),
    "int4, 16 tokens": Case("int4", 128, m=16, n=33, k=2176, scale=BF16),
    "int4, groups of 64": Case("int4", 64, True, m=9, k=1088, n=33, shape=(2, 2, 1), scale=FP16),
    "int4, groups of 32, fp16": Case("int4", 32, True, dtype=FP16, scale=FP16, m=13, k=1056, n=40, shape=(2, 1, 2)),
    "int4, a cluster of 8": Case("int4", 128, m=1, n=37, k=5 * 512 + 128, shape=(1, 1, 8), biased=True),
    "int8": Case("int8", m=1, n=16, k=256, codes="all"),
    "int8, fp16": Case("int8", dtype=FP16, m=8, n=16, k=256, codes="all", biased=True),
    "int8, a cluster of 4": Case("int8", m=16, n=72, k=1500, shape=(4, 1, 4)),
    "int8, groups of 32": Case("int8", 32, m=5, n=17, k=1120, shape=(1, 4, 2), scale=BF16),
    "int8, x in two stages": Case("int8", m=4, n=19, k=2056, shape=(1, 2, 1), room=6 * 1024),
    "int8, x in stages, cluster of 2": Case("int8", m=2, n=19, k=4000, x="padded", shape=(2, 2, 2), room=4 * 1024),
    "fp8": Case("fp8", m=8, n=16, k=256, codes="all"),
    "fp8, fp16": Case("fp8", dtype=FP16, m=8, n=16, k=256, codes="all"),
    "fp8, 16 tokens": Case("fp8", m=16, n=9, k=777, x="across", biased=True, shape=(2, 2, 1)),
    "fp8, groups of 64, fp16": Case("fp8", 64, dtype=FP16, scale=FP16, m=2, k=320, shape=(1, 2, 1)),
    "padded rows": Case("int4", 128, m=7, k=896, x="padded"),
    "rows off by one element": Case("int4", 128, m=2, k=896, x="off by one"),
    "strided columns": Case("int8", m=2, k=130, x="strided"),
    "one element": Case("int8", m=1, n=1, k=1),
    "no terms": Case("int8", m=2, n=5, k=0, biased=True, shape=(2, 2, 1)),
    "no terms, a cluster": Case("fp8", m=2, n=5, k=0, shape=(2, 2, 2)),
    "16 bits": Case("wide", biased=True, m=5, n=37, k=640, shape=(1, 2, 2)),
    "16 bits, fp16, 16 tokens": Case("wide", dtype=FP16, m=16, n=40, k=384, x="padded", shape=(2, 1, 1)),
    "fewer steps than warps": Case("int8", m=3, n=70, k=256, shape=(1, 4, 2)),
}

# Mistakes: a case, what stands in weight_only.cu, what is written instead. Each must be noticed with some seed.
MISTAKES = {
    "x's columns in another order": ("int4", "+ quarter * 8;", "+ quarter * 4;"),
    "a slice left out": ("int4", "slice<3, LENGTH, T, FORMAT>(sums, held[r][0], held[r][1], at, from, mask, minus);", ""),
    "the wrong bits of a word": ("int4", "fma_pair(bf16{}, (word >> 4 * SLICE", "fma_pair(bf16{}, (word >> 3 * SLICE"),
    "the upper rows' words for the lower": (
        "int4", "pair_of<FORMAT, SLICE>(T{}, lower.word", "pair_of<FORMAT, SLICE>(T{}, upper.word"),
    "int8's eighth bit kept": ("int8", "bits_of<WITHOUT>", "bits_of<UNDER>"),
    "fp8's sign left out": (
        "fp8", "return fma_pair(bf16{}, (size & mask) | sign, 0x7b80", "return fma_pair(bf16{}, (size & mask), 0x7b80"),
    "fp8's factor left out": ("fp8, fp16", "return 256.f;", "return 1.f;"),
    "the next group's scale": (
        "int4, groups of 64", "to_float(by[group / 4][h]), group % 4", "to_float(by[group / 4][h]), (group + 1) % 4"),
    "the upper row's zero point": (
        "int4, 16 tokens, zero points, bias", "u32(off[group / 4][h])", "u32(off[group / 4][0])"),
    "scales fetched a step late": (
        "int4, groups of 64", "more) fetch_groups(step + ALONG);", "more) fetch_groups(step);"),
    "the first step's scales for all": ("int4, 16 tokens", "if constexpr (!AHEAD) fetch_groups(step);", "fetch_groups(first);"),
    "sums of a group not begun anew": ("int4", ", sums[i][tile][e] = 0.f;", ";"),
    "words not moved on": ("int8, x in two stages", "for (int h = 0; h < 2; h++) next[h] += ALONG * STEP * 2;", ";"),
    "copies not waited for": ("int8", "copies_wait();\n", "\n"),
    "x overwritten while it is read": ("int8, x in two stages", "if (begin > first) __syncthreads();", ""),
    "x past K not cleared": ("int8, a cluster of 4", "unsigned short bits = 0;", "unsigned short bits = 0x3f80;"),
    "rows past N stored": ("int4", "if (column >= shape.N) continue;", ""),
    "rows past N read": ("int4", "min(n + down * 16 + h * 8 + row, shape.N - 1)", "n + down * 16 + h * 8 + row"),
    "a part left out": ("int4, groups of 64", "part < PARTS", "part < PARTS - 1"),
    "sums not waited for": ("int8, a cluster of 4", "if constexpr (BLOCKS > 1) barrier_wait(told);", ""),
    "sums told before the barrier stands": ("no terms, a cluster", "if constexpr (BLOCKS > 1) cluster_wait();", ""),
    "too few sums expected": ("int8, a cluster of 4", "(PARTS - ALONG) * OWN", "(PARTS - 2 * ALONG) * OWN"),
    "own sums not met": (
        "int8, groups of 32", "  __syncthreads();\n  if constexpr (BLOCKS > 1) barrier_wait",
        "  if constexpr (BLOCKS > 1) barrier_wait"),
    "the bias of another column": ("int4, a cluster of 8", "bias[column *", "bias[local *"),
}  # fmt: skip

LAUNCH = """
const Shape shape = *reinterpret_cast<const Shape *>(job.maps[0] + 1);
const Any x{static_cast<char *>(job.buffers[0]) + job.shape[0]};
job.run([&] { KERNEL(x, job.buffer(1), job.buffer(2), job.buffer(3), job.buffer(5), job.buffer(4), shape); });
"""


class Product(FewRows):
    """The operands of a case, and its plan."""

    def __init__(self, case: Case, seed: int = 0):
        self.case = case
        random = torch.Generator().manual_seed(seed)
        m, n, k = case.m, case.n, case.k
        x = torch.randn((m + 1) * (k + 8) * 2, generator=random).to(case.dtype)
        self.x = {
            "rows": x[: m * k].view(m, k),
            "padded": x[: m * (k + 8)].view(m, k + 8)[:, :k],
            "off by one": x[1 : m * k + 1].view(m, k),
            "across": x[: m * k].view(k, m).t(),
            "strided": x[: 2 * m * k].view(m, 2 * k)[:, ::2],
        }[case.x]
        if case.format == "wide":
            made = torch.randn(n, k + 8, generator=random).to(case.dtype)[:, :k]
            self.weight = QuantizedWeight(made, made, None, "wide", 0, k)
        elif case.codes == "all":
            self.weight = self._every_code()
        else:
            w = torch.randn(n, k, generator=random) + (0.5 if case.zero else 0)
            made = quantize_weight(w, case.format, case.group, zero_points=case.zero)
            self.weight = made._replace(scale=made.scale.to(case.scale))
        self.bias = torch.randn(n if case.biased else 0, generator=random).to(case.dtype)
        self.y = torch.full((m, n), torch.nan, dtype=case.dtype)
        words, scale, zero, *_ = self.weight
        bias = self.bias if case.biased else words
        self.tensors = (self.x, words, scale, words if zero is None else zero, self.y, bias)
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            down, along, blocks = case.shape
            trial = {"DOWN": down, "ALONG": along, "BLOCKS": blocks}
            patch.setattr(weight_only_cuda.configuration, "trial", trial)
            if case.room:
                patch.setattr(weight_only_cuda, "shared_limit", lambda sm: case.room)
            if case.format == "wide":
                self.plan = skinny_cuda.plan(self.x, words, self.bias if case.biased else None).plan
                return
            self.plan = weight_only_cuda.plan(
                self.x, words, scale, self.tensors[3], bias, case.zero, case.biased, case.format, case.group
            )

    @property
    def launch(self) -> str:
        return LAUNCH.replace("KERNEL", self.plan.expression)

    def job(self, seed: int) -> bytes:
        (shape,) = self.plan.scalars
        buffers = {i: bytes_of(t) for i, t in enumerate(self.tensors)}
        offset = self.x.data_ptr() - self.x.untyped_storage().data_ptr()
        return job(self.plan, seed, buffers, maps=bytes(8) + bytes(shape), shape=(offset,))


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with y."""
    folder, text = tmp_path_factory.mktemp("played"), whole(weight_only_cuda.SOURCE)
    played = player(folder, text, lambda name: Product(CASES[name]).launch, CASES, MISTAKES)

    def run(product: Product, seed: int = 0, mistake: str = "") -> str:
        found = played(product.launch, product.job(seed), mistake)
        if isinstance(found, str):
            return found
        y = tensor_of(found[: product.y.nbytes], product.y.dtype).view(product.y.shape)
        return further_off_than_rounding("y", y, product.wanted())

    return run


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    """Operands end before pages that may not be touched; threads, copies and sums take turns at random."""
    for seed in range(2):
        product = Product(CASES[name], seed)
        assert not play(product, seed)


@pytest.mark.parametrize("m", range(1, 17))
def test_any_number_of_tokens(play, m):
    of = CASES["int4, groups of 64"] if m > 8 else CASES["int4"]
    product = Product(replace(of, m=m))
    assert not play(product)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    products = (Product(CASES[MISTAKES[mistake][0]], seed) for seed in range(16))
    assert any(play(product, seed, mistake) for seed, product in enumerate(products))


# ---- what it compiles to ---------------------------------------------------------------------------------------------------


def inner_loop(expression: str) -> Counter[str]:
    """Instructions of the loop over steps on sm_90: those between two labels around the matrix instructions."""
    (loop,) = (part for part in parts(sass(weight_only_cuda.SOURCE, expression)) if "HMMA" in part)
    return Counter(name.partition(".")[0] for name in names(loop))


@pytest.mark.parametrize(
    ("format", "group", "m", "most"),
    [("int4", 128, 1, 1.9), ("int4", 128, 16, 2.2), ("int8", 0, 1, 2.2), ("fp8", 0, 1, 2.7), ("fp8", 0, 16, 2.9)],
)
def test_instructions_a_weight_are_those_that_the_readme_counts(format, group, m, most):
    """A step is 16 rows of 64 words for a warp: 256 weights a lane in 4 bits, 128 in 8."""
    x = torch.empty(m, 8192, dtype=BF16, device="meta")
    words = torch.empty(8192, 1024 if format == "int4" else 2048, dtype=torch.int32, device="meta")
    scale = torch.empty(8192, 64, dtype=BF16, device="meta") if group else torch.empty(8192, device="meta")
    with compiling_for(90, lambda *kernel: None):
        made = weight_only_cuda.plan(x, words, scale, words, words, False, False, format, group)
    counts = inner_loop(made.expression)
    weights = 256 if format == "int4" else 128
    assert counts["HMMA"] == weights // 8 * (1 if m <= 8 else 2) and counts["LDG"] - 2 * bool(group) <= 8
    assert sum(counts.values()) / weights <= most


# ---- how it is launched ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(("format", "group", "zero"), [("int4", 128, False), ("int4", 32, True), ("int8", 0, False)])
def test_blocks_fit_every_architecture(sm, format, group, zero):
    for m in (1, 8, 16):
        for n, k in ((1, 1), (1, 64), (4, 4), (8, 8), (56, 8), (8, 28)):
            found = list(weight_only_cuda.candidates(sm, BF16, format, group, zero, m, n, k))
            assert found and weight_only_cuda.heuristic(sm, BF16, format, group, zero, m, n, k) in found
            assert all(c["DOWN"] * c["ALONG"] in (8, 16) and (sm >= 90 or c["BLOCKS"] == 1) for c in found)


def test_it_declines_what_it_leaves_out():
    def why(m=1, k=256, n=8, dtype=BF16, offset=0):
        words = torch.empty(n * 64 + 4, dtype=torch.int32)[offset : offset + n * 64].view(n, 64)
        x = torch.empty(m, k, dtype=dtype, device="meta")
        with pytest.raises(Declined) as declined:
            weight_only_cuda.plan(x, words, torch.ones(n), words, words, False, False, "int8", 0)
        return str(declined.value)

    assert "17 rows of x" in why(m=17) and "float32" in why(dtype=FP32)
    assert "16 bytes" in why(offset=1) and "32 bits" in why(k=2**30)

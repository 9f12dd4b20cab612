"""Products of few rows with a weight of codes on the CPU emulator of Hopper; what they compile to and decline."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from cuda_as_cpp import whole
from cuda_on_cpu import BF16, FP16, FP32, Suite, further_off_than_rounding, job, tensor_of
from emulated import *  # noqa: F403
from hopper_on_cpu import packed_maps
from sass import names, parts, sass
from weight_only_cases import weight_of

from weft.operators.configs import bucket
from weft.operators.launch import compiling_for
from weft.operators.low_precision import quantized_weight, weight_only_hopper
from weft.operators.low_precision.quantized_weight import dequantize_weight


@dataclass(frozen=True)
class Case:
    """A product, and the block that computes it: ``shape`` is warpgroups down, warpgroups along K, blocks of a cluster, lines
    of a unit, stages of the ring."""

    format: str = "int8"
    group: int = 0
    zero: bool = False
    biased: bool = False
    dtype: torch.dtype = BF16
    scale: torch.dtype = FP32
    m: int = 3
    n: int = 70
    k: int = 328
    padded: bool = False  # rows of x with something between them
    shape: tuple[int, int, int, int, int] = (1, 1, 1, 2, 2)
    codes: str = "random"  # or "all"


CASES = {
    "one row, one stage of three parts": Case(m=1, n=3, k=8, shape=(1, 2, 2, 2, 4)),
    "int8": Case("int8", m=1, n=64, k=256, codes="all"),
    "int8, fp16": Case("int8", dtype=FP16, m=8, n=64, k=256, codes="all", biased=True),
    "int8, a cluster, along": Case("int8", m=16, n=72, k=1496, shape=(2, 2, 2, 2, 4)),
    "int8, 32 tokens, a cluster of 4": Case("int8", m=32, n=256, k=2048, shape=(4, 1, 4, 2, 2)),
    "int8, 32 tokens, along": Case("int8", m=32, n=65, k=4232, shape=(1, 4, 1, 2, 4)),
    "int8, groups of 32": Case("int8", 32, m=5, n=17, k=1120, shape=(1, 2, 1, 2, 2), scale=BF16),
    "int8, 40 tokens": Case("int8", m=40, n=66, k=648, padded=True),
    "int8, groups of 128, 40 tokens": Case("int8", 128, m=40, n=66, k=640, scale=FP16),
    "fp8": Case("fp8", m=8, n=64, k=256, codes="all"),
    "fp8, fp16": Case("fp8", dtype=FP16, m=8, n=64, k=256, codes="all"),
    "fp8, 16 tokens": Case("fp8", m=13, n=9, k=776, biased=True, shape=(1, 2, 2, 2, 2)),
    "fp8, groups of 64, fp16": Case("fp8", 64, dtype=FP16, scale=FP16, m=2, k=320),
    "fp8, 32 tokens, two stages": Case("fp8", m=32, n=70, k=2048, shape=(1, 2, 2, 2, 2)),
    "int4": Case("int4", 128, k=1152),
    "int4, all codes": Case("int4", 128, scale=BF16, k=512, m=8, n=64, codes="all"),
    "int4, fp16, all codes": Case("int4", 128, dtype=FP16, scale=FP16, k=512, m=8, n=64, codes="all"),
    "int4, 16 tokens, zero points, bias": Case(
        "int4", 128, True, True, scale=BF16, m=16, n=140, k=2176, shape=(2, 1, 2, 2, 2)),
    "int4, groups of 64": Case("int4", 64, True, m=9, k=1088, n=33, shape=(1, 2, 1, 2, 2), scale=FP16),
    "int4, groups of 32, fp16": Case("int4", 32, True, dtype=FP16, scale=FP16, m=13, k=1056, n=40),
    "int4, 32 tokens": Case("int4", 128, True, m=31, k=1152, n=70, scale=BF16, shape=(1, 2, 1, 2, 2)),
    "int4, 32 tokens, a cluster of 4": Case("int4", 128, m=32, k=2048, n=130, scale=BF16, shape=(2, 1, 4, 2, 2)),
    "int4, 64 tokens, groups of 32": Case("int4", 32, m=64, k=1088, n=30, scale=BF16),
    "int4, a cluster of 4": Case("int4", 128, m=1, n=37, k=2 * 512 + 128, shape=(1, 2, 4, 2, 2), biased=True),
}  # fmt: skip

MISTAKES = {
    "the upper rows' words for the lower": ("int4", "(lane / 16 ^ lane % 8)", "(lane / 16 ^ lane % 4)"),
    "rows of another warp": ("int4", "(down * 64 + warp % 4 * 16 + row) * LINE", "(down * 64 + row) * LINE"),
    "x of another slice": ("int4", "(chunk * SLICES + slice) * LENGTH + t * 16", "(chunk * SLICES) * LENGTH + t * 16"),
    "x's boxes on one another": ("int8", "column / 64 * TOKENS * LINE", "column / 64 * LINE"),
    "sums of a group not begun anew": ("int4", "!GROUPED || t)", "1)"),
    "the next group's scale": ("int4", "to_float(by[g / 4][h]), g % 4", "to_float(by[g / 4][h]), (g + 1) % 4"),
    "the upper row's zero point": ("int4, groups of 64", "u32(off[g / 4][h])", "u32(off[g / 4][0])"),
    "scales fetched a unit late": ("int4, groups of 64", "last) fetch_groups(unit + ALONG);", "last) fetch_groups(unit);"),
    "sums of a group not waited for": ("int4", "            wgmma_wait<0>();\n#pragma unroll", "#pragma unroll"),
    "a unit's slot released too early": (
        "int8, 40 tokens", "      if constexpr (!GROUPED) wgmma_wait<0>();\n", ""),
    "the other parity": ("int8, 32 tokens, along", "slot -= STAGES, parity ^= 1;", "slot -= STAGES;"),
    "fetched before the slot is empty": ("int8, 40 tokens", "barrier_wait(&empty[slot], parity);", ";"),
    "read before it has come": ("int8, 40 tokens", "barrier_wait(&full[slot], parity);", ";"),
    "a box of x left out": ("int4", "box < BOXES", "box < BOXES - 1"),
    "a part left out": ("int4, groups of 64", "part < PARTS", "part < PARTS - 1"),
    "other blocks' sums not waited for": (
        "int8, a cluster, along", "    barrier_wait(sums_arrived);\n    __syncwarp();", "    __syncwarp();"),
    "too few sums expected": ("int8, a cluster, along", "(PARTS - ALONG) * OWN", "(PARTS - 2 * ALONG) * OWN"),
    "own sums not met": (
        "int4, groups of 64", "  __syncthreads();\n  if constexpr (BLOCKS > 1) {\n    barrier_wait",
        "  if constexpr (BLOCKS > 1) {\n    barrier_wait"),
    "a slot that is another warpgroup's in the next round": (
        "int8, 32 tokens, along", "int STAGES>", "int FIT>", "constexpr int WORKERS =", "constexpr int STAGES = 5, WORKERS =",
        "STAGES % ALONG == 0", "true"),
    "arrivals through a cluster that may not have begun": (
        "int8, a cluster, along", "mbarrier.arrive.shared.b64 _, [%0];\" ::\"r\"(shared_address(barrier))",
        "mbarrier.arrive.shared::cluster.b64 _, [%0];\" ::\"r\"(remote_address(barrier, cluster_rank()))"),
    "a block leaves before what it sent has come": (
        "int8, 32 tokens, a cluster of 4", "    cluster_wait();  // and what was sent", "    // and what was sent"),
    "a block tells too early that sums have come": (
        "int8, 32 tokens, a cluster of 4", "    barrier_wait(sums_arrived);\n    __syncwarp();\n    cluster_arrive();  // what",
        "    cluster_arrive();\n    barrier_wait(sums_arrived);\n    __syncwarp();  // what"),
    "rows past N stored": ("int4", "if (column >= shape.N) continue;", ""),
    "the bias of another column": ("fp8, 16 tokens", "bias[column *", "bias[m *"),
}  # fmt: skip

LAUNCH = """
const Shape shape = *reinterpret_cast<const Shape *>(job.maps[2] + 1);
machine.stays = true;
job.run([&] {
  KERNEL(job.buffer(2), job.buffer(3), job.buffer(5), job.buffer(4), job.map<TensorMap>(0), job.map<TensorMap>(1), shape);
});
"""


class Product:
    """The operands of a case, and its plan."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        random = torch.Generator().manual_seed(seed)
        m, n, k = case.m, case.n, case.k
        self.x = torch.randn(m, k + 8 * case.padded, generator=random).to(case.dtype)[:, :k]
        self.weight = weight_of(case, random)
        self.bias = torch.randn(n if case.biased else 0, generator=random).to(case.dtype)
        self.y = torch.full((m, n), torch.nan, dtype=case.dtype)
        words, scale, zero, *_ = self.weight
        self.tensors = (self.x, words, scale, words if zero is None else zero, self.y, self.bias)
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            trial = dict(zip(("DOWN", "ALONG", "BLOCKS", "LINES", "STAGES"), case.shape, strict=True))
            patch.setattr(weight_only_hopper.configuration, "trial", trial)
            self.plan = weight_only_hopper.WeightOnlyPlan(self.x, self.weight, self.bias if case.biased else None)
        self.launch = LAUNCH.replace("KERNEL", self.plan.launch.expression)

    def wanted(self) -> torch.Tensor:
        weight = self.weight._replace(scale=self.weight.scale.double())
        y = self.x.double() @ dequantize_weight(weight, torch.float64).t()
        return y + self.bias.double() if self.case.biased else y

    def job(self) -> bytes:
        buffers = dict(enumerate(self.tensors))
        maps, shape = packed_maps(lambda: self.plan.scalars(self.x, self.weight.words), buffers, (0, 1))
        return job(self.plan.launch, self.seed, buffers, maps=maps + bytes(8) + bytes(shape), shape=(), factors=())

    def result(self, found: bytes) -> torch.Tensor:
        return tensor_of(found[: self.y.nbytes], self.y.dtype).view(self.y.shape)

    def what_is_wrong(self, found: bytes) -> str:
        return further_off_than_rounding("y", self.result(found), self.wanted())


BY_TOKENS = {8: "int8", 16: "int8, a cluster, along", 32: "fp8, 32 tokens, two stages", 64: "int8, 40 tokens"}
LAUNCHED = (*BY_TOKENS.values(), "int4")  # by tests of their own
SUITES = {"weight_only_hopper.cu": Suite(whole(weight_only_hopper.SOURCE), Product, CASES, MISTAKES, always=LAUNCHED)}


@pytest.mark.parametrize("m", [2, 4, 7, 9, 17, 24, 32, 48, 63])
def test_any_number_of_tokens(emulated, m):
    case = replace(CASES[BY_TOKENS[bucket(m, 8)]], m=m, codes="random")
    assert emulated("weight_only_hopper.cu").what_is_wrong(case) == ""


@pytest.mark.parametrize("name", ["int8, 40 tokens", "int4"])
def test_a_row_that_is_not_finite_stays_alone(emulated, name):
    product = Product(replace(CASES[name], m=3))
    product.x[1, 5] = torch.inf
    got = product.result(emulated("weight_only_hopper.cu").run(product))
    assert not got[1].isfinite().any() and got[[0, 2]].isfinite().all()


def forms(format: str, m: int, group: int = 0, n: int = 8192, k: int = 8192) -> tuple[torch.Tensor, ...]:
    """x, the weight's matrix, scales and zero points without memory."""
    x = torch.empty(m, k, dtype=BF16, device="meta")
    words = torch.empty(n, k // (8 if format == "int4" else 4), dtype=torch.int32, device="meta")
    shape = (n, k // group) if group else (n,)
    return x, words, torch.empty(shape, device="meta"), torch.empty(shape, dtype=torch.uint8, device="meta")


def expression(format: str, m: int, group: int = 0, zero: bool = False, config: dict[str, int] | None = None) -> str:
    x, words, scale, zeros = forms(format, m, group)
    with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
        patch.setattr(weight_only_hopper.configuration, "trial", config)
        weight = quantized_weight.QuantizedWeight(words, scale, zeros if zero else None, format, group, x.shape[1])
        return weight_only_hopper.WeightOnlyPlan(x, weight, None).launch.expression


@pytest.mark.share(4)
@pytest.mark.parametrize(("format", "group", "m", "most"), [
    *(("int4", 128, m, most) for m, most in ((1, 2.1), (16, 2.2), (64, 2.8))),
    *(("int8", 0, m, 2.7) for m in (1, 64)),
    *(("fp8", 0, m, 3.2) for m in (1, 64)),
])  # fmt: skip
def test_instructions_a_weight_are_those_that_the_readme_counts(format, group, m, most):
    """A warpgroup's unit is 64 rows of 256 bytes: 128 or 256 weights a lane."""
    config = {"DOWN": 2, "ALONG": 1, "BLOCKS": 2, "LINES": 2, "STAGES": 2}
    found = parts(sass(weight_only_hopper.SOURCE, expression(format, m, group, config=config)))
    loop = "".join(part for part in found if "HGMMA" in part)
    counts = Counter(name.partition(".")[0] for name in names(loop))
    weights = 256 if format == "int4" else 128
    assert counts["HGMMA"] == weights // 8 and sum(counts.values()) / weights <= most
    # the tensor cores work while codes are unpacked: waits are one a step, or none
    assert counts["WARPGROUP"] <= 2.2 * counts["HGMMA"]


WITH_ZEROS = [("int4", group, True) for group in (128, 64, 32)]


@pytest.mark.share(12)
@pytest.mark.parametrize("m", [8, 16, 32, 64])
@pytest.mark.parametrize(("format", "group", "zero"), [("int8", 0, False), ("fp8", 32, False), *WITH_ZEROS])
def test_as_many_warpgroups_as_it_allows_spill_nothing(format, group, zero, m):
    along = weight_only_hopper.warpgroups_of(m, group, zero)
    config = {"DOWN": 1, "ALONG": along, "BLOCKS": 2, "LINES": 2, "STAGES": 8}
    assert "HGMMA" in sass(weight_only_hopper.SOURCE, expression(format, m, group, zero, config))


@pytest.mark.parametrize(("format", "group", "zero"), [("int4", 128, False), ("int4", 32, True), ("int8", 0, False)])
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
def test_rings_fit_and_are_not_short(format, group, zero, tokens):
    for n, k in ((1, 1), (1, 64), (4, 4), (8, 8), (56, 8), (8, 28)):
        key = (90, BF16, format, group, zero, tokens, n, k)
        found = list(weight_only_hopper.candidates(*key))
        assert weight_only_hopper.heuristic(*key) in found
        for c in found:
            stages = c["STAGES"], c["STAGES"] + c["ALONG"]
            fewer, more = (weight_only_hopper.shared_bytes(c, format, tokens, s) for s in stages)
            assert fewer <= weight_only_hopper.SHARED < more or c["STAGES"] == 16
            assert c["STAGES"] >= max(2, c["ALONG"]) and c["STAGES"] % c["ALONG"] == 0
            assert c["DOWN"] * c["ALONG"] <= weight_only_hopper.warpgroups_of(tokens, group, zero)


def test_every_multiprocessor_has_enough_bytes_on_their_way(monkeypatch):
    """Latency times bandwidth is some 33 KB for each of 132."""
    monkeypatch.setattr(weight_only_hopper, "multiprocessors", lambda device: 132)
    for format, group in (("int8", 0), ("int4", 128)):
        for tokens in (8, 16, 32, 64):
            c = weight_only_hopper.heuristic(90, BF16, format, group, False, tokens, 8, 8)
            assert (c["STAGES"] - 1) * c["LINES"] * c["DOWN"] * 64 * 128 >= 32 * 1024
            assert 8192 // (64 * c["DOWN"]) * c["BLOCKS"] in range(120, 133)


def test_each_pair_of_addresses_gets_maps_of_its_own(launched):
    product = Product(CASES["int4"])
    made = [product.plan.scalars(x, product.weight.words)[0].opaque[0] for x in (product.x, product.x.clone())]
    assert made[0] == product.x.data_ptr() != made[1]
    x, words, scale, zero, y, bias = product.tensors
    product.plan(x, words, scale, zero, bias, y)
    ((_, tensors),) = launched
    assert [t is u for t, u in zip(tensors, (scale, zero, bias, y), strict=True)] == [True] * 4


def test_it_declines_what_it_leaves_out():
    def why(m=1, k=256, n=8, dtype=BF16, sm=90, offset=0, step=0):
        x = torch.empty(m * (k + step) + offset, dtype=dtype)[offset:].view(m, k + step)[:, :k]
        words = torch.empty(n, -(-k // 256) * 64, dtype=torch.int32)
        with compiling_for(sm, lambda *kernel: None):
            return weight_only_hopper.why_not(x, words)

    assert "65 rows of x" in why(m=65) and "float32" in why(dtype=FP32) and "sm_80" in why(sm=80)
    assert "'x' has rows" in why(offset=1) and "'x' has rows" in why(m=2, step=1) and "0 columns" in why(k=0)
    assert not why()

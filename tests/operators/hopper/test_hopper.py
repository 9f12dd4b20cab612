"""The main loop of matrix products on the CPU emulator of Hopper, in every dtype, layout and epilogue."""

import dataclasses

import cuda_as_cpp
import pytest
import torch
from cuda_on_cpu import Suite
from emulated import test_a_mistake_is_noticed, test_it_is_right  # noqa: F401
from hopper_on_cpu import BF16, FP8, FP16, FP32, INT8, LAYOUTS, Case, Product

from weft.operators.cuda import CudaError
from weft.operators.hopper import gemm

CASES = {
    **{f"bf16 {layout} 256 columns, cluster of 2": Case(layout=layout, columns=256, stages=4, cluster=2, m=392, n=520)
       for layout in LAYOUTS},
    **{f"fp16 {layout} 128 columns": Case(FP16, FP16, layout, 128, n=264) for layout in LAYOUTS},
    **{f"bf16 {layout} 128 columns, cluster of 2": Case(layout=layout, columns=128, cluster=2, m=392, n=264, clusters=1)
       for layout in LAYOUTS},
    **{f"bf16 {layout} 64 columns, batched": Case(layout=layout, matrices=3, m=136, n=72, k=72) for layout in LAYOUTS},
    **{f"bf16 {layout} 192 columns, cluster of 2": Case(layout=layout, columns=192, stages=5, cluster=2, m=392, n=456)
       for layout in LAYOUTS},
    **{f"fp16 {layout} 192 columns": Case(FP16, FP16, layout, 192, n=392, k=136, stages=4) for layout in ("NN", "NT")},
    "192 columns, fp32 out, residual": Case(columns=192, stages=4, n=264, out=FP32, residual="apart", beta=0.5),
    "192 columns, a residual in place": Case(columns=192, n=264, residual="C", alpha=0.75, biased=True, matrices=2, k=72),
    **{f"bf16 {layout} 160 columns, cluster of 2": Case(layout=layout, columns=160, stages=5, cluster=2, m=392, n=456)
       for layout in ("NT", "TT")},
    "160 columns, a residual in place": Case(FP16, FP16, columns=160, n=264, residual="C", alpha=0.75, biased=True, k=72),
    "160 columns, fp32 out, residual": Case(columns=160, stages=4, n=264, out=FP32, residual="apart", beta=0.5),
    "fp8, 160 columns, scales of rows and columns": Case(FP8, BF16, columns=160, n=328, k=400, scales="rows", amax=True),
    "256 columns, no cluster": Case(columns=256, m=136, n=264, k=136),
    "64 columns, cluster of 2, batched, padded": Case(cluster=2, matrices=2, padded=True),
    "padded, K apart": Case(FP16, BF16, "TN", padded=True),
    **{f"rows of any length, {layout}": Case(layout=layout, m=133, k=131, lacking=3) for layout in LAYOUTS},
    "rows of any length, cluster of 2": Case(columns=256, stages=4, cluster=2, m=391, n=520, k=71, lacking=7),
    "two stages, one block": Case(stages=2, m=264, n=200, clusters=1),
    "as many stages as fit": Case(stages=8, k=1032),
    "one element": Case(m=1, n=8, k=8),
    "no terms": Case(k=0, biased=True, activation="SILU"),
    "no terms, cluster of 2": Case(k=0, cluster=2),
    "fp32 out": Case(out=FP32, columns=128, n=132),
    "fp32 out, 64 columns, batched": Case(FP16, FP32, "TN", m=136, n=72, k=72, matrices=2),
    "tf32": Case(FP32, FP32, k=100),
    "tf32, cluster of 2": Case(FP32, FP32, columns=256, cluster=2, m=264, n=260, k=68),
    "fp8": Case(FP8, BF16, columns=128, k=400),
    "fp8, a scale for each tensor": Case(FP8, BF16, cluster=2, k=400, scales="tensor"),
    "fp8, scales of rows and columns": Case(FP8, FP32, columns=128, k=400, scales="rows", biased=True, activation="GELU"),
    "int8, scales of rows and columns": Case(INT8, BF16, k=400, scales="rows"),
    "int8, a scale for each tensor": Case(INT8, FP16, columns=256, cluster=2, n=264, k=400, scales="tensor", biased=True),
    **{f"fp8 in two levels, {c} columns": Case(FP8, BF16, columns=c, m=264, n=392, k=400, scales="rows", two_levels=True)
       for c in (64, 128, 192, 256)},
    **{f"{dtype} in blocks, {c} columns": Case(dtype, BF16, columns=c, cluster=min(c // 64, 2), m=264, n=392, k=400,
                                               scales="blocks", biased=c == 128)
       for dtype, c in ((FP8, 64), (FP8, 128), (FP8, 192), (FP8, 256), (INT8, 128))},
    "no terms, in blocks": Case(FP8, BF16, columns=128, k=0, scales="blocks"),
    "int32 out": Case(INT8, torch.int32, columns=128, n=132, k=400, matrices=2),
    "int8, fp32 out": Case(INT8, FP32, k=400),
    "a residual": Case(columns=256, cluster=2, m=392, n=520, k=72, residual="apart", biased=True, activation="SILU"),
    "alpha and beta, in place": Case(FP16, FP32, "TN", 128, n=136, residual="C", alpha=0.75, beta=-1.5, matrices=2, k=72),
    "alpha and beta, no terms": Case(k=0, residual="C", alpha=0.75, beta=-1.5),
    "gated": Case(columns=256, cluster=2, n=264, gated=True, activation="SILU"),
    "gated, K apart, no cluster": Case(FP16, FP16, "NN", 128, n=72, gated=True, biased=True, activation="GELU_TANH"),
    "gated, K apart, cluster of 2": Case(layout="TN", columns=128, cluster=2, m=264, n=136, gated=True, k=72),
    "gated, no cluster": Case(columns=128, n=136, gated=True, matrices=2, k=72, activation="RELU"),
    "gated, everything": Case(
        FP8, FP32, "NT", 128, n=140, k=400, cluster=2, gated=True, biased=True, activation="SILU", scales="rows",
        residual="apart", beta=0.5, amax=True),
    "gated, a scale for each tensor": Case(INT8, BF16, columns=128, k=400, gated=True, scales="tensor", activation="SILU"),
    "largest of C": Case(n=72, amax=True, biased=True, activation="GELU", k=72),
    "largest of few": Case(m=1, n=8, k=8, amax=True, biased=True, activation="GELU"),
    **{activation: Case(biased=activation != "RELU", activation=activation, k=72) for activation in gemm.ACTIVATIONS[1:]},
}  # fmt: skip

STREAMED = {
    "streamed: a wave and a bit": Case(columns=128, n=264, k=328, clusters=5, stream=True),
    "streamed: fewer tiles than blocks": Case(n=72, m=136, k=520, clusters=11, stream=True, out=FP32),
    "streamed: two waves": Case(m=392, n=200, clusters=5, k=200, stream=True),
    "streamed: one tile": Case(m=100, n=64, k=520, clusters=4, stream=True, out=FP32),
    "streamed: cluster of 2": Case(columns=256, stages=4, cluster=2, m=264, n=264, k=264, clusters=3, stream=True),
    "streamed: cluster of 2, K apart": Case(layout="TN", columns=192, cluster=2, m=264, n=392, k=264, clusters=4, stream=True),
    "streamed: 192 columns": Case(columns=192, m=136, n=392, k=264, clusters=4, stream=True, biased=True),
    "streamed: 160 columns": Case(columns=160, m=136, n=392, k=264, clusters=4, stream=True, activation="GELU"),
    "streamed: batched": Case(m=72, n=72, k=264, matrices=3, clusters=4, stream=True),
    "streamed: a residual": Case(n=72, m=392, k=328, clusters=5, stream=True, residual="C", beta=0.5, biased=True, matrices=2),
    "streamed: gated, cluster of 2": Case(
        columns=128, cluster=2, m=264, n=136, k=264, clusters=4, stream=True, gated=True, activation="SILU", amax=True),
    "streamed: everything": Case(
        FP8, FP32, "NT", 128, n=140, k=656, clusters=4, gated=True, biased=True, activation="SILU", scales="rows",
        residual="apart", beta=0.5, amax=True, stream=True),
    "streamed: two levels": Case(
        FP8, BF16, columns=256, m=264, n=392, k=528, scales="rows", two_levels=True, clusters=4, stream=True),
    "streamed: in blocks": Case(FP8, BF16, columns=128, m=264, n=264, k=656, scales="blocks", clusters=4, stream=True),
    "streamed: int8": Case(INT8, BF16, k=656, scales="rows", clusters=4, stream=True),
    "streamed: int32 out": Case(INT8, torch.int32, columns=128, n=132, k=528, matrices=2, clusters=3, stream=True),
    "streamed: tf32": Case(FP32, FP32, k=200, clusters=5, stream=True),
}  # fmt: skip
CASES.update(STREAMED)

CODES = {
    "codes": Case(BF16, FP8, columns=128, n=208, amax=True),
    "codes, 256 columns, cluster of 2": Case(
        FP16, FP8, columns=256, stages=4, cluster=2, m=264, n=400, k=136, amax=True, biased=True, activation="GELU"),
    "codes, gated, K apart": Case(
        BF16, FP8, "NN", 256, stages=4, n=144, k=72, amax=True, biased=True, gated=True, activation="SILU_FAST"),
    "codes, streamed": Case(BF16, FP8, columns=128, n=272, k=328, clusters=5, stream=True, amax=True, activation="RELU"),
}  # fmt: skip
CASES.update(CODES)

LOOSE = {
    **{f"rows of {n} begin anywhere, {layout}": Case(layout=layout, m=133, n=n, k=136, matrices=matrices)
       for n, layout, matrices in ((135, "NT", 3), (142, "NN", 0), (3, "TN", 2), (68, "TT", 3))},
    "loose, cluster of 2": Case(FP16, FP16, columns=256, stages=4, cluster=2, m=391, n=517, k=72, biased=True),
    "loose, 160 columns, streamed": Case(columns=160, m=136, n=391, k=264, clusters=4, stream=True, activation="GELU"),
    "loose, 192 columns, gated": Case(columns=256, m=70, n=131, k=72, gated=True, activation="SILU", amax=True),
}  # fmt: skip
CASES.update(LOOSE)

PLAIN = CASES["two stages, one block"]
PAIRED = dataclasses.replace(CASES["64 columns, cluster of 2, batched, padded"], k=456)
MISTAKES = {
    "the first parity": (PLAIN, "u32 parity = 1;", "u32 parity = 0;"),
    "a stage released while it is read": (PLAIN, "wgmma_wait<1>();", "wgmma_wait<2>();"),
    "the last stage not released": (PLAIN, "if (walk.to) release(before);", ""),
    "the last products not waited for": (PLAIN, "wgmma_wait<0>();\n        hold(sums);\n        if (walk.to)", "if (walk.to)"),
    "a stage's products not waited for": (
        CASES["fp8 in two levels, 64 columns"], "wgmma_wait<0>();  // the other", "// the other"),
    "the right half of 256 columns is the left": (
        CASES["fp8 in two levels, 256 columns"], "p * (COLUMNS / PARTS * LINE >> 4)", "0"),
    "a block's scales a stage late": (
        CASES["torch.float8_e4m3fn in blocks, 128 columns"], "a_by[h] = *++a_next[h]", "a_by[h] = *a_next[h]++"),
    "a block's scale of the wrong column": (
        CASES["torch.float8_e4m3fn in blocks, 256 columns"], "(column + p * (COLUMNS / PARTS)) / 128", "column / 128"),
    "a sum not begun anew": (PLAIN, "depth - walk.from + s != 0", "1"),
    "one warp releases for four": (
        PLAIN, "CONSUMERS / 32 * CLUSTER", "2 * CLUSTER", "if (lane < CLUSTER)", "if (thread < CLUSTER)"),
    "too few bytes expected": (PLAIN, "barrier_expect(&full[place], STAGE)", "barrier_expect(&full[place], A_BYTES)"),
    "both consumers take the same rows": (PLAIN, "+ mine * ATOM, b_at", ", b_at"),
    "C's rows not swizzled": (PLAIN, "vector_of_c(r, j), pack", "place_of_c + r * PITCH + j * 16, pack"),
    "half a slab's rows swizzled as a whole one's": (
        CASES["bf16 NT 160 columns, cluster of 2"], "% (PITCH / 16)", "% 8"),
    "half a slab's bytes expected as a whole one's": (
        CASES["160 columns, a residual in place"], "ADDED * 64 * PITCH", "ADDED * ATOM"),
    "C's stores not fenced": (PLAIN, 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', ""),
    "C's slab overwritten while TMA reads it": (
        PLAIN, 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // what was put before has left its place', ""),
    "tiles in groups of the wrong height": (PLAIN, "height = min(group, rows - first)", "height = group"),
    "K apart: half a step of wgmma": (CASES["padded, K apart"], "(A_ACROSS ? 2 * 8 * LINE : 32)", "(A_ACROSS ? 8 * LINE : 32)"),
    "K apart: 64 columns of B for all": (CASES["fp16 NN 128 columns"], "B_ACROSS ? ATOM : 0", "0"),
    "K apart: half of K's rows for both": (
        CASES["bf16 NN 192 columns, cluster of 2"], "rank_down * (DEPTH / CLUSTER)", "0"),
    "the third slab never put": (CASES["192 columns, a residual in place"],
        "held < SLABS; held += HELD", "held + HELD < SLABS; held += HELD"),
    "the other block's release not counted": (PAIRED, "CONSUMERS / 32 * CLUSTER", "CONSUMERS / 32"),
    "a part of B for one block only": (PAIRED, "fetch_for((1 << CLUSTER) - 1, b + (c", "fetch_for(1 << rank, b + (c"),
    "blocks that leave early": (PAIRED, "CLUSTER > 1 && s < STAGES", "CLUSTER > 2 && s < STAGES"),
    "no meeting before the first arrival": (PAIRED, "    cluster_arrive();\n    cluster_wait();\n", ""),
    "the residual fetched too early": (
        CASES["a residual"],
        'wait_group.read 0;" ::: "memory");\n      barrier', 'wait_group.read 9;" ::: "memory");\n      barrier'),
    "the residual's parity kept": (CASES["alpha and beta, in place"], "residual_parity ^= 1;", ""),
    "up taken from where gate is": (CASES["gated, no cluster"], "column + c % WIDTH", "column + c"),
    "scales of gate for up": (CASES["gated, everything"], "half * (factors.b_scales == 1 ? 1 : shape.n)", "0"),
    "rows that C does not have": (CASES["largest of few"], "+ e / 2 * 8 < shape.m &&", "< shape.m &&"),
    "a part not waited for": (STREAMED["streamed: a wave and a bit"], "while (!is);", "while (false);"),
    "a part released before all have stored it": (
        STREAMED["streamed: a wave and a bit"],
        "group_barrier(meeting);  // then thread 0's release", "// then thread 0's release"),
    "a part read before its flag was": (
        STREAMED["streamed: a wave and a bit"],
        '"r"(0) : "memory");\n  }\n  group_barrier(meeting);', '"r"(0) : "memory");\n  }'),
    "a flag left": (
        STREAMED["streamed: a wave and a bit"],
        'asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(0) : "memory");', ""),
    "a part added twice": (STREAMED["streamed: a wave and a bit"], "sums[i] += more.x", "sums[i] += 2 * more.x"),
    "only one part added": (
        STREAMED["streamed: one tile"], "share++) {", "share++) { if (share > walk.share + 1) continue;"),
    "a part of another block": (
        STREAMED["streamed: one tile"], "blockIdx.x - (share - walk.share) * CLUSTER", "0"),
    "a part of the other consumer": (STREAMED["streamed: a wave and a bit"], "(2 * block + mine) * (64", "(2 * block) * (64"),
    "the longer shares forgotten": (
        STREAMED["streamed: one tile"], "i * shape.share + min(i, shape.longer)", "i * shape.share"),
    "a residual for whoever computes": (STREAMED["streamed: a residual"], "thread == 0 && walk.from == 0", "thread == 0"),
    "scales from the first stage on": (
        STREAMED["streamed: in blocks"], "shape.m - 1)) * depths + walk.from", "shape.m - 1)) * depths"),
    "rows that begin anywhere not swizzled": (LOOSE["loose, cluster of 2"], "(i ^ r * PITCH / LINE) % CHUNKS", "i % CHUNKS"),
    "the first elements of such a row left out": (LOOSE["loose, cluster of 2"], "if (e < min(before, left)) element(e);", ""),
    "the last elements of such a row left out": (LOOSE["loose, cluster of 2"], "if (end + e < left) element(end + e);", ""),
    "such rows of the first matrix": (LOOSE["rows of 135 begin anywhere, NT"], "i64(matrix) * shape.m", "i64(0)"),
    "codes' rows not swizzled": (CODES["codes"], "vector_of_c(r, j / 2) +", "place_of_c + r * PITCH + j / 2 * 16 +"),
    "codes in the wrong half of 16 bytes": (CODES["codes"], "j % 2 * 8 + lane", "(1 - j % 2) * 8 + lane"),
    "codes of a scale that is multiplied by": (CODES["codes"], "1.f / *a_scale", "*a_scale"),
    "the largest value of codes": (
        CODES["codes, gated, K apart"], "__float_as_uint(fabsf(v[e])));", "__float_as_uint(fabsf(v[e] * inverse)));"),
    "one scale for all rows": (CASES["int8, scales of rows and columns"], "r < shape.m ? a_scale[r] : 0.f", "a_scale[row]"),
}  # fmt: skip


# told from others by its bits alone: what it adds is right in any order
ANOTHER_ORDER = {
    "parts in another order": (
        STREAMED["streamed: one tile"], "blockIdx.x - (share - walk.share) * CLUSTER",
        "blockIdx.x - ([] { static const bool is = chance(2); return is; }() ? share - walk.share : step - share) * CLUSTER"),
}  # fmt: skip
LAUNCHED = ("streamed: one tile", "64 columns, cluster of 2, batched, padded")  # by tests of their own
SUITES = {
    "gemm.cu": Suite(cuda_as_cpp.whole(gemm.SOURCE), Product, CASES, MISTAKES, ANOTHER_ORDER, share=6, always=LAUNCHED)
}


def result(emulated, product: Product, mistake: str = "") -> torch.Tensor:
    found = emulated("gemm.cu").run(product, mistake)
    assert isinstance(found, bytes), found
    return product.result(found)


@pytest.mark.parametrize("name", gemm.ACTIVATIONS[1:])
def test_sums_without_end_are_activated_as_pytorch_does(emulated, name):
    """Infinities of either sign in a row, and NaN in another."""
    product = Product(CASES[name])
    product.a[0, 0], product.a[1, 0] = torch.inf, torch.nan
    got, want = result(emulated, product), product.wanted()
    assert got[0].isposinf().equal(want[0].isposinf()) and got[0].isnan().equal(want[0].isnan())
    assert got[1].isnan().all()
    assert not got[0].isneginf().any() and bool(got[0].isnan().any()) == (name != "RELU") and got[2:].isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("name", STREAMED)
def test_streamed_tiles_are_right_in_any_order_of_blocks(emulated, name):
    for seed in range(1, 5):
        product = Product(CASES[name])
        product.seed = seed  # of the turns that threads take, with the same operands
        found = emulated("gemm.cu").run(product)
        assert isinstance(found, bytes) and product.what_is_wrong(found) == ""


@pytest.mark.parametrize("name", ["streamed: one tile", "streamed: fewer tiles than blocks"])
def test_parts_are_added_in_one_order(emulated, name):
    product = Product(CASES[name])
    assert product.plan.shape.share < -(-CASES[name].k // 64) / 2, "two parts can be added in one way only"
    assert len(set_of_results(emulated, product)) == 1


def test_another_order_is_noticed(emulated):
    product = Product(CASES["streamed: one tile"])
    assert len(set_of_results(emulated, product, "parts in another order")) > 1


def set_of_results(emulated, product: Product, mistake: str = "") -> set[bytes]:
    """Of the same operands, with threads in different orders."""
    found = set()
    for product.seed in range(8):
        found.add(result(emulated, product, mistake).numpy().tobytes())
    return found


BOXES = [(0, "box", (128, 64, 1)), (1, "box", (64, 64, 1)), (4, "box", (64, 128, 1))]


@pytest.mark.parametrize("which, name, value", [*BOXES, (0, "steps", (2 * 328, 16)), (1, "sizes", (320, 136, 2))])
def test_a_mistake_in_a_tensor_map_is_noticed(emulated, which, name, value):
    product = Product(CASES["64 columns, cluster of 2, batched, padded"])
    assert getattr(product.plan.maps[which], name) != value
    setattr(product.plan.maps[which], name, value)
    try:
        found = emulated("gemm.cu").run(product)
    except CudaError as refused:
        found = str(refused)
    assert isinstance(found, str) or product.what_is_wrong(found)

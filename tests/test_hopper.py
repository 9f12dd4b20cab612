"""The main loop of matrix products on Hopper without one: run on a CPU that plays its PTX (``ptx_on_cpu.hpp``), driven through
the tensor maps that Python computes; what it compiles to; what it declines."""

import ctypes
import dataclasses
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import cuda_as_cpp
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

import torch.nn.functional as F  # noqa: E402

from weft.definition import Declined  # noqa: E402
from weft.operators.cuda import CudaError, compile_cubin  # noqa: E402
from weft.operators.launch import compiling_for  # noqa: E402
from weft.operators.matmul import hopper, tensor_maps  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def operands(layout: str, m: int, n: int, k: int, dtype=torch.bfloat16):
    a = torch.empty((m, k) if layout[0] == "N" else (k, m), dtype=dtype, device="meta")
    b = torch.empty((k, n) if layout[1] == "N" else (n, k), dtype=dtype, device="meta")
    return a if layout[0] == "N" else a.t(), b if layout[1] == "N" else b.t()


def plan(a, b) -> hopper.HopperPlan:
    with compiling_for(90, lambda *kernel: None):
        return hopper.HopperPlan(a, b)


def assembly(expression: str, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(compile_cubin(hopper.SOURCE, expression, 90)[0])
    return subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout


# ---- the kernel, run -------------------------------------------------------------------------------------------------------

BF16, FP16, FP32, FP8, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8


@dataclass(frozen=True)
class Case:
    """A product of random matrices: its kernel, its sizes, and how many clusters of blocks there are for all tiles."""

    dtype: torch.dtype = BF16
    out: torch.dtype = BF16
    layout: str = "NT"
    columns: int = 64
    stages: int = 3
    cluster: int = 1
    m: int = 200
    n: int = 136
    k: int = 328
    matrices: int = 0  # 0: two-dimensional operands
    clusters: int = 2
    scales: str = ""  # "", "tensor", "rows" or "blocks"
    two_levels: bool = False
    biased: bool = False
    activation: str = "NONE"
    padded: bool = False  # whether rows lie further apart than they are long
    residual: str = ""  # "", "apart" or "C": in C's place
    gated: bool = False
    amax: bool = False
    stream: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0


LAYOUTS = ("NN", "NT", "TN", "TT")
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
    "256 columns, no cluster": Case(columns=256, m=136, n=264, k=136),
    "64 columns, cluster of 2, batched, padded": Case(cluster=2, matrices=2, padded=True),
    "padded, K apart": Case(FP16, BF16, "TN", padded=True),
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
    **{activation: Case(biased=activation != "RELU", activation=activation, k=72) for activation in hopper.ACTIVATIONS[1:]},
}  # fmt: skip

STREAMED = {
    "streamed: a wave and a bit": Case(columns=128, n=264, k=328, clusters=5, stream=True),
    "streamed: fewer tiles than blocks": Case(n=72, m=136, k=520, clusters=11, stream=True, out=FP32),
    "streamed: two waves": Case(m=392, n=200, clusters=5, k=200, stream=True),
    "streamed: one tile": Case(m=100, n=64, k=520, clusters=4, stream=True, out=FP32),
    "streamed: cluster of 2": Case(columns=256, stages=4, cluster=2, m=264, n=264, k=264, clusters=3, stream=True),
    "streamed: cluster of 2, K apart": Case(layout="TN", columns=192, cluster=2, m=264, n=392, k=264, clusters=4, stream=True),
    "streamed: 192 columns": Case(columns=192, m=136, n=392, k=264, clusters=4, stream=True, biased=True),
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

# Mistakes: a case, what stands in hopper.cu, what is written instead, … Each must be noticed with some seed.
PLAIN, PAIRED = (
    CASES["two stages, one block"],
    dataclasses.replace(CASES["64 columns, cluster of 2, batched, padded"], k=456),
)
MISTAKES = {
    "the first parity": (PLAIN, "u32 parity = 1;", "u32 parity = 0;"),
    "a stage released while it is read": (PLAIN, "wgmma_wait<1>();", "wgmma_wait<2>();"),
    "the last stage not released": (PLAIN, "if (depths) release(before);", ""),
    "the last products not waited for": (PLAIN, "wgmma_wait<0>();\n        hold(sums);\n        if (depths)", "if (depths)"),
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
    "C's rows not swizzled": (PLAIN, "((j ^ r % 8) * 16)", "j * 16"),
    "C's stores not fenced": (PLAIN, 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', ""),
    "C's slab overwritten while TMA reads it": (
        PLAIN, 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // what was put before has left its place', ""),
    "tiles in groups of the wrong height": (PLAIN, "height = min(group, rows - first)", "height = group"),
    "K apart: half a step of wgmma": (CASES["padded, K apart"], "(A_ACROSS ? 2 * 8 * LINE : 32)", "(A_ACROSS ? 8 * LINE : 32)"),
    "K apart: 64 columns of B for all": (CASES["fp16 NN 128 columns"], "B_ACROSS ? ATOM : 0", "0"),
    "K apart: half of K's rows for both": (
        CASES["bf16 NN 192 columns, cluster of 2"], "rank * (DEPTH / CLUSTER)", "0"),
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
    "parts in another order": (
        STREAMED["streamed: one tile"], "blockIdx.x - (share - walk.share) * CLUSTER",
        "blockIdx.x - ([] { static const bool is = chance(2); return is; }() ? share - walk.share : step - share) * CLUSTER"),
    "a part of another block": (
        STREAMED["streamed: one tile"], "blockIdx.x - (share - walk.share) * CLUSTER", "0"),
    "a part of the other consumer": (STREAMED["streamed: a wave and a bit"], "(2 * block + mine) * (64", "(2 * block) * (64"),
    "the longer shares forgotten": (
        STREAMED["streamed: one tile"], "i * shape.share + min(i, shape.longer)", "i * shape.share"),
    "a residual for whoever computes": (STREAMED["streamed: a residual"], "thread == 0 && walk.from == 0", "thread == 0"),
    "scales from the first stage on": (
        STREAMED["streamed: in blocks"], "shape.m - 1)) * depths + walk.from", "shape.m - 1)) * depths"),
    "one scale for all rows": (CASES["int8, scales of rows and columns"], "r < shape.m ? a_scale[r] : 0.f", "a_scale[row]"),
}  # fmt: skip

LAUNCH = """
const Shape shape = {int(job.shape[0]), int(job.shape[1]), int(job.shape[2]), int(job.shape[3]), int(job.shape[4]),
                     int(job.shape[5]), int(job.shape[6]), int(job.shape[7])};
const Factors factors = {int(job.scales[0]), int(job.scales[1]), float(job.factors[0]), float(job.factors[1]),
                         float(job.factors[2])};
job.run([&] {
  KERNEL(job.buffer(5), job.buffer(6), job.buffer(7), job.buffer(8), job.buffer(9), job.buffer(10),
         job.map<TensorMap>(0), job.map<TensorMap>(1), job.map<TensorMap>(2),
         job.map<TensorMap>(3), job.map<TensorMap>(4), shape, factors);
});
"""


class Product:
    """The operands of a case, and its plan, made on a machine with few multiprocessors."""

    def __init__(self, case: Case, seed: int = 0):
        self.case = case
        random = torch.Generator().manual_seed(seed)
        many = (case.matrices,) if case.matrices else ()

        def matrix(rows: int, columns: int, letter: str) -> torch.Tensor:
            shape = (*many, rows, columns) if letter == "N" else (*many, columns, rows)
            room = (*shape[:-1], shape[-1] + 16 * case.padded)
            if case.dtype is INT8:
                made = torch.randint(-127, 128, room, dtype=INT8, generator=random)
            else:
                made = torch.randn(room, generator=random).to(case.dtype)
            made = made[..., : shape[-1]]
            return made if letter == "N" else made.mT

        self.a, self.b = matrix(case.m, case.k, case.layout[0]), matrix(case.k, case.n, case.layout[1])
        self.up = matrix(case.k, case.n, case.layout[1]) if case.gated else self.b
        self.c = torch.full((*many, case.m, case.n), -(2**31) if case.out is torch.int32 else torch.nan, dtype=case.out)
        self.residual = self.c
        if case.residual:
            room = torch.randn((*many, case.m, case.n + 16), generator=random).to(case.out)
            self.residual = self.c.copy_(room[..., : case.n]) if case.residual == "C" else room[..., : case.n]
        counts = {"tensor": (1, 1), "rows": (case.m, case.n)}.get(case.scales, (0, 0))
        halves, blocks = 2 if case.gated else 1, -(-case.k // 128)
        shapes = ((counts[0],), (counts[1] * halves,))
        if case.scales == "blocks":
            shapes = ((case.m, blocks), (-(-case.n // 128), blocks))
        self.a_scale, self.b_scale = ((torch.rand(shape, generator=random) + 0.5) / 64 for shape in shapes)
        self.bias = torch.randn(case.n * halves if case.biased else 0, generator=random).to(case.out)
        self.amax = torch.zeros(int(case.amax))
        config = {"COLUMNS": case.columns, "STAGES": case.stages, "CLUSTER": case.cluster, "GROUP": 2,
                  "STREAM": int(case.stream)}  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper.configuration, "trial", config)
            patch.setattr(hopper, "LEAST_SHARE", 1)
            patch.setattr(hopper, "multiprocessors", lambda device: case.clusters * case.cluster)
            self.plan = hopper.HopperPlan(
                self.a, self.b, case.out, *counts, case.scales == "blocks", case.two_levels, case.biased,
                case.activation, amax=case.amax, residual=self.residual if case.residual else None,
                up=self.up if case.gated else None,
            )  # fmt: skip

        assert bool(self.plan.parts) == case.stream
        self.workspace = torch.full(self.plan.parts or (0,), torch.nan)
        self.flags = torch.zeros(2 * self.plan.launch.grid[0] * case.stream, dtype=torch.int32)

    def wanted(self) -> torch.Tensor:
        case = self.case

        def linear(b: torch.Tensor, half: int) -> torch.Tensor:
            a, columns = self.a, slice(half * case.n, (half + 1) * case.n)
            if case.dtype is FP32:  # tf32
                a, b = ((t.contiguous().view(torch.int32) & ~0x1FFF).view(FP32) for t in (a, b))
            a, b = a.double(), b.double()
            if case.scales == "blocks":
                a = a * self.a_scale.repeat_interleave(128, 1)[:, : case.k]
                b = b * self.b_scale.repeat_interleave(128, 0)[: case.n].repeat_interleave(128, 1)[:, : case.k].T
            sums = a @ b
            if case.scales in ("tensor", "rows"):
                by = self.b_scale[columns] if case.scales == "rows" else self.b_scale[half]
                sums = sums * self.a_scale.double().unsqueeze(-1) * by.double()
            return sums * case.alpha + (self.bias[columns].double() if case.biased else 0)

        sums = linear(self.b, 0)
        made = {
            "NONE": sums, "RELU": F.relu(sums), "SILU": F.silu(sums), "GELU": F.gelu(sums),
            "GELU_TANH": F.gelu(sums, approximate="tanh"),
        }[case.activation]  # fmt: skip
        if case.gated:
            made = made * linear(self.up, 1)
        return made + case.beta * self.residual.double() if case.residual else made

    def job(self, kernel: int, seed: int) -> bytes:
        """What ``Job`` of ptx_on_cpu.hpp reads; the addresses in tensor maps are counted from their storage's beginning."""
        launch, case = self.plan.launch, self.case
        mapped = (self.a, self.b, self.up, self.residual, self.c)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_maps, "_encode_tiled", lambda: encode_tiled)
            *maps, shape, factors = self.plan.scalars(*mapped, case.alpha, case.beta, case.gamma)
        tensors = (*mapped, self.a_scale, self.b_scale, self.bias, self.amax, self.workspace, self.flags)
        storages = [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in tensors]
        words = [kernel, launch.grid[0], launch.block, launch.cluster, launch.shared_bytes, seed, *map(len, storages)]
        for i, made in enumerate(maps):
            number = 4 if (case.k == 0 and i < 3) or mapped[i] is self.c else i
            words += [made.opaque[0] - storages[number].data_ptr(), *made.opaque[1:], number]
        words += [shape.m, shape.n, shape.k, shape.matrices, shape.group, shape.streamed, shape.share, shape.longer]
        words += [factors.a_scales, factors.b_scales]
        data = b"".join(s.numpy().tobytes() for s in storages)
        return struct.pack(f"<{len(words)}q3d", *words, factors.alpha, factors.beta, factors.gamma) + data


def encode_tiled(
    made, kind, rank, address, sizes, steps, box, element_steps, interleave, swizzle, promotion, fill
) -> int:
    """What cuTensorMapEncodeTiled refuses after the CUDA Driver API; what ``Box`` of ptx_on_cpu.hpp needs of the rest."""
    kinds = tensor_maps._bindings()[0].CUtensorMapDataType
    size = {
        kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8: 1, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16: 2,
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: 2, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32: 4,
        kinds.CU_TENSOR_MAP_DATA_TYPE_INT32: 4,
    }[kinds(kind)]  # fmt: skip
    sound = (
        made % 64 == 0 and address % 16 == 0 and rank == 3 and interleave == 0 and swizzle == 3 and fill == 0
        and all(0 < s <= 2**32 for s in sizes)
        and all(s % 16 == 0 and 0 < s < 2**40 for s in steps)
        and all(0 < b <= 256 for b in box)
        and list(element_steps) == [1, 1, 1]
        and box[0] * size % 16 == 0 and box[0] * size <= 128
    )  # fmt: skip
    words = (ctypes.c_ulonglong * 16).from_address(made)
    words[:10] = [address, size, *sizes, *steps, *box]
    return 0 if sound else 1


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    return player(tmp_path_factory.mktemp("played"), CASES, MISTAKES, Product)


def player(folder, cases, mistakes, Product):
    """What runs a case, or one of the mistakes, and returns C, or in words what failed."""
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler (g++) to run the kernel with")
    right = hopper.SOURCE.read_text()

    def text(name: str) -> str:
        made = right
        for good, bad in zip(mistakes[name][1::2], mistakes[name][2::2], strict=True) if name else ():
            assert made.count(good) == 1, f"{name}: hopper.cu has no single '{good}'"
            made = made.replace(good, bad)
        return cuda_as_cpp.as_cpp(cuda_as_cpp.preprocessed(made))

    kernels = list(dict.fromkeys(Product(case).plan.launch.expression for case in cases.values()))
    of = {name: Product(mistake[0]).plan.launch.expression for name, mistake in mistakes.items()}
    whole = text("")
    wrong = [(f"wrong{i}", (text(name), [LAUNCH.replace("KERNEL", of[name])])) for i, name in enumerate(mistakes)]
    programs = [  # compiled side by side
        dict(wrong[::2]),
        dict(wrong[1::2]),
        {"right": (whole, [LAUNCH.replace("KERNEL", k) for k in kernels])},
    ]
    started = [cuda_as_cpp.start_compiling(folder / f"program{i}", spaces) for i, spaces in enumerate(programs)]
    for compiler in started:
        errors = compiler.communicate()[1]
        assert compiler.returncode == 0, errors

    def run(product: Product, seed: int = 0, mistake: str = "") -> torch.Tensor | str:
        if mistake:
            number, program = divmod(list(mistakes).index(mistake), 2)
        else:
            number, program = kernels.index(product.plan.launch.expression), 2
        done = subprocess.run(
            [folder / f"program{program}"], input=product.job(number, seed), capture_output=True, timeout=60
        )
        if done.returncode:
            assert done.stdout.startswith(b"failed: ") or done.returncode == -11, done
            return done.stdout.decode() or "an access outside memory"
        if product.case.amax:
            product.amax = torch.frombuffer(bytearray(done.stdout[product.c.nbytes :][:4]), dtype=FP32)
        if any(done.stdout[len(done.stdout) - product.flags.nbytes :]):
            return "flags are left for the next launch"
        whole = bytearray(done.stdout[: product.c.nbytes])
        return torch.frombuffer(whole, dtype=product.c.dtype).view(product.c.shape)

    return run


def what_is_wrong(got: torch.Tensor | str, product: Product) -> str:
    """An empty string, or where C is further off than one rounding and a sum in fp32 may be."""
    if isinstance(got, str):
        return got
    want, rounding = product.wanted(), {BF16: 2.0**-8, FP16: 2.0**-11}.get(product.case.out, 2.0**-24)
    if product.case.out is torch.int32:
        return "" if torch.equal(got.double(), want) else "another sum"
    if product.case.amax and not torch.isclose(product.amax.double(), want.abs().max(), rtol=1e-5):
        return f"the largest is {product.amax.item()}, not {want.abs().max().item()}"
    allowed = 1.001 * rounding * want.abs() + 2e-6 * want.abs().max() + 2.0**-25
    far = ~((got.double() - want).abs() <= allowed)
    if not far.any():
        return ""
    at = tuple(far.nonzero()[0].tolist())
    return f"C{list(at)} is {got[at].item()}, not {want[at].item()} ({int(far.sum())} of {far.numel()} are wrong)"


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    """A, B and C lie before pages that may not be touched; threads, copies and arrivals take turns at random."""
    product = Product(CASES[name])
    assert product.plan.launch.grid[0] <= CASES[name].clusters * CASES[name].cluster
    assert not what_is_wrong(play(product), product)


@pytest.mark.parametrize("name", STREAMED)
def test_it_is_right_whoever_is_first(play, name):
    product = Product(CASES[name])
    for seed in range(1, 5):
        assert not what_is_wrong(play(product, seed), product)
        product = Product(CASES[name])


@pytest.mark.parametrize("name", ["streamed: one tile", "streamed: fewer tiles than blocks"])
def test_parts_are_added_in_one_order(play, name):
    product = Product(CASES[name])
    assert product.plan.shape.share < -(-CASES[name].k // 64) / 2, "two parts can be added in one way only"
    first, *others = (play(product, seed) for seed in range(6))
    assert all(torch.equal(first, other) for other in others)


def test_another_order_is_noticed(play):
    product = Product(CASES["streamed: one tile"])
    made = [play(product, seed, "parts in another order") for seed in range(8)]
    assert all(isinstance(m, torch.Tensor) for m in made)
    assert any(not torch.equal(made[0], m) for m in made)


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m != "parts in another order"])
def test_a_mistake_is_noticed(play, mistake):
    products = (Product(MISTAKES[mistake][0], seed) for seed in range(32))
    assert any(what_is_wrong(play(product, seed, mistake), product) for seed, product in enumerate(products))


@pytest.mark.parametrize(
    "which, name, value",
    [
        (0, "box", (128, 64, 1)),
        (0, "steps", (2 * 328, 16)),
        (1, "box", (64, 64, 1)),
        (1, "sizes", (320, 136, 2)),
        (4, "box", (64, 128, 1)),
    ],
)
def test_a_mistake_in_a_tensor_map_is_noticed(play, which, name, value):
    product = Product(CASES["64 columns, cluster of 2, batched, padded"])
    assert getattr(product.plan.maps[which], name) != value
    setattr(product.plan.maps[which], name, value)
    try:
        got = play(product)
    except CudaError as refused:
        got = str(refused)
    assert what_is_wrong(got, product)


# ---- what it compiles to ---------------------------------------------------------------------------------------------------


def check_inner_loop(text: str, product: str, fetches: int, streamed: bool = False) -> None:
    """Products run in pairs of stages, not one after another; neither sums nor descriptors pass through other registers."""
    assert not re.search(r"\b(STL|LDL)\b", text), "registers are spilled"
    found = re.findall(r"\w*GMMA\S*|WARPGROUP\.DEPBAR.*?;", text)
    products, waits = [f for f in found if "GMMA" in f], [f for f in found if "DEPBAR" in f]
    assert products and set(products) == {product} and len(products) % 4 == 0
    assert len(re.findall(r"GMMA.*gsb0", text)) == len(products) // 4, "ptxas makes products wait for each other"
    assert sorted(set(waits)) == ["WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"]
    assert waits.count("WARPGROUP.DEPBAR.LE gsb0, 0x0 ;") == 1 and len(waits) == len(products) // 4 + 1
    inner = text[text.index(product) : text.rindex(product)]
    assert "R2UR" not in inner, "descriptors are made in registers of threads"
    assert len(re.findall(r"\bMOV|IMAD\.MOV", inner)) < 20, "sums are moved"
    assert text.count("MEMBAR.ALL.GPU") == streamed, "a stage is released behind all stores of the block"
    producer = text[text.rindex("ELECT") :]
    assert "BRA.U.ANY" not in producer, "the producer's operands are sought lane by lane"
    assert producer.count("UTMALDG") and producer.count("UTMALDG") % fetches == 0


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_its_inner_loop_is_products_alone(layout, tmp_path):
    made = plan(*operands(layout, 4096, 4096, 4096)).launch
    text = assembly(made.expression, tmp_path)
    assert made.expression.startswith("matmul_hopper<bf16, bf16, 256, 4, 2,")
    check_inner_loop(text, "HGMMA.64x256x16.F32.BF16", (1 if layout[0] == "N" else 2) + (1 if layout[1] == "T" else 2))
    assert "UTMALDG.3D.MULTICAST" in text and "UTMASTG.3D" in text


@pytest.mark.parametrize(
    "types, instruction",
    [("fp16, fp16", "HGMMA.64x256x16.F32"), ("bf16, bf16", "HGMMA.64x192x16.F32.BF16"),
     ("float, float", "HGMMA.64x256x8.F32.TF32"),
     ("e4m3, bf16", "QGMMA.64x256x32.F32.E4M3.E4M3"), ("s8, bf16", "IGMMA.64x256x32.S8.S8")],
)  # fmt: skip
def test_every_type_takes_its_instruction(types, instruction, tmp_path):
    columns, stages = (192, 5) if "x192x" in instruction else (256, 4)
    text = assembly(
        f"matmul_hopper<{types}, {columns}, {stages}, 2, false, false, SCALED, false, true, GELU>", tmp_path
    )
    check_inner_loop(text, instruction, 2)


@pytest.mark.parametrize("shape", ["256, 4, 2", "192, 5, 2", "128, 6, 2", "64, 8, 1"])
@pytest.mark.parametrize("layout", ["false, false", "true, true"])
def test_streaming_does_not_disturb_it(shape, layout, tmp_path):
    text = assembly(
        f"matmul_hopper<bf16, bf16, {shape}, {layout}, UNSCALED, false, false, NONE, false, false, false, true>",
        tmp_path,
    )
    check_inner_loop(text, f"HGMMA.64x{shape.split(',')[0]}x16.F32.BF16", 1, streamed=True)
    assert "LDG.E.STRONG.GPU" in text and text.count("STG.E.128") == int(shape.split(",")[0]) // 8


@pytest.mark.parametrize("parts", ["true, false, false", "false, true, false", "true, true, true"])
def test_no_part_of_the_way_out_disturbs_it(parts, tmp_path):
    text = assembly(f"matmul_hopper<bf16, bf16, 256, 4, 2, false, false, SCALED, false, true, SILU, {parts}>", tmp_path)
    check_inner_loop(text, "HGMMA.64x256x16.F32.BF16", 2)


def test_registers_of_all_warpgroups_fit(tmp_path):
    """What the producer gives back is what the consumers take."""
    text = hopper.SOURCE.read_text()
    less, more = (int(re.search(rf"setmaxnreg\.{word}\.sync\.aligned\.u32 (\d+)", text)[1]) for word in ("dec", "inc"))
    assert less % 8 == more % 8 == 0
    at_first = 65536 // hopper.THREADS // 8 * 8
    assert less + 2 * more <= 3 * at_first


@pytest.mark.parametrize("scales", ["SCALED", "SCALED_BY_BLOCK"])
@pytest.mark.parametrize("columns, stages", [(256, 4), (192, 5), (128, 6)])
def test_two_levels_of_sums_stay_in_registers(scales, columns, stages, tmp_path):
    text = assembly(
        f"matmul_hopper<e4m3, bf16, {columns}, {stages}, 2, false, false, {scales}, true, false, NONE>", tmp_path
    )
    assert f"QGMMA.64x{64 if columns == 192 else 128}x32.F32.E4M3" in text
    assert not re.search(r"\b(STL|LDL)\b", text)


@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (100, 24, 8), (130, 256, 72), (4096, 4096, 4096), (16384, 28672, 8192)])
def test_what_a_launch_asks_for_fits(m, n, k):
    a, b = operands("NN", m, n, k)
    keys = [(90, "16-bit", layout, False, 4, m, n, k, 1) for layout in ("NN", "NNG")]
    for gated, config in [(g, c) for g in (False, True) for c in (*hopper.candidates(*keys[g]), None)]:
        hopper.configuration.trial = config
        try:
            with compiling_for(90, lambda *kernel: None):
                made = hopper.HopperPlan(a, b, torch.float32, up=b if gated else None)
        finally:
            hopper.configuration.trial = None
        assert made.launch.shared_bytes <= hopper.SHARED
        assert made.launch.grid[0] % made.launch.cluster == 0 and made.launch.grid[0] >= made.launch.cluster
        for of in made.maps:
            assert max(of.box) <= 256 and of.box[0] * 2 <= hopper.LINE
            assert all(step > 0 and step % 16 == 0 for step in of.steps)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_each_set_of_addresses_gets_maps_of_its_own(monkeypatch):
    launched = []
    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: encode_tiled)
    monkeypatch.setattr(hopper.CudaPlan, "__call__", lambda plan, *tensors: launched.append((plan, tensors)))
    a, b, up, c, r = (torch.empty(64, 64, dtype=BF16).as_subclass(OnGpu) for _ in range(5))
    bias, amax = torch.empty(128, dtype=BF16), torch.zeros(1)
    made = hopper.HopperPlan(a, b, biased=True, activation="SILU", residual=r, up=up, amax=True)
    assert made.launch.expression.endswith("false, true, SILU, true, true, true, false>")
    for beta in (1.0, 2.0, 1.0):
        made(a, b, c, bias=bias, residual=r, up=up, amax=amax, beta=beta)
    plain = hopper.HopperPlan(a, b)
    plain(a, b, c)
    addresses = [[m.opaque[0] for m in plan.scalars[:5]] for plan, _ in launched]
    assert addresses[0] == [t.data_ptr() for t in (a, b, up, r, c)]
    assert addresses[3] == [t.data_ptr() for t in (a, b, b, c, c)]
    assert launched[0][0] is launched[2][0] and launched[1][0].scalars[6].beta == 2.0
    assert [t.data_ptr() for t in launched[0][1]] == [t.data_ptr() for t in (c, c, bias, amax, c, c)]
    plain(a[:0], b, c[:0])  # nothing to map
    assert launched[4][0] is plain.launch


def test_launches_share_flags_of_their_stream_alone(monkeypatch):
    launched, state = [], {"stream": 1, "capturing": False}
    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: encode_tiled)
    monkeypatch.setattr(hopper.CudaPlan, "__call__", lambda plan, *tensors: launched.append(tensors[4:]))
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(hopper, "_flags", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state["stream"], raising=False)
    config = {"COLUMNS": 64, "STAGES": 8, "CLUSTER": 1, "GROUP": 4, "STREAM": 1}
    monkeypatch.setattr(hopper.configuration, "trial", config)
    a, b, c = (torch.empty(shape, dtype=BF16).as_subclass(OnGpu) for shape in ((128, 1024), (1024, 64), (128, 64)))
    made = hopper.HopperPlan(a, b)
    assert made.launch.grid[0] == 2 and made.launch.expression.endswith("true>"), "shares of 8 stages"
    for stream, capturing in ((1, False), (1, False), (2, False), (2, True), (2, True)):
        state.update(stream=stream, capturing=capturing)
        made(a, b, c)
    flags = [f.data_ptr() for _, f in launched]
    assert flags[0] == flags[1] and len(set(flags)) == 4
    assert all(w.numel() == 2 * 2 * 64 * 64 and f.numel() >= 4 and not f.any() for w, f in launched)


@pytest.mark.parametrize(
    "m, n, k, stream",
    [(512, 10240, 8192, 1), (512, 6144, 4096, 0), (4096, 4096, 4096, 0), (8192, 8192, 8192, 0), (512, 256, 512, 0)],
)
def test_streaming_is_chosen_where_a_wave_is_left_over(m, n, k, stream):
    assert hopper.heuristic(90, "16-bit", "NT", False, 2, m, n, k, 1)["STREAM"] == stream


def test_what_does_not_go_with_a_product_is_declined_in_words():
    a, b = operands("NT", 64, 64, 64)
    for words, what in {
        "unlike b": {"up": operands("NN", 64, 64, 64)[1]},
        "a residual": {"residual": torch.empty(64, 72, dtype=BF16, device="meta")},
        "'residual' has no contiguous": {"residual": torch.empty(64, 128, dtype=BF16, device="meta")[:, ::2]},
        "int32 from int8": {"out_dtype": torch.int32},
    }.items():
        with pytest.raises(Declined, match=words):
            hopper.HopperPlan(a, b, **what)
    whole = torch.empty(64, 64, dtype=INT8, device="meta")
    with pytest.raises(Declined, match="sums alone"):
        hopper.HopperPlan(whole, whole.t(), torch.int32, biased=True)


@pytest.mark.parametrize(
    "a, b, words",
    [
        (torch.empty(64, 60, dtype=torch.int64), torch.empty(60, 64, dtype=torch.int64), "dtypes"),
        (torch.empty(64, 64), torch.empty(64, 64), "not the contiguous dimension"),
        (torch.empty(64, 60, dtype=torch.bfloat16), torch.empty(60, 64, dtype=torch.bfloat16), "begin on 16 bytes"),
        (torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 60, dtype=torch.bfloat16), "begin on 16 bytes"),
        (torch.empty(64, 128, dtype=torch.bfloat16)[:, ::2], torch.empty(64, 64, dtype=torch.bfloat16), "contiguous"),
        (torch.empty(1, 64, dtype=torch.bfloat16).expand(64, 64), torch.empty(64, 64, dtype=torch.bfloat16), "strides"),
        (torch.empty(4097, dtype=torch.bfloat16)[1:].view(64, 64), torch.empty(64, 64, dtype=torch.bfloat16), "16 bytes"),
    ],
)  # fmt: skip
def test_what_tma_cannot_take_is_declined_in_words(a, b, words):
    with pytest.raises(Declined, match=words):
        plan(a, b)

"""Products of up to 8 rows with a weight of codes, with norm, gate and residual, on the CPU emulator; what they compile to."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cuda_as_cpp import whole
from cuda_on_cpu import BF16, FP16, FP32, Suite, further_off_than_rounding, job, tensor_of
from emulated import *  # noqa: F403
from weight_only_cases import weight_of

from weft.operators.launch import compiling_for
from weft.operators.low_precision import weight_only_stream
from weft.operators.low_precision.quantized_weight import dequantize_weight

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A product, and the block that computes it: ``shape`` is warps, stages of a warp's ring, blocks."""

    format: str = "int8"
    group: int = 0
    zero: bool = False
    biased: bool = False
    normed: bool = False
    gated: bool = False
    residual: bool = False
    dtype: torch.dtype = BF16
    scale: torch.dtype = FP32
    m: int = 3
    n: int = 70
    k: int = 328
    padded: bool = False  # rows of x and of the residual with something between them
    shape: tuple[int, int, int] = (4, 2, 3)
    codes: str = "random"  # or "all"


CASES = {
    "one row, one unit": Case(m=1, n=3, k=8, shape=(4, 1, 1)),
    "int8": Case("int8", m=1, n=64, k=256, codes="all"),
    "int8, fp16": Case("int8", dtype=FP16, m=8, n=64, k=256, codes="all", biased=True),
    "int8, all at once": Case("int8", m=2, n=86, k=1496, biased=True, normed=True, residual=True, padded=True, shape=(4, 2, 2)),
    "int8, groups of 32": Case("int8", 32, m=5, n=17, k=1120, scale=BF16, shape=(4, 3, 1)),
    "int8, groups of 128": Case("int8", 128, m=4, n=66, k=640, scale=FP16),
    "fp8": Case("fp8", m=8, n=64, k=256, codes="all"),
    "fp8, fp16, gated": Case("fp8", dtype=FP16, m=8, n=64, k=256, gated=True),
    "fp8, gated": Case("fp8", m=6, n=2 * 21, k=776, biased=True, gated=True, normed=True, residual=True, shape=(5, 2, 2)),
    "fp8, groups of 64, fp16": Case("fp8", 64, dtype=FP16, scale=FP16, m=2, k=320),
    "int4": Case("int4", 128, k=4 * 1152),
    "int4, all codes": Case("int4", 128, scale=BF16, k=512, m=8, n=64, codes="all"),
    "int4, fp16, all codes": Case("int4", 128, dtype=FP16, scale=FP16, k=512, m=8, n=64, codes="all"),
    "int4, gated": Case("int4", 128, True, scale=BF16, m=1, n=2 * 36, k=2176, gated=True, normed=True, shape=(5, 2, 2)),
    "int4, groups of 64": Case("int4", 64, True, m=3, k=4160, n=33, scale=FP16, residual=True),
    "int4, groups of 32, fp16": Case("int4", 32, True, dtype=FP16, scale=FP16, m=7, k=1056, n=40, normed=True, padded=True),
}  # fmt: skip

MISTAKES = {
    "the upper row's words for the lower": ("int4", "(i % 2 ? upper : lower)", "(i % 2 ? lower : upper)"),
    "x of another slice": ("int4", "load_shared<T, 8>(x + I * LENGTH)", "load_shared<T, 8>(x)"),
    "x of another piece": ("int4", "SLICES * LENGTH + piece * 32)", "SLICES * LENGTH)"),
    "x of another unit": ("int4", "x_lane + unit * UNIT", "x_lane + warp * UNIT"),
    "a token's x for all": ("int8, groups of 32", "min(lane / 4, shape.M - 1) * pitch", "0 * pitch"),
    "sums of a group not begun anew": ("int4", "sums[i][e] = 0.f;", ";"),
    "the next group's scale": ("int4", "to_float(by[g / 4][h]), g % 4", "to_float(by[g / 4][h]), (g + 1) % 4"),
    "the upper row's zero point": ("int4, groups of 64", "u32(off[g / 4][h])", "u32(off[g / 4][0])"),
    "scales of the tile before": ("int4", "here ? tile : tile + step", "tile"),
    "a unit not waited for": ("int4", "      wait_copies<STAGES - 1>();", ""),
    "a unit waited for too late": ("int4", "wait_copies<STAGES - 1>();", "wait_copies<STAGES>();"),
    "the next tile's units at the same rows": ("int4", "asked_unit = warp, asked_tile += step", "asked_unit = warp"),
    "the norm's weight not waited for": (
        "int8, all at once", "first == thread * 8) wait_copies<STAGES>();", "first == thread * 8) ;"),
    "x not met": ("int8, all at once", "  __syncthreads();\n\n  // ---- tiles", "\n  // ---- tiles"),
    "squares of one warp": ("int8, all at once", "sum += squares[token * WARPS + i]", "sum += squares[token * WARPS]"),
    "a tile's sums over the last one's": ("int4", "buffer ^= 1;", ""),
    "sums not met": ("int4", "    __syncthreads();\n    buffer", "    buffer"),
    "a warp left out": ("int4", "from < WARPS; from++", "from < WARPS - 1; from++"),
    "rows past N stored": ("int4", "token < shape.M && column < outputs", "token < shape.M"),
    "the gate for the up rows": ("int4, gated", "sum[0] / (1.f + __expf(-sum[0])) * sum[1]",
                               "sum[1] / (1.f + __expf(-sum[1])) * sum[0]"),
    "the bias of the gate for both": ("fp8, gated", "bias[(column + h * outputs)", "bias[(column + 0 * outputs)"),
    "the residual of another token": (
        "int8, all at once", "residual[token * shape.residual_row", "residual[0 * shape.residual_row"),
}  # fmt: skip

LAUNCH = """
const Shape shape = *reinterpret_cast<const Shape *>(job.maps[0] + 1);
job.run([&] {
  KERNEL(job.buffer(0), job.buffer(1), job.buffer(2), job.buffer(3), job.buffer(5), job.buffer(6), job.buffer(7),
         job.buffer(4), shape);
});
"""


class Product:
    """The operands of a case, and its plan."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        random = torch.Generator().manual_seed(seed)
        m, n, k = case.m, case.n, case.k
        outputs = n // 2 if case.gated else n

        def rows(columns: int) -> torch.Tensor:
            return torch.randn(m, columns + 8 * case.padded, generator=random).to(case.dtype)[:, :columns]

        self.x, self.residual = rows(k), rows(outputs) if case.residual else None
        self.weight = weight_of(case, random)
        self.bias = torch.randn(n, generator=random).to(case.dtype) if case.biased else None
        self.norm = torch.randn(k, generator=random).to(case.dtype) if case.normed else None
        self.y = torch.full((m, outputs), torch.nan, dtype=case.dtype)
        empty = self.x.new_empty(0)
        words, scale, zero, *_ = self.weight
        others = (self.bias, self.norm, self.residual)
        self.tensors = (self.x, words, scale, words if zero is None else zero, self.y,
                        *(empty if t is None else t for t in others))  # fmt: skip
        warps, stages, blocks = case.shape
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(weight_only_stream.configuration, "trial", {"WARPS": warps, "STAGES": stages, "RESIDENT": 1})
            patch.setattr(weight_only_stream, "multiprocessors", lambda device: blocks)
            self.plan = weight_only_stream.StreamPlan(self.x, self.weight, *others, EPS, case.gated)
        self.launch = LAUNCH.replace("KERNEL", self.plan.launch.expression)

    def wanted(self) -> torch.Tensor:
        weight = self.weight._replace(scale=self.weight.scale.double())
        x = self.x.double()
        if self.norm is not None:  # the root comes after the product, and x times the norm's weight is rounded
            unit = 1 / 16 if self.case.dtype == FP16 else 1
            root = (x.square().mean(1, keepdim=True) + EPS).rsqrt()
            x = (self.x.float() * (self.norm.float() * unit)).to(self.case.dtype).double() * root / unit
        y = x @ dequantize_weight(weight, torch.float64).t()
        y = y if self.bias is None else y + self.bias.double()
        if self.case.gated:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        return y if self.residual is None else y + self.residual.double()

    def job(self) -> bytes:
        (shape,) = self.plan.launch.scalars
        return job(
            self.plan.launch,
            self.seed,
            dict(enumerate(self.tensors)),
            maps=bytes(8) + bytes(shape),
            shape=(),
            factors=(),
        )

    def result(self, found: bytes) -> torch.Tensor:
        return tensor_of(found[: self.y.nbytes], self.y.dtype).view(self.y.shape)

    def what_is_wrong(self, found: bytes) -> str:
        return further_off_than_rounding("y", self.result(found), self.wanted())


SUITES = {"weight_only_stream.cu": Suite(whole(weight_only_stream.SOURCE), Product, CASES, MISTAKES)}

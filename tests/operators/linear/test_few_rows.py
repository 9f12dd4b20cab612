"""Linear layers of up to 16 rows on tensor cores, with norm, activation and residual, on the CPU emulator."""

from dataclasses import dataclass

import pytest
import torch
from cuda_as_cpp import whole
from cuda_on_cpu import BF16, FP16, Suite, further_off_than_rounding, job, tensor_of
from emulated import *  # noqa: F403

from weft.operators.launch import compiling_for
from weft.operators.linear import activations, few_rows
from weft.operators.linear.reference import composed

EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A layer, and the block that computes it: ``shape`` is warps, stages of a warp's ring, blocks."""

    biased: bool = False
    normed: bool = False
    residual: bool = False
    activation: str | None = None
    dtype: torch.dtype = BF16
    m: int = 3
    n: int = 70
    k: int = 328
    padded: bool = False  # rows of x, the weight and the residual with something between them
    shape: tuple[int, int, int] = (4, 2, 2)


CASES = {
    "one row, one unit": Case(m=1, n=3, k=8, biased=True, residual=True, shape=(4, 3, 1)),
    "two rows": Case(m=2, n=86, k=1496, biased=True, residual=True, shape=(4, 3, 2)),
    "a whole unit": Case(m=8, n=48, k=128, biased=True, residual=True, shape=(4, 3, 1)),
    "padded": Case(m=8, n=54, k=1288, residual=True, padded=True, shape=(4, 2, 2)),
    "gated, fp16": Case(m=4, n=2 * 30, k=1032, dtype=FP16, activation="reglu", shape=(5, 3, 2)),
    "normed": Case(m=5, n=33, k=1112, normed=True, padded=True, shape=(5, 2, 1)),
    "normed, fp16": Case(m=7, n=40, k=1056, normed=True, dtype=FP16, biased=True, activation="relu"),
    "gated": Case(m=6, n=2 * 21, k=776, biased=True, normed=True, residual=True, activation="swiglu", shape=(5, 2, 2)),
    "gated, one row": Case(m=1, n=2 * 36, k=2176, normed=True, activation="geglu_tanh", shape=(5, 1, 3)),
    "eleven rows": Case(m=11, n=38, k=1160, residual=True, shape=(8, 2, 2)),
    "sixteen rows, gated": Case(m=16, n=2 * 22, k=2064, normed=True, activation="swiglu", shape=(8, 1, 2)),
}

MISTAKES = {
    "the upper row's columns for the lower": (
        "two rows", "{lower.word[half], upper.word[half], lower", "{upper.word[half], lower.word[half], lower"),
    "x of another piece": ("normed", "unit * UNIT + piece * 32 + quarter * 8\n", "unit * UNIT + quarter * 8\n"),
    "x of another piece of the ring": ("two rows", "(stage + (8 + f * 4 + piece) * 32)", "(stage + (8 + f * 4) * 32)"),
    "x of the first rows": ("eleven rows", "(stage + (8 + f * 4 + piece) * 32)", "(stage + (8 + piece) * 32)"),
    "x of another unit": ("normed", "m * pitch + unit * UNIT", "m * pitch + warp * UNIT"),
    "a row's x for all": ("normed", "x_shared + m * pitch", "x_shared + 0 * pitch"),
    "a row's x for all of the ring": ("padded", "x + m * shape.x_row", "x + 0 * shape.x_row"),
    "rows past M asked for": ("eleven rows", "      if (m >= shape.M) continue;  // sums", "      // sums"),
    "columns past K": (
        "normed", "w + row * shape.w_row + column + piece * 32,\n                     column + piece * 32 < shape.K",
        "w + row * shape.w_row + column + piece * 32,\n                     true"),
    "a unit not waited for": ("two rows", "      wait_copies<STAGES - 1>();", ""),
    "a unit waited for too late": ("two rows", "wait_copies<STAGES - 1>();", "wait_copies<STAGES>();"),
    "the first x in one group with the last of w": (
        "padded", "ask_x(slot, asked), commit_copies();", "ask_x(slot, asked);"),
    "the next tile's units at the same rows": ("two rows", "Place{at.tile + step, warp}", "Place{at.tile, warp}"),
    "x begun anew at the second unit": ("padded", "    asked = begin;\n", ""),
    "the norm's weight not waited for": ("normed", "if (first == 0 && i == thread * 8) wait_copies<STAGES>();", ""),
    "x not met": ("normed", "    __syncthreads();\n  }\n\n  // ---- tiles", "  }\n\n  // ---- tiles"),
    "squares of one warp": ("normed", "sum += squares[token * WARPS + i]", "sum += squares[token * WARPS]"),
    "squares of the first rows": ("sixteen rows, gated", "squares[(first + r) * WARPS + warp]", "squares[r * WARPS + warp]"),
    "a tile's sums over the last one's": ("two rows", "buffer ^= 1;", ""),
    "sums not met": ("two rows", "    __syncthreads();\n    buffer", "    buffer"),
    "a warp left out": ("two rows", "from < WARPS; from++", "from < WARPS - 1; from++"),
    "half of the sums": ("two rows", "sums[f][0][2 * h] + sums[f][1][2 * h],", "sums[f][0][2 * h],"),
    "rows past N stored": ("two rows", "token < shape.M && column < shape.N", "token < shape.M"),
    "the gate for the up rows": ("gated", "activated<ACTIVATION, T>(sum[0])", "activated<ACTIVATION, T>(sum[1])"),
    "the bias of the gate for both": ("gated", "(column + h * i64(shape.N)) * shape.bias_col", "column * shape.bias_col"),
    "the residual of another row": ("two rows", "residual[token * shape.residual_row", "residual[0 * shape.residual_row"),
}  # fmt: skip

LAUNCH = """
const Shape shape = *reinterpret_cast<const Shape *>(job.maps[0] + 1);
job.run([&] {
  KERNEL(job.buffer(0), job.buffer(1), job.buffer(2), job.buffer(3), job.buffer(5), job.buffer(4), shape);
});
"""


class Layer:
    """The operands of a case, and its plan."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        random = torch.Generator().manual_seed(seed)
        m, n, k, activation = case.m, case.n, case.k, activations.of(case.activation)
        outputs = n // 2 if activation.gated else n

        def rows(rows: int, columns: int) -> torch.Tensor:
            """On 16 bytes, where padded with something that must not count behind each."""
            made = torch.randn(rows, columns + 8 * case.padded, generator=random)
            made[:, columns:] = torch.nan
            return made.to(case.dtype)[:, :columns]

        self.x, self.w, self.residual = rows(m, k), rows(n, k), rows(m, outputs) if case.residual else None
        self.bias = torch.randn(n, generator=random).to(case.dtype) if case.biased else None
        self.norm = torch.randn(k, generator=random).to(case.dtype) if case.normed else None
        self.y = torch.full((m, outputs), torch.nan, dtype=case.dtype)
        others = (self.bias, self.norm, self.residual)
        bias, norm, residual = (self.x.new_empty(0) if t is None else t for t in others)
        self.tensors = {0: self.x, 1: self.w, 2: bias, 3: norm, 4: self.y, 5: residual}
        warps, stages, blocks = case.shape
        trial = {"WARPS": warps, "STAGES": stages}
        with pytest.MonkeyPatch.context() as patch, compiling_for(90, lambda *kernel: None):
            patch.setattr(few_rows.configuration, "trial", trial)
            patch.setattr(few_rows, "multiprocessors", lambda device: blocks)
            assert few_rows.why_not(self.x, self.w, self.norm, self.residual) == ""
            self.plan = few_rows.FewRowsPlan(self.x, self.w, *others, EPS, activation)
        self.launch = LAUNCH.replace("KERNEL", self.plan.launch.expression)

    def wanted(self) -> torch.Tensor:
        x = self.x.double()
        if self.norm is not None:  # the root comes after the product, and x times the norm's weight is rounded
            unit = 1 / 16 if self.case.dtype == FP16 else 1
            root = (x.square().mean(1, keepdim=True) + EPS).rsqrt()
            x = (self.x.float() * (self.norm.float() * unit)).to(self.case.dtype).double() * root / unit
        bias, residual = (None if t is None else t.double() for t in (self.bias, self.residual))
        return composed(x, self.w.double(), bias, residual, self.case.activation)

    def job(self) -> bytes:
        (shape,) = self.plan.launch.scalars
        return job(self.plan.launch, self.seed, self.tensors, maps=bytes(8) + bytes(shape), shape=(), factors=())

    def what_is_wrong(self, found: bytes) -> str:
        got = tensor_of(found[: self.y.nbytes], self.y.dtype).view(self.y.shape)
        return further_off_than_rounding("y", got, self.wanted())


SUITES = {"few_rows.cu": Suite(whole(few_rows.SOURCE), Layer, CASES, MISTAKES)}


def test_what_it_does_not_take_is_said():
    x, w = torch.empty(2, 64, dtype=BF16), torch.empty(24, 64, dtype=BF16)
    for said, call in {
        "float32": (x.float(), w.float(), None, None),
        "17 rows of x": (x[:1].expand(17, 64), w, None, None),
        "not whole 16-byte words": (x[:, :60], w[:, :60], None, None),
        "rows of x or the weight": (x, w.t().contiguous().t(), None, None),
        "a norm's weight": (x, w, w[:, 0], None),
        "no room": [torch.empty(*size, 2**16, dtype=BF16, device="meta") for size in ((2,), (24,), ())] + [None],
        "a residual": (x, w, None, torch.empty(24, 2, dtype=BF16).t()),
    }.items():
        assert said in few_rows.why_not(*call)

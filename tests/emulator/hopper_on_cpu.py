"""Emulates Hopper's main loop on a CPU, for the tests of it and of the kernels made of it: random products, the tensor
maps that Python computes, and the kernel's PTX in ``ptx_on_cpu.hpp``."""

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from cuda_on_cpu import BF16, FP16, FP32, bytes_of, further_off_than_rounding, job, tensor_of  # noqa: F401

pytest.importorskip("cuda.bindings")

import torch.nn.functional as F

from weft.operators.hopper import gemm, tensor_maps, tile_sizes
from weft.operators.launch import compiling_for

FP8, INT8 = torch.float8_e4m3fn, torch.int8
LAYOUTS = ("NN", "NT", "TN", "TT")


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
    lacking: int = 0  # columns of C that b does not have
    residual: str = ""  # "", "apart" or "C": in C's place
    gated: bool = False
    amax: bool = False
    stream: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def operands(layout: str, m: int, n: int, k: int, dtype=torch.bfloat16):
    a = torch.empty((m, k) if layout[0] == "N" else (k, m), dtype=dtype, device="meta")
    b = torch.empty((k, n) if layout[1] == "N" else (n, k), dtype=dtype, device="meta")
    return a if layout[0] == "N" else a.t(), b if layout[1] == "N" else b.t()


def plan(a, b) -> gemm.HopperPlan:
    with compiling_for(90, lambda *kernel: None):
        return gemm.HopperPlan(a, b)


LAUNCH = """
const Shape shape = {int(job.shape[0]), int(job.shape[1]), int(job.shape[2]), int(job.shape[3]), int(job.shape[4]),
                     int(job.shape[5]), int(job.shape[6]), int(job.shape[7])};
const Factors factors = {int(job.scales[0]), int(job.scales[1]), float(job.factors[0]), float(job.factors[1]),
                         float(job.factors[2])};
job.run([&] {
  KERNEL(job.buffer(5), job.buffer(6), job.buffer(7), job.buffer(8), job.buffer(9), job.buffer(10),
         job.buffer(11), job.buffer(12),
         job.map<TensorMap>(0), job.map<TensorMap>(1), job.map<TensorMap>(2),
         job.map<TensorMap>(3), job.map<TensorMap>(4), shape, factors);
});
"""


LAUNCH_LOOSE = LAUNCH.replace("job.buffer(12)", "job.buffer(4)")


class Product:
    """The operands of a case, and its plan, made on a machine with few multiprocessors."""

    offsets, order = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)  # of groups

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.seed = case, seed
        self.random = random = torch.Generator().manual_seed(seed)
        many = (case.matrices,) if case.matrices else ()
        self.a, self.b = (
            self.matrix(case.m, case.k, case.layout[0]),
            self.matrix(case.k, case.n - case.lacking, case.layout[1]),
        )
        self.up = self.matrix(case.k, case.n, case.layout[1]) if case.gated else self.b
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
        if self.codes:
            self.a_scale = torch.full((1,), 0.13 if case.gated else 0.05)
        bias = torch.randn(case.n * halves if case.biased else 0, generator=random)
        self.bias = bias.to(case.dtype if self.codes else case.out)
        self.amax = torch.zeros(int(case.amax))
        config = {"COLUMNS": case.columns, "STAGES": case.stages, "CLUSTER": case.cluster, "GROUP": 2,
                  "STREAM": int(case.stream)}  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_sizes.configuration, "trial", config)
            patch.setattr(tile_sizes, "LEAST_SHARE", 1)
            patch.setattr(gemm, "multiprocessors", lambda device: case.clusters * case.cluster)
            self.plan = gemm.HopperPlan(
                self.a, self.b, case.out,
                gemm.Epilogue(*counts, case.scales == "blocks", case.biased, case.activation, case.amax),
                case.two_levels, residual=self.residual if case.residual else None, up=self.up if case.gated else None,
                n=case.n, loose=True,
            )  # fmt: skip

        assert bool(self.plan.parts) == case.stream
        self.workspace = torch.full(self.plan.parts or (0,), torch.nan)
        self.flags = torch.zeros(2 * self.plan.launch.grid[0] * case.stream, dtype=torch.int32)

    def matrix(self, rows: int, columns: int, letter: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        case, dtype = self.case, dtype or self.case.dtype
        shape = (rows, columns) if letter == "N" else (columns, rows)
        apart = -(-shape[1] // (step := 16 // dtype.itemsize)) * step  # rows begin on 16 bytes
        room = (*([case.matrices] if case.matrices else []), shape[0], apart + 16 * case.padded)
        if dtype is INT8:
            made = torch.randint(-127, 128, room, dtype=INT8, generator=self.random)
        else:
            made = torch.randn(room, generator=self.random).to(dtype)
        made = made[..., : shape[-1]]
        return made if letter == "N" else made.mT

    @property
    def loose(self) -> bool:
        """Whether rows of C begin anywhere, so that no map is of it."""
        return self.c.shape[-1] * self.c.itemsize % 16 > 0

    @property
    def codes(self) -> bool:
        """Whether C is of codes of a scale."""
        return self.case.out is FP8

    def wanted(self) -> torch.Tensor:
        case = self.case

        def linear(b: torch.Tensor, half: int) -> torch.Tensor:
            a, columns = self.a, slice(half * case.n, (half + 1) * case.n)
            if case.dtype is FP32:  # tf32
                a, b = ((t.contiguous().view(torch.int32) & ~0x1FFF).view(FP32) for t in (a, b))
            a, b = a.double(), F.pad(b.double(), (0, case.lacking))
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
            "NONE": sums, "RELU": F.relu(sums), "SILU": F.silu(sums), "SILU_FAST": F.silu(sums), "GELU": F.gelu(sums),
            "GELU_TANH": F.gelu(sums, approximate="tanh"),
        }[case.activation]  # fmt: skip
        if case.gated:
            made = made * linear(self.up, 1)
        return made + case.beta * self.residual.double() if case.residual else made

    def scalars(self) -> tuple:
        case = self.case
        return self.plan.scalars(self.a, self.b, self.up, self.residual, self.c, case.alpha, case.beta, case.gamma)

    @property
    def launch(self) -> str:
        return (LAUNCH_LOOSE if self.loose else LAUNCH).replace("KERNEL", self.plan.launch.expression)

    def job(self) -> bytes:
        mapped = (self.a, self.b, self.up, self.residual, self.c)
        tensors = (*mapped, self.a_scale, self.b_scale, self.bias, self.amax, self.workspace, self.flags)
        numbers = [4 if (self.case.k == 0 and i < 3) or t is self.c else i for i, t in enumerate(mapped)]
        numbers[3:] = [0, 0] if self.loose else numbers[3:]
        maps, shape, factors = packed_maps(self.scalars, {number: tensors[number] for number in numbers}, numbers)
        groups = [bytes_of(t) for t in (self.offsets, self.order)]
        made = job(
            self.plan.launch, self.seed, dict(enumerate(tensors)),
            maps=maps,
            shape=(shape.m, shape.n, shape.k, shape.matrices, shape.group, shape.streamed, shape.share, shape.longer),
            scales=(factors.a_scales, factors.b_scales), factors=(factors.alpha, factors.beta, factors.gamma),
        )  # fmt: skip
        return made + struct.pack("<2q", *map(len, groups)) + b"".join(groups)

    def result(self, found: bytes) -> torch.Tensor:
        """C, and the largest of it in ``amax``."""
        end = self.c.nbytes
        if self.case.amax:
            self.amax = tensor_of(found[end : end + 4], FP32)
        return tensor_of(found[:end], self.c.dtype).view(self.c.shape)

    def what_is_wrong(self, found: bytes) -> str:
        """An empty string, or where C is further off than one rounding and a sum in fp32 may be."""
        if any(found[len(found) - self.flags.nbytes :]):
            return "flags are left for the next launch"
        got, want, case = self.result(found), self.wanted(), self.case
        if case.out is torch.int32:
            return "" if torch.equal(got.double(), want) else "another sum"
        if case.amax and not torch.isclose(self.amax.double(), want.abs().max(), rtol=1e-5):
            return f"the largest is {self.amax.item()}, not {want.abs().max().item()}"
        if self.codes:
            exact = (want / self.a_scale.double()).clamp(-448, 448)
            off = (got.double() - exact).abs() <= 1.001 * torch.maximum(exact.abs() * 2.0**-4, torch.tensor(2.0**-10))
            return "" if off.all() and bool((exact.abs() == 448).any()) else f"{int((~off).sum())} codes are wrong"
        return further_off_than_rounding("C", got, want)


def packed_maps(scalars: Callable[[], tuple], buffers: Mapping[int, torch.Tensor], numbers: Sequence[int]) -> tuple:
    """A launch's tensor maps as ``Job`` of ptx_on_cpu.hpp reads them, and its other scalars.

    Args:
        numbers: of each map's buffer, from the beginning of whose storage its address is counted.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_maps, "_encode_tiled", lambda: encode_tiled)
        made = scalars()
    words = []
    for of, number in zip(made, numbers, strict=False):
        words += [of.opaque[0] - buffers[number].untyped_storage().data_ptr(), *of.opaque[1:], number]
    return struct.pack(f"<{len(words)}q", *words), *made[len(numbers) :]


def encode_tiled(
    made, kind, rank, address, sizes, steps, box, element_steps, interleave, swizzle, promotion, fill
) -> int:
    """What cuTensorMapEncodeTiled refuses after the CUDA Driver API; what ``Box`` of ptx_on_cpu.hpp needs of the rest."""
    kinds = tensor_maps.driver().CUtensorMapDataType
    size = {
        kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8: 1, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16: 2,
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: 2, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32: 4,
        kinds.CU_TENSOR_MAP_DATA_TYPE_INT32: 4,
    }[kinds(kind)]  # fmt: skip
    sound = (
        made % 64 == 0 and address % 16 == 0 and rank in (3, 4) and interleave == 0 and fill == 0
        and swizzle == {64: 2, 128: 3}.get(box[0] * size)
        and all(0 < s <= 2**32 for s in sizes)
        and all(s % 16 == 0 and 0 < s < 2**40 for s in steps)
        and all(0 < b <= 256 for b in box)
        and list(element_steps) == [1] * rank
    )  # fmt: skip
    words = (ctypes.c_ulonglong * 16).from_address(made)
    fourth = [] if rank == 4 else [1]
    words[:13] = [address, size, *sizes, *fourth, *steps, *fourth, *box, *fourth]
    return 0 if sound else 1

"""The plan of ``gemm.cu``: products on Hopper's tensor cores by wgmma, fed by TMA (sm_90 and no other)."""

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import DTYPE_NAMES, Config
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.hopper import tile_sizes
from weft.operators.hopper.tensor_maps import Maps, map_why_not
from weft.operators.hopper.tile_sizes import LINE, ROWS, THREADS, configuration, shared_bytes, streamed, triangle
from weft.operators.launch import multiprocessors

SOURCE = Path(__file__).parent / "gemm.cu"
# the names in gemm.cu; float is taken as tf32
TYPES = {**CTYPES, torch.float8_e4m3fn: "e4m3", torch.int8: "s8", torch.int32: "int"}
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# what implementations on this loop declare
ON_HOPPER: dict[str, Any] = {"arch": "==sm_90", "dtypes": ("bf16", "fp16"), "devices": ("cuda",)}
OPERANDS = (*CTYPES, torch.float8_e4m3fn, torch.int8)
ACTIVATIONS = ("NONE", "RELU", "SILU", "GELU", "GELU_TANH", "SILU_FAST")


class Shape(ctypes.Structure):
    """``Shape`` of gemm.cu."""

    sizes = ("m", "n", "k", "matrices", "group", "streamed", "share", "longer")
    _fields_ = tuple((name, ctypes.c_int) for name in sizes)


class Factors(ctypes.Structure):
    """``Factors`` of gemm.cu."""

    ints, floats = ("a_scales", "b_scales"), ("alpha", "beta", "gamma")
    _fields_ = (*((name, ctypes.c_int) for name in ints), *((name, ctypes.c_float) for name in floats))


def across(t: Tensor, k: int) -> bool:
    """Whether K, dimension k of a matrix (-1 or -2), is not its contiguous one."""
    return t.stride(k) != 1 and t.stride(-3 - k) == 1


def on_lines(*matrices: Tensor) -> bool:
    """Whether all rows begin on lines of 128 bytes, if the first ones do."""
    steps = ((t.stride(-1 if across(t, -1) else -2), t) for t in matrices)
    return all(step * t.element_size() % LINE == 0 for step, t in steps)


def why_not(a: Tensor, b: Tensor, out_dtype: torch.dtype, n: int | None = None, *, loose: bool = False) -> str:
    """Why the kernel does not take a [.., M, K] and b [.., K, N] for n columns, or N (an empty string when it does). ``loose``:
    rows of a result in 16-bit floats may begin anywhere."""
    if a.dtype not in OPERANDS or b.dtype != a.dtype:
        return f"dtypes {a.dtype} and {b.dtype}; it takes two of {', '.join(str(t)[6:] for t in OPERANDS)}"
    codes = a.dtype in SIXTEEN_BITS and out_dtype == torch.float8_e4m3fn
    if out_dtype not in CTYPES and not codes and (a.dtype, out_dtype) != (torch.int8, torch.int32):
        return (
            f"a result in {out_dtype} from {a.dtype}; it gives float32, float16, bfloat16, int32 from int8, and float8_e4m3fn "
            "from 16-bit floats"
        )
    if a.dtype not in SIXTEEN_BITS and (across(a, -1) or across(b, -2)):
        return (
            f"{a.dtype} with K not the contiguous dimension of both operands, which wgmma takes of 16-bit floats only"
        )
    if a.shape[-1]:  # else neither is read
        reason = map_why_not("a", a, a.element_size(), across(a, -1))
        if reason := reason or map_why_not("b", b, b.element_size(), not across(b, -2)):
            return reason
    n = n or b.shape[-1]
    if n * out_dtype.itemsize % 16 and not (loose and out_dtype in SIXTEEN_BITS and a.shape[-1]):
        return f"rows of {n} elements in the result do not begin on 16 bytes, which TMA wants"
    return ""


_flags: dict[tuple[int, int], Tensor] = {}


def flags_of(device: torch.device, count: int) -> Tensor:
    """Zeros for a launch on the current stream, which leaves them zero: launches on one stream share them.

    A captured launch gets its own, since what is captured may be replayed beside others.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device.index or 0, torch._C._cuda_getCurrentRawStream(device.index or 0))
    if (found := _flags.get(key)) is None or found.shape[0] < count:
        found = _flags[key] = torch.zeros(max(count, 2 * multiprocessors(device)), dtype=torch.int32, device=device)
    return found


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is done to the sums of a product while they are in registers; tensors that it reads come with a call."""

    a_scales: int = 0  # how many fp32 scales there are: none, one, or as many as a has rows and b columns
    b_scales: int = 0
    blocks: bool = False  # scales of blocks instead: [M, K / 128] and [N / 128, K / 128], contiguous; of 8-bit operands
    biased: bool = False  # whether there is a bias [N] of C's dtype; with codes, of a's
    activation: str = "NONE"  # one of ``ACTIVATIONS``
    amax: bool = False  # whether the largest |c|, before it is rounded, is wanted

    @property
    def sums_alone(self) -> bool:
        return not (self.a_scales or self.b_scales or self.biased or self.amax) and self.activation == "NONE"


class HopperPlan:
    """The launch of C = act(alpha · scale · A·B + bias) + beta · R into a row-major C, or, with a matrix ``up`` beside B, of
    act(gate) · up + beta · R, where gate and up are products of A with B and with ``up``.

    Args:
        a, b: [M, K] and [K, N], or [matrices, M, K] and [matrices, K, N]; fp32 is rounded towards zero to tf32.
        out_dtype: of C; by default that of a. int32 for int8 operands without any of what follows; float8_e4m3fn for
            16-bit ones: codes of a scale, which is ``a_scale`` of a call (a_scales stays 0), without scales and a residual.
        epilogue: scales, bias, activation and largest value. With ``up`` scales of columns and the bias have 2N elements, those
            of up last; a single b_scale is two.
        two_levels: stages of K are added up in fp32, not in the tensor cores' accumulator of about 14 bits; of 8-bit operands.
        residual: a matrix of R's form, which is C's shape and dtype (or the other 16-bit float's), with contiguous rows; it may
            be C.
        up: a matrix like b (the other half of one weight [K, 2N], say).
        symmetric: the configuration of a launch that computes the lower triangle of C and mirrors it: C, square, of
            16-bit floats, must be symmetric, and so must the residual be. Not with scales, a bias, an activation, up or amax.
        second: another matrix of the residual's form, with a factor gamma.
        n: columns of C where these are more than b has: the last ones are products with zeros.
        loose: whether rows of C may begin anywhere, which is then stored without TMA; not with a residual.
        device: where it is launched, if a is not there.

    Raises:
        Declined: when TMA or wgmma cannot take the operands.
    """

    def __init__(
        self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, epilogue: Epilogue = Epilogue(),
        two_levels: bool = False, *, residual: Tensor | None = None, up: Tensor | None = None,
        symmetric: Config | None = None, second: Tensor | None = None, n: int | None = None,
        loose: bool = False, device: torch.device | None = None,
    ):  # fmt: skip
        out_dtype, n, device = out_dtype or a.dtype, n or b.shape[-1], device or a.device
        if reason := why_not(a, b, out_dtype, n, loose=loose and residual is None and symmetric is None):
            raise Declined(reason)
        (m, k), matrices = a.shape[-2:], a.shape[0] if a.ndim == 3 else 1
        out = torch.empty((matrices, m, n), dtype=out_dtype, device="meta")
        if up is not None and (up.shape, up.stride(), up.dtype) != (b.shape, b.stride(), b.dtype):
            raise Declined(
                f"'up' {list(up.shape)} with strides {up.stride()}, unlike b, {list(b.shape)} with {b.stride()}"
            )
        added = out_dtype if residual is None else residual.dtype
        for r in (residual, second):
            if r is None:
                continue
            of_16_bits = r.dtype == added and {added, out_dtype} <= set(SIXTEEN_BITS)  # one may be bf16, the other fp16
            if (r.numel(), *r.shape[-2:]) != (out.numel(), m, n) or not (r.dtype == out_dtype or of_16_bits):
                raise Declined(f"a residual {list(r.shape)} of {r.dtype} for {list(out.shape)} of {out_dtype}")
            if reason := map_why_not("residual", r, out_dtype.itemsize, False):
                raise Declined(reason)
        parts = (residual is not None, up is not None, epilogue.amax)
        if symmetric is not None and (m != n or up is not None or not epilogue.sums_alone):
            raise Declined(f"a symmetric product of {m} × {n} with scales, a bias, an activation, a gate or amax")
        if symmetric is not None and out_dtype not in SIXTEEN_BITS:
            raise Declined(f"a symmetric product in {out_dtype}; the mirror image is of 16-bit floats")
        if second is not None and (symmetric is None or residual is None):
            raise Declined("a second residual, which goes with a first one of a symmetric product")
        if out_dtype == torch.int32 and (any(parts) or not epilogue.sums_alone):
            raise Declined(
                "a result in int32 with scales, a bias, an activation, a residual, a gate or amax; it is of sums alone"
            )
        codes = out_dtype == torch.float8_e4m3fn
        if codes and (epilogue.a_scales or epilogue.b_scales or residual is not None):
            raise Declined("codes of 8 bits with scales of operands or a residual")
        a_across, b_across = across(a, -1), across(b, -2)
        layout = ("T" if a_across else "N") + ("N" if b_across else "T") + ("" if up is None else "G")
        two_levels = two_levels or epilogue.blocks
        name = DTYPE_NAMES.get(a.dtype, TYPES[a.dtype])
        # the model goes by sizes; as many tiles have those of rows on lines
        sizes = [-(-s // 64) * 64 for s in (m, n, k)] if on_lines(a, b) else (m, n, k)
        c = symmetric or configuration(device, name, layout, two_levels, out_dtype.itemsize, *sizes, matrices)
        columns, cluster, depth = c["COLUMNS"], c["CLUSTER"], LINE // a.element_size()
        width = columns if up is None else columns // 2
        # two blocks cannot share three boxes of 64 columns: each fetches half of their rows of K
        deep = depth // cluster if columns // cluster % 64 else depth
        of_b = Maps(b, not b_across, (64, deep) if b_across else (depth, min(columns // cluster, width)))
        self.loose = n * out_dtype.itemsize % 16 > 0
        slab = (tile_sizes.pitch(width * out_dtype.itemsize) // out_dtype.itemsize, 64)
        of_c = Maps(out, False, slab)
        self.maps = (
            Maps(a, a_across, (64, depth) if a_across else (depth, ROWS)),
            of_b,
            of_b if second is None else Maps(second, False, slab),
            of_c if residual is None else Maps(residual, False, slab),
            of_c,
        )
        flags = ", ".join(str(f).lower() for f in (a_across, b_across))
        scales = "SCALED_BY_BLOCK" if epilogue.blocks else "SCALED" if epilogue.a_scales else "UNSCALED"
        end = f"{str(two_levels).lower()}, {str(epilogue.biased).lower()}, {epilogue.activation}"
        tiles = -(-m // (ROWS * cluster)) * -(-n // width) * matrices
        if symmetric is not None:
            tiles = triangle(m, columns, cluster) * matrices
        stages, clusters = -(-k // depth), multiprocessors(device) // cluster
        count = streamed(tiles, stages, clusters) if c["STREAM"] else 0
        clusters = min(clusters, count * stages // tile_sizes.LEAST_SHARE if count else tiles)
        grid = clusters * cluster
        self.parts = (grid, 2, 64, columns) if count else ()  # sums that a block hands to another, of each consumer
        last = ", ".join(str(f).lower() for f in (*parts, count > 0))
        if self.loose:
            last += f", false, false, {TYPES[out_dtype]}, WHOLE, false, true"
        elif codes:
            last += f", false, false, {TYPES[a.dtype]}"
        elif symmetric is not None or added != out_dtype:
            last += f", {str(symmetric is not None).lower()}, {str(second is not None).lower()}, {TYPES[added]}"
        types = f"{TYPES[a.dtype]}, {TYPES[out_dtype]}"
        kernel = f"matmul_hopper<{types}, {columns}, {c['STAGES']}, {cluster}, {flags}, {scales}, {end}, {last}>"
        shared = shared_bytes(c, out_dtype.itemsize, up is not None, symmetric is not None)
        self.launch = CudaPlan(SOURCE, kernel, (grid, 1), THREADS, (), cluster, shared)
        self.shape = Shape(m, n, k, matrices, c["GROUP"], count, *divmod(count * stages, max(clusters, 1)))
        self.scales = (epilogue.a_scales, epilogue.b_scales)

    def __call__(
        self, a: Tensor, b: Tensor, c: Tensor, a_scale: Tensor | None = None, b_scale: Tensor | None = None,
        bias: Tensor | None = None, *, residual: Tensor | None = None, up: Tensor | None = None,
        amax: Tensor | None = None, second: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0, gamma: float = 1.0,
    ) -> None:  # fmt: skip
        """Launches it on tensors of the forms that the plan was made for.

        Args:
            c: where the result goes.
            amax: one fp32 value on the device that is 0, or the largest of earlier calls.
            alpha, beta: with a residual only.
            gamma: with a second one only.
        """
        launch = self.launch
        if c.is_cuda and c.numel():
            residual, up = c if residual is None else residual, b if up is None else up
            up = up if second is None else second
            launch = launch.at(self.scalars, a, b, up, residual, c, factors=(alpha, beta, gamma))
        workspace = flags = c
        if self.parts and c.is_cuda:
            workspace = torch.empty(self.parts, dtype=torch.float32, device=c.device)
            flags = flags_of(c.device, 2 * self.parts[0])
        pointers = (a_scale, b_scale, bias, amax, workspace, flags, None, None)
        launch(*(c if t is None else t for t in pointers))  # it reads only what it was made for

    def scalars(
        self, a: Tensor, b: Tensor, up: Tensor, residual: Tensor, c: Tensor, *factors: float
    ) -> tuple[Any, ...]:
        """What the kernel is given after its pointers: five tensor maps and numbers. ``up`` may be the second residual."""
        numbers = (self.shape, Factors(*self.scales, *factors))
        if self.loose:
            of_a, of_b, of_up = (of(t) for of, t in zip(self.maps, (a, b, up), strict=False))
            return (of_a, of_b, of_up, of_a, of_a, *numbers)  # no map is of C
        of_c = self.maps[4](c)
        read = self.shape.k > 0  # else no map can be made of a, b and up, and none is looked at
        of_a, of_b, of_up = (of(t) if read else of_c for of, t in zip(self.maps, (a, b, up), strict=False))
        return (of_a, of_b, of_up, self.maps[3](residual), of_c, *numbers)

"""``dequantize(values, scale, granularity)``: values · scale, the inverse of ``quantize``.

Compulsorily values and scales are read and the result is written once; one multiplication an element: bandwidth is the limit.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants, peers
from weft.operators.call import FLOATS, Choice, check_tensor, eager, either, guarded, on_gpu, rows_of, traced
from weft.operators.launch import Plans, target_sm
from weft.operators.quantization.arguments import check_even, check_granularity, check_scale
from weft.operators.quantization.calls import given
from weft.operators.quantization.dequantize_vectors import vectors_plans
from weft.operators.quantization.formats import (
    FORMATS,
    GRANULARITIES,
    Scheme,
    format_of,
    scale_shape,
    spread,
    values_shape,
)
from weft.operators.quantization.plans import inverse_plans
from weft.operators.quantization.rounding import unpacked
from weft.operators.random_inputs import LAYOUTS, _laid_out, random_tensor


def reference(
    values: Tensor,
    scale: float | Tensor,
    granularity: str = "row",
    *,
    group_size: int = 128,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """In fp32, rounded once."""
    n = columns_of(values, columns)
    q = unpacked(values, n) if values.dtype == torch.uint8 else values.detach()
    wide = spread(given(scale, values).float(), (*values.shape[:-1], n), granularity, group_size)
    return (q.float() * wide).to(dtype)


def columns_of(values: Tensor, columns: int | None) -> int:
    if columns is not None:
        return columns
    return values.shape[-1] * (2 if values.dtype == torch.uint8 else 1)


def launch(
    values: Tensor,
    scale: Tensor,
    granularity: str,
    group_size: int,
    columns: int | None,
    dtype: torch.dtype,
    plans: Plans = inverse_plans,
) -> Tensor:
    n = columns_of(values, columns)
    out = torch.empty((*values.shape[:-1], n), dtype=dtype, device=values.device)
    if out.numel():
        scheme = Scheme(format_of(values.dtype), granularity, group_size)
        call = values.detach().view(torch.uint8), scale
        plans.of(call, scheme, n, dtype)(*call, out)
    return out


def dequantize_triton(
    values: Tensor,
    scale: float | Tensor,
    granularity: str = "row",
    *,
    group_size: int = 128,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return launch(values, given(scale, values), granularity, group_size, columns, dtype)


def dequantize_cuda(
    values: Tensor,
    scale: float | Tensor,
    granularity: str = "row",
    *,
    group_size: int = 128,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Of rows and groups of whole 16-byte vectors of the result. Raises Declined for others."""
    return launch(values, given(scale, values), granularity, group_size, columns, dtype, vectors_plans)


# ---- definition ------------------------------------------------------------------------------------------------------


def shape(w: Workload) -> tuple[int, ...]:
    batch = w.option("matrices", 0)
    return (batch, w["M"] // batch, w["N"]) if batch else (w["M"], w["N"])


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Values [M, N] (packed for int4) that are any code of the format, NaN too; ``matrices=B``: [B, M / B, N]. The workload's
    dtype is the result's."""
    format, granularity = w.option("format", "int8"), w.option("granularity", "row")

    def codes(of: tuple[int, ...]) -> Tensor:
        if device == "meta":
            return torch.empty(of, dtype=torch.uint8, device=device)
        return torch.randint(256, of, generator=g, device=g.device, dtype=torch.uint8).to(device)

    values = _laid_out(values_shape(shape(w), format), w.option("layout", "contiguous"), codes)
    scale = random_tensor(g, scale_shape(shape(w), granularity, w.option("group", 128)), "fp32", device).abs() + 0.01
    return {
        "values": values.view(FORMATS[format].dtype),
        "scale": scale,
        "granularity": granularity,
        "group_size": w.option("group", 128),
        "columns": w["N"] if w["N"] % FORMATS[format].per_byte else None,
        "dtype": torch_dtype(w.dtype),
    }


def cost(w: Workload, direction: str) -> Cost:
    elements, format = w["M"] * w["N"], w.option("format", "int8")
    scales = 4
    for size in scale_shape(shape(w), w.option("granularity", "row"), w.option("group", 128)):
        scales *= size
    values = w["M"] * -(-w["N"] // FORMATS[format].per_byte)
    return Cost(values + scales, elements * w.bytes_per_element, vector_flops=elements)


def _moved_scales(values: Tensor, scale: Tensor, **named: Any) -> Tensor:
    """Each line has its neighbour's scale."""
    return reference(values, scale.flatten().roll(1).view(scale.shape) * 1.5, **named)


def _scale_rounded(values: Tensor, scale: Tensor, **named: Any) -> Tensor:
    """Scales are rounded to the result's dtype first."""
    return reference(values, scale.to(torch.float16).float(), **named)


def _unsigned(values: Tensor, scale: Tensor, **named: Any) -> Tensor:
    return reference(values, scale, **named).abs()


def _swapped(values: Tensor, scale: Tensor, **named: Any) -> Tensor:
    if values.dtype == torch.uint8:
        values = (values << 4) | (values >> 4)
    return reference(values, scale, **named)


dequantize = Operator(
    name="dequantize",
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    tolerance=Tolerance(exact=True),
    options={
        "format": tuple(FORMATS),
        "granularity": GRANULARITIES,
        "group": range(1, 2**31),
        "layout": LAYOUTS,
        "matrices": range(1, 2**31),
    },
    workloads={
        "verify": [
            *(workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (9, 104), (5, 1000))),
            *(workload(M=0, N=7, granularity=g) for g in GRANULARITIES),
            workload(M=7, N=0),
            *(workload(M=5, N=n, format=f) for n in (33, 256) for f in FORMATS),
            *(workload(M=5, N=203, format=f, granularity=g) for f in ("int4", "fp8_e4m3") for g in GRANULARITIES),
            *(workload(M=9, N=208, format="fp8_e4m3", granularity=g) for g in ("column", "block")),
            *(workload(M=9, N=40, layout=at) for at in ("unaligned", "sliced", "strided", "transposed", "expanded")),
            *(
                workload(M=9, N=48, format="int4", granularity="group", group=6, layout=at)
                for at in ("sliced", "transposed")
            ),
            *(workload(M=9, N=n, granularity="group", group=g) for n, g in ((96, 32), (60, 7), (60, 100), (65, 1))),
            workload(M=6, N=140, granularity="block", matrices=2),
            workload(M=1, N=9000, format="fp8_e5m2", granularity="tensor"),
        ],
        "full": [
            *(workload(M=2000, N=3000, format=f, granularity=g) for f in FORMATS for g in GRANULARITIES),
            workload(M=600, N=300, granularity="block", matrices=2),
        ],
        "huge": [
            workload("bf16", M=2**17 + 1, N=2**14, format="fp8_e4m3"),
            workload("bf16", M=2**17 + 1, N=2**14, format="int4", granularity="group"),
        ],
        "bench": [
            *(workload("bf16", M=2**14, N=2**14, format="fp8_e4m3", granularity=g) for g in GRANULARITIES),
            *(workload("bf16", M=2**14, N=2**14, format=f, granularity="group") for f in ("int8", "int4", "fp8_e5m2")),
        ],
        "quick": [workload(M=2**10, N=2**12), workload(M=2**10, N=2**12, format="fp8_e4m3", granularity="group")],
        "compile": [
            *(workload(M=64, N=4096, format=f, granularity="group") for f in FORMATS),
            *(workload(M=256, N=1000, format="fp8_e4m3", granularity=g) for g in GRANULARITIES),
        ],
        "tune": [
            *(
                workload(d, M=2**14, N=2**14, format="fp8_e4m3", granularity=g)
                for d in ("fp32", "bf16")
                for g in ("row", "group")
            )
        ],
        "model": [workload("bf16", M=14336, N=4096, format="int4", granularity="group")],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("a neighbour's scale", _moved_scales),
        Mutant("scales rounded first", _scale_rounded),
        Mutant("sign left out", _unsigned),
        Mutant("nibbles swapped", _swapped),
    ],
)

dequantize.implementation("triton", arch=">=sm_80")(dequantize_triton)
dequantize.implementation("cuda", arch=">=sm_90", devices=("cuda",))(dequantize_cuda)
dequantize.implementation("torch")(reference)
dequantize.implementation("torch.compile", devices=("cuda",))(peers.Compiled(reference))

# ---- what users call -------------------------------------------------------------------------------------------------


IMPLEMENTATIONS = {"torch": reference, "triton": dequantize_triton, "cuda": dequantize_cuda}
PACKED = ("fp8_e4m3", "int4")  # formats for which packed conversions are the faster ones (README)


@dequantize.choice
@guarded
def choose(
    values: Tensor,
    scale: float | Tensor,
    granularity: str = "row",
    *,
    group_size: int = 128,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Choice:
    check(values, scale, granularity, group_size, columns, dtype)
    if not on_gpu(values):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if traced(values):
        return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
    if not values.numel():
        return Choice("torch", "an empty tensor: nothing to launch")
    if rows_of(values) is None:
        return Choice("torch", "strides that do not collapse into rows, for which a copy would be needed")
    format = format_of(values.dtype)
    if target_sm(values.device) == 90 and dtype != torch.float32 and format in PACKED and isinstance(scale, Tensor):
        scheme = Scheme(format, granularity, group_size)
        call = values.detach().view(torch.uint8), scale.detach(), scheme, columns_of(values, columns), dtype
        with contextlib.suppress(Declined):
            vectors_plans.of(call[:2], *call[2:])
            return Choice("cuda", f"{format} in packed conversions: one pass over memory", vectors_plans)
    return Choice("triton", f"scales by {granularity}: one pass over memory", inverse_plans)


def check(values: Any, scale: Any, granularity: Any, group_size: Any, columns: Any, dtype: Any) -> None:
    check_tensor("dequantize", "values", values, tuple(made.dtype for made in FORMATS.values()))
    check_granularity("dequantize", granularity, group_size, values, "values")
    check_even("dequantize", format_of(values.dtype), granularity, group_size)
    if dtype not in FLOATS:
        raise TypeError(f"dequantize: argument 'dtype' is {dtype!r:.40}; expected {either(FLOATS)}")
    per, stored = FORMATS[format_of(values.dtype)].per_byte, values.shape[-1]
    if columns is not None:
        if isinstance(columns, bool) or not isinstance(columns, int):
            raise TypeError(f"dequantize: argument 'columns' is {columns!r:.40}; expected an int or None")
        if -(-columns // per) != stored:
            most = f"{per * stored - 1} or {per * stored}" if per > 1 and stored else str(stored)
            raise ValueError(
                f"dequantize: argument 'columns' is {columns}; expected {most} for 'values' of shape {tuple(values.shape)}"
            )
    elements = (*values.shape[:-1], columns_of(values, columns))
    check_scale("dequantize", scale, values, "values", elements, granularity, group_size, False)


def _public_plan(values: Tensor, scale: Tensor, *options: Any) -> Any:
    """The plan, and the shape of the result."""
    granularity, group_size, columns, dtype = options
    chosen = choose(values, scale, granularity, group_size=group_size, columns=columns, dtype=dtype)
    if chosen.plans is None or not scale.is_contiguous():
        return None
    n = columns_of(values, columns)
    scheme = Scheme(format_of(values.dtype), granularity, group_size)
    ready = chosen.plan_for(values.detach().view(torch.uint8), scale, scheme, n, dtype)
    return ready, (*values.shape[:-1], n)


public_plans = Plans(_public_plan)


@dequantize.function
def dequantize_function(
    values: Tensor,
    scale: float | Tensor,
    granularity: str = "row",
    *,
    group_size: int = 128,
    columns: int | None = None,
    dtype: dtype = torch.float32,
) -> Tensor:
    """The inverse of ``quantize``: values · scale, in fp32, rounded once.

    Args:
        values: as ``quantize`` returns them: int8, float8_e4m3fn, float8_e5m2 [..., N], or uint8 [..., ceil(N / 2)], which is
            int4 with the even column in the lower four bits. Any rows of one stride.
        scale: fp32, of the shape that ``quantize`` says for this granularity; for ``tensor`` a number too.
        granularity: ``tensor``, ``row``, ``column``, ``group`` or ``block``: which elements share a scale.
        group_size: for ``group``.
        columns: N, where an int4 row has an odd number; None for all that the bytes hold.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        A contiguous tensor [..., N] of ``dtype``. NaN of fp8 stays NaN. It has no gradient.

    Raises:
        TypeError: values or scales of other dtypes.
        ValueError: an unknown granularity; a scale of another shape or device, or one that wants a gradient; columns that the
            values do not have.
    """
    if isinstance(values, Tensor) and isinstance(scale, Tensor) and eager(values, scale, gradient=True, autocast=True):
        found = None
        if not scale.requires_grad:
            found = public_plans.of((values, scale), granularity, group_size, columns, dtype)
        if found is not None:
            ready, of_result = found
            out = torch.empty(of_result, dtype=dtype, device=values.device)
            ready(values.detach().view(torch.uint8), scale, out)
            return out
    options: dict[str, Any] = {"group_size": group_size, "columns": columns, "dtype": dtype}
    chosen = choose(values, scale, granularity, **options).implementation
    return IMPLEMENTATIONS[chosen](values, scale, granularity, **options)

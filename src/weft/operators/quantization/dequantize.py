"""``dequantize(values, scale, granularity)``: values · scale, the inverse of ``quantize``; and what a round trip loses.

Compulsorily values and scales are read and the result is written once; one multiplication an element: bandwidth is the limit.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, eager, guarded
from weft.operators.launch import Plans
from weft.operators.quantization import quantize as quantizing
from weft.operators.quantization.dispatch import DEQUANTIZE
from weft.operators.quantization.formats import FORMATS, GRANULARITIES, spread, unpacked, values_shape
from weft.operators.quantization.quantize import quantize
from weft.operators.random_inputs import LAYOUTS, _laid_out, random_tensor

DEFAULTS: dict[str, Any] = {"group_size": 128, "columns": None, "dtype": torch.float32}


def reference(values: Tensor, scale: float | Tensor, granularity: str = "row", **options: Any) -> Tensor:
    """In fp32, rounded once."""
    group_size, columns, dtype = {**DEFAULTS, **options}.values()
    n = values.shape[-1] * (2 if values.dtype == torch.uint8 else 1) if columns is None else columns
    q = unpacked(values, n) if values.dtype == torch.uint8 else values.detach()
    wide = spread(quantizing.as_tensor(scale, values).float(), (*values.shape[:-1], n), granularity, group_size)
    return (q.float() * wide).to(dtype)


def launch(plans: Plans, values: Tensor, scale: float | Tensor, granularity: str = "row", **options: Any) -> Tensor:
    """By a kernel of ``plans``."""
    if not values.numel():
        return reference(values, scale, granularity, **options)
    values, scale, options = values.detach(), quantizing.as_tensor(scale, values), {**DEFAULTS, **options}
    plan, of_result = plans.of((values, scale), granularity, *options.values())
    out = torch.empty(of_result, dtype=options["dtype"], device=values.device)
    plan(values.view(torch.uint8), scale, out)
    return out


by_triton, by_cuda, by_cuda_unaligned = (
    functools.partial(launch, DEQUANTIZE.kernel(name)) for name in ("triton", "cuda", "cuda-unaligned")
)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Values [M, N] (packed for int4) that are any code of the format, NaN too; ``matrices=B``: [B, M / B, N]. The workload's
    dtype is the result's."""
    scheme = quantizing.scheme_of(w)

    def codes(of: tuple[int, ...]) -> Tensor:
        if device == "meta":
            return torch.empty(of, dtype=torch.uint8, device=device)
        return torch.randint(256, of, generator=g, device=g.device, dtype=torch.uint8).to(device)

    values = _laid_out(values_shape(quantizing.shape(w), scheme.format), w.option("layout", "contiguous"), codes)
    return {
        "values": values.view(scheme.of.dtype),
        "scale": random_tensor(g, quantizing.shape_of_scales(w), "fp32", device).abs() + 0.01,
        "granularity": scheme.granularity,
        "group_size": scheme.group_size,
        "columns": w["N"] if w["N"] % scheme.of.per_byte else None,
        "dtype": torch_dtype(w.dtype),
    }


def cost(w: Workload, direction: str) -> Cost:
    elements = w["M"] * w["N"]
    return Cost(sum(quantizing.stored_bytes(w)), elements * w.bytes_per_element, vector_flops=elements)


dequantize = Operator(
    name="dequantize",
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    tolerance=Tolerance(exact=True),
    options={name: quantize.options[name] for name in ("format", "granularity", "group", "layout", "matrices")},
    workloads={
        "verify": [
            *(workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (9, 104), (5, 1000))),
            *(workload(M=0, N=7, granularity=g) for g in GRANULARITIES),
            workload(M=7, N=0),
            *(workload(M=5, N=n, format=f) for n in (33, 256) for f in FORMATS),
            *(workload(M=5, N=203, format=f, granularity=g) for f in ("int4", "fp8_e4m3") for g in GRANULARITIES),
            *(workload(M=9, N=208, format="fp8_e4m3", granularity=g) for g in ("column", "block")),
            *(workload(M=9, N=40, layout=at) for at in LAYOUTS[1:]),
            *(
                workload(M=9, N=48, format="int4", granularity="group", group=6, layout=at)
                for at in ("sliced", "transposed")
            ),
            *(workload(M=9, N=n, granularity="group", group=g) for n, g in ((96, 32), (60, 7), (60, 100), (65, 1))),
            workload(M=6, N=140, granularity="block", matrices=2),
            workload(M=140, N=150, granularity="block", layout="transposed"),
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
            *(quantizing.large(granularity=g) for g in GRANULARITIES),
            *(workload("bf16", M=2**14, N=2**14, format=f, granularity="group") for f in ("int8", "int4", "fp8_e5m2")),
        ],
        "quick": [workload(M=2**10, N=2**12), workload(M=2**10, N=2**12, format="fp8_e4m3", granularity="group")],
        "compile": [
            *(workload(M=64, N=4096, format=f, granularity="group") for f in FORMATS),
            *(workload(M=256, N=1000, format="fp8_e4m3", granularity=g) for g in GRANULARITIES),
        ],
        "tune": [quantizing.large(d, granularity=g) for d in ("fp32", "bf16") for g in ("row", "group")],
        "model": [workload("bf16", M=14336, N=4096, format="int4", granularity="group")],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("a neighbour's scale", mutants.changed(reference, scale=lambda s: s.roll(1) * 1.5)),
        Mutant("scales rounded first", mutants.changed(reference, scale=lambda s: s.to(torch.float16).float())),
        Mutant("sign left out", lambda **named: reference(**named).abs()),
        Mutant("nibbles swapped", mutants.changed(reference, values=quantizing.swapped)),
    ],
)

dequantize.implementation("triton", arch=">=sm_80")(by_triton)
dequantize.implementation("cuda", arch=">=sm_90")(by_cuda)
dequantize.implementation("cuda-unaligned", backend="cuda", arch=">=sm_90")(by_cuda_unaligned)
peers.register(dequantize, reference)


@dequantize.choice
@guarded
def choose(values: Tensor, scale: float | Tensor, granularity: str = "row", **options: Any) -> Choice:
    return DEQUANTIZE.choose(values, scale, granularity, *{**DEFAULTS, **options}.values())


@dequantize.function
def dequantize_function(
    values: Tensor, scale: float | Tensor, granularity: str = "row", *, group_size: int = 128,
    columns: int | None = None, dtype: dtype = torch.float32,
) -> Tensor:  # fmt: skip
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
        if not scale.requires_grad and scale.is_contiguous():
            found = DEQUANTIZE.of((values, scale), granularity, group_size, columns, dtype)
        if found is not None:
            plan, of_result = found
            out = torch.empty(of_result, dtype=dtype, device=values.device)
            plan(values.detach().view(torch.uint8), scale, out)
            return out
    options = {"group_size": group_size, "columns": columns, "dtype": dtype}
    if choose(values, scale, granularity, **options).implementation == "torch":
        return reference(values, scale, granularity, **options)
    return launch(DEQUANTIZE, values, scale, granularity, **options)


# ---- what a round trip loses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundTripError:
    """Of ``dequantize(*quantize(x))`` against x, over the elements that are finite in both."""

    relative_rms: float  # root mean square of the error over that of x
    largest: float  # the largest error, in x's units
    snr_db: float  # 20 log10 of 1 / relative_rms: signal to noise in decibels; infinite where nothing is lost
    # share of elements whose nearest value is beyond the format's largest (none with scales of absmax)
    saturated: float
    zeros: float  # share of elements that are not 0 and become 0
    bits: float  # of values and scales, over the number of elements


def round_trip_error(x: Tensor, format: str, granularity: str = "row", **options: Any) -> RoundTripError:
    """What quantising x by a scheme loses.

    Args:
        x: any tensor that ``quantize`` takes.
        format, granularity, options: as ``quantize`` takes them.

    Returns:
        A :class:`RoundTripError`; of an empty tensor, and of one that is all zeros, its errors are 0.

    Raises:
        TypeError, ValueError: as ``quantize``.
    """
    values, scale = quantize.public(x, format, granularity, **options)  # type: ignore[misc]
    x = x.detach()  # a model's weight wants a gradient, and what is read from it here is numbers
    group_size = options.get("group_size", 128)
    back = dequantize.public(values, scale, granularity, group_size=group_size, columns=x.shape[-1])  # type: ignore[misc]
    known = x.isfinite() & back.isfinite()
    exact, got = (torch.where(known, t, 0.0).double() for t in (x, back))
    error = got - exact
    elements = max(x.numel(), 1)
    signal, noise = (float(t.square().sum()) / elements for t in (exact, error))
    relative = math.sqrt(noise / signal) if signal else 0.0
    beyond = exact.abs() / spread(scale, tuple(x.shape), granularity, group_size) > reach(format)
    return RoundTripError(
        relative_rms=relative,
        largest=float(error.abs().max()) if x.numel() else 0.0,
        snr_db=-20 * math.log10(relative) if relative else math.inf,
        saturated=int(beyond.sum()) / elements,
        zeros=int(((got == 0) & (exact != 0)).sum()) / elements,
        bits=8 * (values.nbytes + scale.nbytes) / elements,
    )


def reach(format: str) -> float:
    """The largest number that rounds to the format's largest value without a bound: half a step above it."""
    made = FORMATS[format]
    return made.largest + (2.0 ** (math.floor(math.log2(made.largest)) - made.mantissa - 1) if made.mantissa else 0.5)

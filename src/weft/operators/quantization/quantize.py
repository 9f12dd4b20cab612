"""``quantize(x, format, granularity)``: x / scale rounded to int8, int4 or fp8, with scales of absmax.

Compulsorily x is read and values and scales are written once; scales that span rows (per tensor, per column) take a second
read, unless they are given. A few operations an element: bandwidth is the limit.
Schemes and formats explained: docs/notes/learn/quantisation.en.md.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, eager, guarded, traced
from weft.operators.checks import check_flag, check_values
from weft.operators.dropout.seeds import check_seed, draw
from weft.operators.quantization import formats
from weft.operators.quantization.dispatch import POSITIVE, QUANTIZE, QuantizeCall, check_scale
from weft.operators.quantization.formats import FORMATS, GRANULARITIES, Scheme, scale_shape, values_shape
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

ROUNDINGS = ("nearest", "stochastic")
TRITON = QUANTIZE.kernel("triton")
Quantized = tuple[Tensor, Tensor]  # values, scale


@dataclass(frozen=True)
class Options:
    """The keyword arguments of a call."""

    group_size: int = 128
    scale: float | Tensor | None = None
    power_of_two: bool = False
    rounding: str = "nearest"
    seed: int | Tensor | None = None
    offset: int = 0
    check_scale: bool = False

    @property
    def random(self) -> str:
        """Where the seed of stochastic rounding is."""
        return "none" if self.rounding == "nearest" else "memory" if isinstance(self.seed, Tensor) else "number"

    def check(self, x: Tensor, scheme: Scheme) -> None:
        """What the table's call leaves unchecked. Raises TypeError or ValueError."""
        check_flag("quantize", "check_scale", self.check_scale)
        if not isinstance(self.rounding, str) or self.rounding not in ROUNDINGS:
            expected = "'nearest' or 'stochastic'"
            raise ValueError(f"quantize: argument 'rounding' is {self.rounding!r:.40}; expected {expected}")
        check_seed("quantize", x, self.seed, self.offset)
        if self.seed is not None and self.rounding == "nearest":
            raise ValueError(
                f"quantize: argument 'seed' is {self.seed!r:.40} and 'rounding' 'nearest'; expected 'stochastic'"
            )
        if self.scale is None:
            return
        if self.power_of_two:
            raise ValueError("quantize: argument 'power_of_two' is True and 'scale' is given; expected one of the two")
        check_scale("quantize", self.scale, "x", x, tuple(x.shape), scheme)
        if self.check_scale and isinstance(self.scale, Tensor):
            words = {"flag": "check_scale", "expected": POSITIVE}
            check_values("quantize", "scale", self.scale, lambda t: ~(t.isfinite() & (t >= 2.0**-126)), **words)


def reference(x: Tensor, format: str, granularity: str = "row", *, finite: bool = False, **options: Any) -> Quantized:
    """Always in fp32: that is the arithmetic which kernels have to repeat to the bit. ``finite`` says that x is."""
    x, o = x.detach(), Options(**options)
    x = x.float() if x.dtype == torch.float64 else x
    if o.scale is None:
        scheme = Scheme(format, granularity, o.group_size, o.power_of_two)
        made = formats.scale_of(formats.absmax(x, granularity, o.group_size, finite), scheme)
    else:
        made = as_tensor(o.scale, x).to(torch.float32)
    y = x.float() * formats.spread(formats.inverse_of(made), tuple(x.shape), granularity, o.group_size)
    sixteen = None
    if o.rounding == "stochastic":
        seed, offset = drawn_seed(x) if o.seed is None else (o.seed, o.offset)
        sixteen = formats.random_sixteen(tuple(x.shape), seed, offset, x.device)
    q = formats.rounded(y, format, sixteen, finite)
    return formats.packed(q) if format == "int4" else q, made


def drawn_seed(x: Tensor) -> tuple[int | Tensor, int]:
    """A seed and an offset that no other call has; while a compiler traces, a tensor that it draws itself."""
    if traced(x):
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=x.device), 0
    return draw(x.device)


def as_tensor(scale: float | Tensor, x: Tensor) -> Tensor:
    """A scale that came as an argument, as kernels read it; a strided one is copied."""
    if isinstance(scale, Tensor):
        return scale.detach().contiguous()
    return torch.full((), scale, dtype=torch.float32, device=x.device)


def by_triton(x: Tensor, format: str, granularity: str = "row", **options: Any) -> Quantized:
    o = Options(**options)
    x, scheme = x.detach(), Scheme(format, granularity, o.group_size, o.power_of_two)
    values, made = empty_results(x, scheme)
    if o.scale is not None:
        made = as_tensor(o.scale, x)
    elif not values.numel():
        made = formats.scale_of(torch.zeros_like(made), scheme)
    if not values.numel():
        return values.view(scheme.of.dtype), made
    seeds, number, offset = x, 0, o.offset
    if o.rounding == "stochastic":
        seed, offset = draw(x.device) if o.seed is None else (o.seed, o.offset)
        o = replace(o, seed=seed)
        seeds, number = (seed, 0) if isinstance(seed, Tensor) else (x, seed % 2**64)
    tensors = (x,) if o.scale is None else (x, made)
    TRITON.of(tensors, *scheme, o.random)(x, values, made, seeds, number, offset)
    return values.view(scheme.of.dtype), made


def empty_results(x: Tensor, scheme: Scheme) -> Quantized:
    """Memory for values, as bytes, and scales."""
    shape = tuple(x.shape)
    values = torch.empty(values_shape(shape, scheme.format), dtype=torch.uint8, device=x.device)
    of_scale = scale_shape(shape, scheme.granularity, scheme.group_size)
    return values, torch.empty(of_scale, dtype=torch.float32, device=x.device)


def plain(**named: Any) -> Quantized:
    """What a user writes, without a thought of NaN and infinities."""
    return reference(**named, finite=True)


def torchao(x: Tensor, format: str, granularity: str = "row", **options: Any) -> Quantized:
    """Its eager functions, which a user compiles as part of a model; and its Triton kernel for fp8 groups."""
    o = Options(**options)
    if o.scale is not None or o.power_of_two or o.rounding != "nearest":
        raise Declined("torchao's scales here are those of absmax, rounded to nearest")
    if x.ndim != 2 or format == "int4":
        raise Declined("torchao packs int4 for its own kernels only; other formats are taken of a matrix here")
    (m, n), size = x.shape, o.group_size
    block = {"tensor": (m, n), "row": (1, n), "column": (m, 1), "group": (1, size), "block": (128, 128)}[granularity]
    if any(n % b for n, b in zip(x.shape, block, strict=True)):
        raise Declined(f"torchao's groups divide the tensor; {tuple(x.shape)} is no multiple of {tuple(block)}")
    of_scale = scale_shape(tuple(x.shape), granularity, size)
    if format == "int8":
        from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

        scale, zero = choose_qparams_affine(x, MappingType.SYMMETRIC, block, torch.int8, -127, 127, keepdim=True)
        return quantize_affine(x, block, scale, zero, torch.int8, -127, 127), scale.view(of_scale)
    dtype = FORMATS[format].dtype
    if granularity == "group":
        from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant

        return fp8_blockwise_act_quant(x, size, dtype)
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    scale = _choose_scale_float8(x, list(block), dtype)
    return _quantize_affine_float8(x, scale, dtype), scale.view(of_scale)


def shape(w: Workload) -> tuple[int, ...]:
    batch = w.option("matrices", 0)
    return (batch, w["M"] // batch, w["N"]) if batch else (w["M"], w["N"])


def scheme_of(w: Workload) -> Scheme:
    format, granularity = w.option("format", "int8"), w.option("granularity", "row")
    return Scheme(format, granularity, w.option("group", 128), w.option("power_of_two", False))


def shape_of_scales(w: Workload) -> tuple[int, ...]:
    return scale_shape(shape(w), scheme_of(w).granularity, scheme_of(w).group_size)


def stored_bytes(w: Workload) -> tuple[int, int]:
    """Of values, and of scales."""
    return w["M"] * -(-w["N"] // scheme_of(w).of.per_byte), 4 * math.prod(shape_of_scales(w))


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x is [M, N], with ``matrices=B`` [B, M / B, N]; ``outliers``: every 16th column is 100 times as large, and every 8th row
    is zero; ``scale``: ``absmax`` (none given) or ``given``."""
    values = w.option("values", "normal")
    drawn = "normal" if values == "outliers" else values
    x = random_tensor(g, shape(w), w.dtype, device, layout=w.option("layout", "contiguous"), values=drawn)
    if values == "outliers" and x.numel():
        x[..., ::16] *= 100
        x[..., ::8, :] = 0
    scheme, scale, seed = scheme_of(w), None, None
    if w.option("scale", "absmax") == "given":
        scale = random_tensor(g, shape_of_scales(w), "fp32", device).abs() * 0.02 + 0.001
    rounding = w.option("rounding", "nearest")
    if rounding == "stochastic":
        seed = 0 if g is None else int(torch.randint(2**63 - 1, (), generator=g, device=g.device))
    return {"x": x, **scheme._asdict(), "scale": scale, "rounding": rounding, "seed": seed}


def cost(w: Workload, direction: str) -> Cost:
    """Of scales that span rows and are not given: x twice, unless it stayed on chip, which is not counted on."""
    elements = w["M"] * w["N"]
    values, scales = stored_bytes(w)
    known = w.option("scale", "absmax") == "given"
    reads = elements * w.bytes_per_element + scales * known
    return Cost(reads, values + scales, vector_flops=4 * elements, special_ops=2 * scales // 4)


def large(dtype: str = "bf16", **options: Any) -> Workload:
    """2**28 elements to fp8."""
    return workload(dtype, M=2**14, N=2**14, format="fp8_e4m3", **options)


def _ragged(format: str) -> list[Workload]:
    """Every granularity of a tensor whose last groups and blocks are shorter, and of scales that are given."""
    rows = {g: 131 if g == "block" else 3 for g in GRANULARITIES}
    n = 203 if format == "int4" else 200
    every = [workload(M=m, N=n, format=format, granularity=g) for g, m in rows.items()]
    return [*every, *(workload(M=5, N=150, format=format, granularity=g, scale="given") for g in GRANULARITIES)]


def _changed(change: Any) -> Any:
    """The reference with its values and scale changed."""
    return lambda **named: change(*reference(**named))


def swapped(values: Tensor) -> Tensor:
    """The two nibbles of each byte of int4."""
    return (values << 4) | (values >> 4) if values.dtype == torch.uint8 else values


def _truncated(x: Tensor, **named: Any) -> Quantized:
    """Rounds towards zero."""
    _, scale = reference(x, **named)
    y = x.float() / formats.spread(scale, tuple(x.shape), named["granularity"], named["group_size"])
    values = formats.rounded(y.nan_to_num(0.0).trunc(), named["format"])
    return formats.packed(values) if named["format"] == "int4" else values, scale


def _last_group_left_out(x: Tensor, **named: Any) -> Quantized:
    """The scale without a row's last elements."""
    cut = x.clone()
    cut[..., -(x.shape[-1] // 4) - 1 :] *= 0.01
    _, scale = reference(cut, **named)
    return reference(x, **{**named, "scale": scale})


quantize = Operator(
    name="quantize",
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    tolerance=Tolerance(exact=True),
    options={
        "format": tuple(FORMATS),
        "granularity": GRANULARITIES,
        "group": range(1, 2**31),
        "scale": ("absmax", "given"),
        "power_of_two": (True, False),
        "rounding": ROUNDINGS,
        "layout": LAYOUTS,
        "values": (*VALUES, "outliers"),
        "matrices": range(1, 2**31),
    },
    workloads={
        "verify": [
            *(workload(M=m, N=n) for m, n in ((1, 1), (3, 5), (37, 104), (5, 1000))),
            *(workload(M=0, N=7, granularity=g) for g in GRANULARITIES),
            *(workload(M=7, N=0, granularity=g) for g in GRANULARITIES),
            *(workload(M=5, N=n, format=f) for n in (33, 256) for f in FORMATS),
            workload(M=2, N=1, format="int4"),
            *(w for format in ("int4", "fp8_e4m3") for w in _ragged(format)),
            *(workload(M=9, N=128, format=f, values="nonfinite") for f in FORMATS),
            workload(M=9, N=97, granularity="tensor", values="nonfinite"),
            *(workload(M=9, N=64, format=f, values="outliers", power_of_two=True) for f in FORMATS),
            workload(M=9, N=64, format="fp8_e4m3", granularity="group", group=16, values="outliers"),
            *(workload(M=9, N=64, values=values, format="fp8_e5m2") for values in ("tiny", "large")),
            *(workload(M=9, N=40, format="fp8_e4m3", layout=at) for at in LAYOUTS[1:]),
            *(workload(M=9, N=40, granularity="group", group=16, layout=at) for at in ("sliced", "transposed")),
            workload(M=9, N=40, granularity="tensor", layout="sliced"),
            workload(M=70, N=45, granularity="tensor", layout="sliced", scale="given", format="fp8_e4m3"),
            *(workload(M=70, N=n, granularity=g, layout="transposed") for n in (75, 600) for g in ("row", "tensor")),
            workload(M=9, N=40, granularity="block", layout="strided"),
            workload(M=9, N=50, granularity="column", layout="transposed"),
            *(workload(M=9, N=n, granularity="group", group=g) for n, g in ((96, 32), (60, 7), (60, 100), (65, 1))),
            workload(M=9, N=90, format="int4", granularity="group", group=6),
            workload(M=260, N=140, granularity="block", matrices=2),
            workload(M=6, N=140, granularity="block", matrices=2, scale="given"),
            workload(M=140, N=150, granularity="block", layout="transposed", scale="given"),
            workload(M=40, N=50, format="int4", granularity="group", group=6, layout="transposed", scale="given"),
            *(workload(M=9, N=72, format=f, rounding="stochastic") for f in FORMATS),
            *(workload(M=5, N=75, granularity=g, group=24, rounding="stochastic") for g in GRANULARITIES),
            workload(M=9, N=60, granularity="group", group=7, rounding="stochastic"),
            workload(M=1, N=33000, format="fp8_e4m3"),
            workload(M=1, N=33000, format="int4", rounding="stochastic"),
            workload(M=2, N=33004, format="fp8_e5m2", granularity="tensor"),
        ],
        "full": [
            *(workload(M=70, N=n, format=f) for n in (2**14, 2**15 + 1, 2**16 + 8, 2**17) for f in FORMATS),
            *(workload(M=2000, N=3000, format=f, granularity=g) for f in FORMATS for g in GRANULARITIES),
            workload(M=300, N=4096, format="fp8_e4m3", granularity="group", rounding="stochastic"),
            workload(M=600, N=300, granularity="block", matrices=2, scale="given"),
        ],
        "huge": [
            workload("bf16", M=2**17 + 1, N=2**14, format="fp8_e4m3"),
            workload("bf16", M=2**17 + 1, N=2**14, format="int4", granularity="group"),
            workload("bf16", M=2**17 + 1, N=2**14, granularity="tensor", scale="given"),
            workload("bf16", M=2**20, N=2**11 + 8, layout="transposed"),
        ],
        "bench": [
            *(workload("bf16", M=2**28 // n, N=n, format="fp8_e4m3") for n in (1024, 4096, 16384, 65536)),
            workload("bf16", M=2**14, N=2**14),
            *(large(granularity=g) for g in GRANULARITIES if g != "row"),
            large(granularity="tensor", scale="given"),
            workload("bf16", M=2**14, N=2**14, format="int4", granularity="group"),
            large(rounding="stochastic"),
            large("fp32"),
        ],
        "quick": [workload(M=2**10, N=2**12), workload(M=2**10, N=2**12, format="fp8_e4m3", granularity="group")],
        "compile": [
            *(workload(M=64, N=4096, format=f, granularity="group") for f in FORMATS),
            *(workload(M=64, N=n, format="fp8_e4m3") for n in (100, 4096, 2**16)),
            *(workload(M=256, N=1024, format="fp8_e4m3", granularity=g) for g in ("tensor", "column", "block")),
            workload(M=64, N=4096, format="fp8_e4m3", rounding="stochastic"),
            workload(M=64, N=1000, granularity="group"),
            workload(M=64, N=4096, format="int4", granularity="group", scale="given"),
        ],
        "tune": [
            *(workload(d, M=2 ** (28 - i), N=2**i, format="fp8_e4m3") for d in ("fp32", "bf16") for i in range(7, 17)),
            *(large(d, granularity=g) for d in ("fp32", "bf16") for g in ("tensor", "column", "block")),
            *(large(d, granularity="group", scale="given") for d in ("fp32", "bf16")),
        ],
        "model": [workload("bf16", M=8192, N=n, format="fp8_e4m3", granularity="group") for n in (4096, 7168, 14336)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("rounded towards zero", _truncated),
        Mutant("scales left out", _changed(lambda values, scale: (values, torch.ones_like(scale)))),
        Mutant("a row's last elements left out of its scale", _last_group_left_out),
        Mutant("scale inverted", _changed(lambda values, scale: (values, 1 / scale))),
        Mutant("always a power of two", mutants.changed(reference, power_of_two=lambda flag: True)),
        Mutant("another random number", mutants.changed(reference, seed=lambda n: None if n is None else n + 1)),
        Mutant("always to nearest", mutants.changed(reference, rounding=lambda how: "nearest")),
        Mutant("nibbles swapped", _changed(lambda values, scale: (swapped(values), scale))),
    ],
)

quantize.implementation("triton", arch=">=sm_80")(by_triton)
peers.register(quantize, reference, plain)
quantize.implementation("torchao", requires="torchao", devices=("cuda",))(torchao)


@quantize.choice
@guarded
def choose(x: Tensor, format: str, granularity: str = "row", **options: Any) -> Choice:
    o = Options(**options)
    o.check(x, QuantizeCall(x, format, granularity, o.group_size, o.power_of_two).scheme)
    scale = () if o.scale is None else (o.scale if isinstance(o.scale, Tensor) else x,)  # of a number, any tensor
    return QUANTIZE.choose(x, *scale, format, granularity, o.group_size, o.power_of_two, o.random)


@quantize.function
def quantize_function(
    x: Tensor, format: str, granularity: str = "row", *, group_size: int = 128, scale: float | Tensor | None = None,
    power_of_two: bool = False, rounding: str = "nearest", seed: int | Tensor | None = None, offset: int = 0,
    check_scale: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Absmax quantisation: values = round(x · (1 / scale)), within ± the format's largest value.

    Args:
        x: [..., N]; float32, float16 or bfloat16; float64 is rounded to float32.
        format: ``int8`` (± 127), ``int4`` (± 7), ``fp8_e4m3`` (± 448, torch.float8_e4m3fn) or ``fp8_e5m2`` (± 57344).
        granularity: which elements share a scale, and so the scale's shape: ``tensor`` (); ``row`` [..., 1]; ``column``
            [1, ..., N]; ``group``, of ``group_size`` neighbours in a row, [..., ceil(N / group_size)]; ``block``, of 128 x 128
            in the last two dimensions [M, N], [..., ceil(M / 128), ceil(N / 128)]. Last groups and blocks may be smaller.
        group_size: for ``group``; even for int4.
        scale: scales to use, fp32 of that shape (for ``tensor`` a number too); None for absmax / the format's largest value.
        power_of_two: scales are rounded up to a power of two.
        rounding: ``nearest`` (ties to even) or ``stochastic``: up or down, so that the expectation is x / scale.
        seed: for ``stochastic``: an int of 64 bits, an int64 tensor of one element on x's device, or None: drawn from PyTorch's
            default generator, as dropout does.
        offset: 0 … 2**62 − 1: another one with the same seed gives independent random numbers.
        check_scale: raise ValueError for a scale that is not positive and finite: waits for the device. (A number always is
            checked.)

    Returns:
        (values, scale). Values are contiguous, of x's shape, int8 or fp8; of int4 uint8 [..., ceil(N / 2)] with the even
        column in the lower four bits. Scales are fp32: x ≈ values · scale.

    Raises:
        TypeError: tensors of other dtypes.
        ValueError: an unknown format, granularity or rounding; a scale of another shape, device or (see ``check_scale``) value;
            an odd group_size for int4; a seed without stochastic rounding.

    NaN stays NaN in fp8, is 0 in int8 and int4, and does not count for absmax; an infinity counts as the largest fp32 number
    and saturates. Scales are at least 2**-126; where all is zero they are that, and values 0. Results have no gradient.
    Sources: Micikevicius et al. 2022 (arXiv 2209.05433) for fp8; Gupta et al. 2015 (arXiv 1502.02551) for stochastic rounding.
    """
    plain = scale is None and rounding == "nearest" and seed is None and not offset and check_scale is False
    if plain and isinstance(x, Tensor) and eager(x, gradient=True, autocast=True):
        scheme = (format, granularity, group_size, power_of_two)
        if (plan := QUANTIZE.of((x,), *scheme)) is not None:
            made = Scheme(*scheme)
            values, scales = empty_results(x, made)
            plan(x, values, scales, x, 0, 0)
            return values.view(made.of.dtype), scales
    options: dict[str, Any] = {
        **{"group_size": group_size, "scale": scale, "power_of_two": power_of_two, "rounding": rounding},
        **{"seed": seed, "offset": offset, "check_scale": check_scale},
    }
    chosen = choose(x, format, granularity, **options).implementation
    return (reference if chosen == "torch" else by_triton)(x, format, granularity, **options)

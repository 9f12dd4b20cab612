"""``scaled_attention(q, k, v, q_scale, k_scale, v_scale)``: attention of fp8 codes and their scales.

Half the bytes of 16-bit operands; the product of queries and keys runs at twice the rate of the tensor cores. Probabilities are
multiplied with values in fp16, which holds every code of e4m3: 8 bits of a probability would be its largest error.
"""

from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants, peers
from weft.operators.attention import points
from weft.operators.attention.dispatch import TRITON, AttentionCall, Options, forward_launch, result_like, unsupported
from weft.operators.attention.dispatch import options as attention_options
from weft.operators.attention.peers import in_torch
from weft.operators.attention.reference import reference as attention_reference
from weft.operators.attention.statistics import log_sum_exp
from weft.operators.call import FLOATS, Choice, eager, guarded
from weft.operators.checks import check_device, check_flag, check_shape, check_tensor, check_value
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Dispatch, Route
from weft.operators.launch import INTERPRETING
from weft.operators.random_inputs import random_tensor

# B batch (or N packed sequences), H heads of q, G heads of k and v, S queries, T keys, D head dim of q and k, Dv of v

NAME = "scaled_attention"
SCALES = ("q_scale", "k_scale", "v_scale")
OPTIONAL = ("sinks", "cu_seqlens_q", "cu_seqlens_k")


# ---- what it computes ------------------------------------------------------------------------------------------------


def numbers(codes: Tensor, scale: Tensor, sequences: Tensor | None) -> Tensor:
    """Codes, packed beside ``sequences``, times their scale, which broadcasts to [B, heads]; in the scale's dtype."""
    x = codes.to(scale.dtype)
    if not scale.ndim:
        return x * scale
    if sequences is None:
        return x * scale[..., None, None]
    if scale.ndim == 2:
        token = torch.arange(x.shape[0], device=x.device)
        of = torch.searchsorted(sequences[1:].contiguous(), token, right=True)
        scale = scale[of.clamp(max=sequences.shape[0] - 2)]
    return x * scale[..., None]


def dequantised(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in their scales' dtype; takes the scales out of ``named``."""
    cu_q, cu_k = named.get("cu_seqlens_q"), named.get("cu_seqlens_k")
    q_scale, k_scale, v_scale = (named.pop(n) for n in SCALES)
    return numbers(q, q_scale, cu_q), numbers(k, k_scale, cu_k), numbers(v, v_scale, cu_k)


def reference(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """Standard attention of the dequantised codes, in fp32 (float64 where the scales are), rounded once."""
    dtype = named.pop("dtype", torch.bfloat16)
    q, k, v = dequantised(q, k, v, named)
    if named.get("sinks") is not None:
        named["sinks"] = named["sinks"].to(q.dtype)
    out = attention_reference(q, k, v, **named)
    if q.dtype == torch.float64:
        return out
    return (out[0].to(dtype), out[1]) if isinstance(out, tuple) else out.to(dtype)


def in_pytorch(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    """What a user of PyTorch writes: dequantised codes in the result's dtype, and its attention."""
    dtype = named.pop("dtype", torch.bfloat16)
    if named.get("sinks") is not None:
        named["sinks"] = named["sinks"].to(dtype)
    return in_torch(*(t.to(dtype) for t in dequantised(q, k, v, named)), **named)


# ---- where it is verified and timed ----------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """As of ``attention``, with codes of random numbers and random scales of each head (``heads``), of each head of each batch
    (``batches``), or one; the result in the workload's dtype."""
    call = points.inputs(w, g, device)
    made: dict[str, Any] = {n: call[n] for n in ("causal", "window", "scale", "softcap", *OPTIONAL, "return_lse")}
    for name, scale in zip("qkv", SCALES, strict=True):
        t = call[name]
        heads = w["H"] if name == "q" else w.option("kv_heads", w["H"])
        shape = {"heads": (heads,), "batches": (w["B"], heads)}.get(w.option("scales", "one"), ())
        made[name] = t.to(torch.float8_e4m3fn)
        made[scale] = random_tensor(g, shape or (1,), "fp32", device).abs().add(0.1)
        made[scale] = made[scale] if shape else made[scale][0]
    return {**made, "dtype": torch_dtype(w.dtype)}


def cost(w: Workload, direction: str) -> Cost:
    of = points.cost(w, direction)
    reads = of.reads // w.bytes_per_element
    return Cost(reads, of.writes, {"fp8": sum(of.matrix_flops.values())}, special_ops=of.special_ops)


# Probabilities are rounded to fp16. Hopper's tensor cores cut each product of fp8 numbers at 2**-12 of the largest of the 32
# that they add, about four times the products' root mean square: an error of 0.58 of that unit for each. Over √D, as the
# products' own sum has it, a score errs by 0.58 * 2**-10 of its products' size; seven standard deviations (DeepSeek-V3, arXiv
# 2412.19437, section 3.5).
CUT = 7 * 0.58 * 2.0**-10


def rounding(dtype: dtype) -> float:
    return max(torch.finfo(dtype).eps, 2.0**-10)


def result_terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """A row's root mean square. A probability errs by as much of itself as its score errs, and a score by ``CUT`` of its
    products' size: where the scales make scores larger than 1, so does the tolerance's share for sums."""
    named = {n: a for n, a in arguments.items() if n not in ("q", "k", "v", "dtype")}
    q, k, v = dequantised(arguments["q"], arguments["k"], arguments["v"], named)
    out = attention_reference(q, k, v, **named)
    o, *lse = out if isinstance(out, tuple) else (out,)
    rows = [t.nan_to_num(neginf=0.0).square().mean(-1, keepdim=True).sqrt().expand_as(t) for t in (o, *lse)]
    of_keys = attention_reference(q, k, k.square(), **named | {"return_lse": False})
    scale = abs(q.shape[-1] ** -0.5 if named["scale"] is None else named["scale"])
    size = scale * (q.square() * of_keys).sum(-1, keepdim=True).sqrt()
    rounded = 2 * rounding(arguments["dtype"])
    return [rows[0] * (rounded + CUT * size.clamp(min=1)) / (rounded + CUT), *rows[1:]]


def _other_scale(name: str) -> Mutant:
    return Mutant(f"{name} of a neighbour", mutants.changed(reference, **{name: lambda s: s.roll(1) * 1.05}))


SMALL = {"B": 2, "H": 4, "S": 35, "T": 70, "D": 32, "kv_heads": 2}
LARGE = workload("bf16", B=4, H=16, S=4096, T=4096, D=128)

scaled_attention = Operator(
    name=NAME,
    axes={"B": "batches, or packed sequences", "H": "heads of q", "S": "queries", "T": "keys", "D": "head dim of q and k"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        **{n: v for n, v in points.OPTIONS.items() if n != "alibi"},
        "packed": (False, True),
        "ahead": range(2**16),
        "scales": ("one", "heads", "batches"),
    },
    tolerance=Tolerance(
        ulps=2.0,
        eps=lambda w: rounding(torch_dtype(w.dtype)),
        terms=lambda w: int((CUT / 1.4 / torch.finfo(torch.float32).eps) ** 2) + w["T"],  # for which CUT is added
        scale=result_terms,
    ),
    workloads={
        "verify": [
            workload(B=1, H=1, S=1, T=1, D=16),
            workload(**SMALL, causal=True, lse=True, scales="heads"),
            workload(**SMALL, scales="batches", sinks=True, layout="transposed", lse=True),
            workload(B=1, H=2, S=40, T=66, D=24, dv=40, left=20, right=9, softcap=150),
            workload(B=3, H=2, S=9, T=40, D=16, kv_heads=1, packed=True, causal=True, lse=True, scales="batches"),
            workload(B=2, H=2, S=9, T=40, D=64, packed=True, ahead=35, left=20, sinks=True),
            workload(B=2, H=2, S=4, T=0, D=16, lse=True),
        ],
        "full": [
            *(workload(B=1, H=4, S=s, T=t, D=d, kv_heads=2, causal=c, lse=True, scales="heads")
              for s, t, d in ((300, 333, 64), (129, 1025, 128), (200, 200, 256)) for c in (False, True)),
            workload(B=5, H=4, S=300, T=300, D=128, kv_heads=1, packed=True, causal=True, scales="batches"),
        ],
        "bench": [
            workload("bf16", B=16384 // s, H=2048 // d, S=s, T=s, D=d, causal=c)
            for d in (64, 128) for s in (1024, 4096) for c in (False, True)
        ],
        "quick": [LARGE],
        "compile": [
            *(workload(t, B=1, H=4, S=512, T=512, D=d, causal=True, kv_heads=2)
              for t in ("bf16", "fp32") for d in (64, 128, 256)),
            workload("fp16", B=4, H=4, S=512, T=512, D=128, packed=True, causal=True, sinks=True, softcap=3000, left=100),
        ],
        "model": [workload("bf16", B=1, H=32, S=8192, T=8192, D=128, kv_heads=8, causal=True)],
    },
    mutants=[
        *mutants.usual(reference),
        *map(_other_scale, SCALES),
        Mutant("sinks left out", lambda **a: reference(**{**a, "sinks": None})),
        Mutant("probabilities in 8 bits", lambda **a: _rounded(**a)),
    ],
)  # fmt: skip


def _rounded(**arguments: Any) -> Any:
    """The values' codes with a bit less."""
    v = arguments["v"]
    return reference(**{**arguments, "v": (v.view(torch.uint8) & 0xFE).view(v.dtype)})


# ---- the table and the launch ----------------------------------------------------------------------------------------


class ScaledCall(AttentionCall):
    """``(q, k, v, q_scale, k_scale, v_scale, *tensors, options, dtype)``."""

    operator = NAME
    numbers = (torch.float8_e4m3fn,)

    def __init__(self, *arguments: Any):
        *rest, self.dtype = arguments
        super().__init__(*rest)

    def check(self) -> None:
        super().check()
        check_value(
            NAME, "dtype", self.dtype, self.dtype in FLOATS, "torch.float32, torch.float16 or torch.bfloat16", TypeError
        )
        sequences = self.given["cu_seqlens_q"].shape[0] - 1 if self.packed else self.q.shape[0]
        for name, t in zip(SCALES, (self.q, self.k, self.v), strict=True):
            scale, heads = self.given[name], t.shape[1]
            check_tensor(NAME, name, scale, (torch.float32, torch.float64))
            check_device(NAME, name, scale, "q", self.q)
            fits = scale.shape in ((), (heads,), (sequences, heads))
            check_shape(NAME, name, scale, fits, f"(), ({heads},) or ({sequences}, {heads})")

    @property
    def dtypes(self) -> dict[str, tuple[torch.dtype, ...]]:
        return {**super().dtypes, "sinks": FLOATS, **dict.fromkeys(SCALES, (torch.float32, torch.float64))}

    @property
    def in_float64(self) -> bool:
        return any(self.given[name].dtype == torch.float64 for name in SCALES)

    @property
    def format(self) -> str:
        return "fp8_by_bits" if INTERPRETING or self.sm < 89 else "fp8"


class Launch:
    """Called with q, k, v and the tensors of a call: the result, and the log-sum-exp of its rows where it is asked for."""

    def __init__(self, c: ScaledCall):
        self.plan, self.dtype, self.dv, self.plain = forward_launch(c), c.dtype, c.dv, not c.options.needs_natural_units
        self.names, self.by_bits = c.options.names, c.format == "fp8_by_bits"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(zip(self.names, tensors, strict=True))
        o = result_like(q, self.dv, dtype=self.dtype)
        rows = (q.shape[1], q.shape[0]) if q.ndim == 3 else q.shape[:3]
        peak, log_sum = torch.empty((2, *rows), dtype=torch.float32, device=q.device).unbind()
        if self.by_bits:
            q, k, v = (t.view(torch.uint8) for t in (q, k, v))
        optional = (given.get(n, q) for n in ("sinks", "alibi", "cu_seqlens_q", "cu_seqlens_k", "seed", *SCALES))
        self.plan(q, k, v, o, peak, log_sum, q, q, *optional, 0, 0)
        return o, peak, log_sum


SCALED = Dispatch(
    ScaledCall,
    ON_CPU,
    Route("torch", lambda c: c.in_float64, "scales in float64, for checks: PyTorch's operators"),
    TRACED,
    EMPTY,
    Route("torch", lambda c: c.no_kernel != "", "head dims below 16 or above 256, for which there is no kernel"),
    Route("torch", lambda c: unsupported(c) != "", "strides so long that a tile spans 2**31 elements"),
    Route("triton", lambda c: True, TRITON, Launch, unsupported),
)


def call_of(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, **named: Any
) -> tuple[tuple[Tensor, ...], Options, Any]:
    """Tensors, options and the result's dtype of a call."""
    named = {"causal": False, "window": None, "scale": None, "softcap": None, **named}
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    given |= {n: named[n] for n in OPTIONAL if named.get(n) is not None}
    if isinstance(given.get("sinks"), Tensor):
        given["sinks"] = given["sinks"].contiguous()
    try:
        of = named["causal"], named["window"], named["scale"], named["softcap"]
        o = attention_options(tuple(given), *of, None, 0.0)
    except (TypeError, ValueError) as error:  # said of ``attention``, whose options these are
        raise type(error)(str(error).replace("attention: ", f"{NAME}: ", 1)) from None
    check_flag(NAME, "return_lse", named.get("return_lse", False))
    return (q, k, v, *given.values()), o, named.get("dtype", torch.bfloat16)


def launched(launch: Launch, tensors: tuple[Tensor, ...], return_lse: bool) -> Any:
    o, peak, log_sum = launch(*tensors)
    return (o, log_sum_exp(peak, log_sum, launch.plain)) if return_lse else o


@scaled_attention.implementation("triton", arch=">=sm_80")
def by_kernel(*call: Tensor, **named: Any) -> Any:
    tensors, o, dtype = call_of(*call, **named)
    return launched(SCALED.kernel("triton").of(tensors, o, dtype), tensors, named.get("return_lse", False))


peers.register(scaled_attention, in_pytorch)


@scaled_attention.choice
@guarded
def choose(*call: Tensor, **named: Any) -> Choice:
    tensors, o, dtype = call_of(*call, **named)
    return SCALED.choose(*tensors, o, dtype)


@scaled_attention.function
def scaled_attention_function(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, *, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    dtype: dtype = torch.bfloat16, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of fp8 codes: softmax(scale · (q · q_scale)(k · k_scale)ᵀ) (v · v_scale), forward alone.

    Args:
        q, k, v: float8_e4m3fn, of shapes and strides as in ``weft.ops.attention``. Where the tokens' rows begin on 16 bytes TMA
            fetches them.
        q_scale, k_scale, v_scale: float32, positive; one number, one for each head ([H] or [G]), or for each head of each batch
            or packed sequence ([B, H] or [B, G]), as ``weft.ops.quantize`` gives them.
        causal, window, scale, softcap, sinks, cu_seqlens_q, cu_seqlens_k: as in ``weft.ops.attention``.
        dtype: of the result.
        return_lse: also return the log-sum-exp of each row of scores (with the sink).

    Returns:
        [B, H, Sq, Dv] (packed: [total, H, Dv]); with ``return_lse`` also the natural log-sum-exp in float32. Scores are
        summed as the tensor cores sum fp8, in about 14 bits on Hopper; probabilities are rounded to fp16, sums are in fp32.

    Raises:
        TypeError: tensors of other dtypes, options of other types.
        ValueError: shapes or devices that do not fit, options out of range.

    Source: Shah et al. 2024 (arXiv 2407.08608), who also round probabilities to 8 bits.
    """
    named: dict[str, Any] = {
        "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "causal": causal, "window": window, "scale": scale,
        "softcap": softcap, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "dtype": dtype,
        "return_lse": return_lse,
    }  # fmt: skip
    tensors, o, dtype = call_of(q, k, v, **named)
    ready = all(isinstance(t, Tensor) for t in tensors) and eager(*tensors, autocast=True)
    if ready and (launch := SCALED.of(tensors, o, dtype)) is not None:
        return launched(launch, tensors, return_lse)
    if choose(q, k, v, **named).implementation == "torch":
        return reference(q, k, v, **named)
    return launched(SCALED.of(tensors, o, dtype), tensors, return_lse)

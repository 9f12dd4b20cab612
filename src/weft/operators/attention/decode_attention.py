"""``decode_attention(q, k, v, lengths=…)``: attention of a sequence's newest queries over its cache of keys and values.

Reads the valid keys and values once, whatever number of heads shares them, and writes the output. Each element of the cache
meets a few queries: reading it is the limit.
"""

from typing import Any

from torch import Tensor

from weft.definition import Operator, Tolerance, workload
from weft.operators import peers
from weft.operators.attention.decode_dispatch import DecodePlan
from weft.operators.attention.decode_function import TRITON, by_operator, called, parts_of
from weft.operators.attention.decode_function import choose as choose_of
from weft.operators.attention.decode_mistakes import MISTAKES
from weft.operators.attention.decode_peers import fa3, flashinfer, in_torch
from weft.operators.attention.decode_points import AXES, OPTIONS, cost, inputs, result_terms
from weft.operators.attention.decode_reference import decode
from weft.operators.call import Choice, traced

NAME = "decode_attention"
LLAMA = {"H": 32, "S": 1, "D": 128, "kv_heads": 8}  # Llama-3 8B

# Terms: products over a head dim, as much larger as q is (a score's error is its probability's relative one), then over keys.
# Probabilities are rounded to q's dtype before they are multiplied.
TOLERANCE = Tolerance(ulps=2.0, terms=lambda w: w["D"] * w.option("times", 1) ** 2 + w["T"], scale=result_terms)

decode_attention = Operator(
    name=NAME,
    axes=AXES,
    inputs=inputs,
    reference=decode,
    cost=cost,
    options=OPTIONS,
    tolerance=TOLERANCE,
    workloads={
        "verify": [
            workload(B=1, H=1, S=1, T=1, D=16),
            workload(B=2, H=2, S=1, T=70, D=16),
            workload(B=1, H=4, S=1, T=300, D=16, kv_heads=2, lse=True),
            workload(B=6, H=4, S=1, T=100, D=24, kv_heads=2, lengths="uneven", lse=True, dv=40),
            workload(B=5, H=5, S=3, T=70, D=16, kv_heads=1, lengths="uneven", sinks=True, layout="transposed"),
            workload(B=2, H=14, S=2, T=130, D=32, kv_heads=2, lengths="half", softcap=150, alibi="heads", lse=True),
            workload(B=3, H=2, S=4, T=90, D=16, left=20, lengths="uneven", alibi="batches", plan=True),
            workload(B=2, H=2, S=4, T=40, D=16, kv_heads=1, causal=False, right=1, left=9, lse=True),
            workload(B=5, H=2, S=1, T=200, D=16, lengths="uneven", plan=True, lse=True, sinks=True),
            workload(B=2, H=2, S=2, T=600, D=16, kv_heads=1, lengths="half", invariant=True, left=530),
            workload(B=2, H=28, S=5, T=50, D=16, kv_heads=1, lengths="uneven", causal=True),
            workload(B=2, H=4, S=1, T=66, D=32, kv_heads=2, cache="fp8", lengths="uneven", scales="heads", lse=True),
            workload(B=2, H=4, S=2, T=66, D=16, kv_heads=2, cache="int8", scales="heads", plan=True, lengths="half"),
            workload(B=2, H=2, S=1, T=40, D=16, cache="fp8", scales="one", scale=-20),
            workload(B=2, H=4, S=2, T=66, D=48, dv=24, kv_heads=2, cache="int8", lengths="uneven", lse=True),
            workload(B=2, H=2, S=2, T=70, D=16, layout="strided", times=3),
            workload(B=2, H=2, S=2, T=40, D=16, layout="sliced", causal=False, scale=30),
            workload(B=1, H=2, S=1, T=40, D=16, layout="unaligned"),
            workload(B=2, H=2, S=1, T=40, D=16, layout="expanded"),
            workload(B=2, H=2, S=1, T=0, D=16, sinks=True, lse=True),
            workload(B=1, H=2, S=1, T=9, D=8),
        ],
        "full": [
            *(workload(B=6, H=g * 2, S=s, T=1000, D=d, kv_heads=2, lengths="uneven", lse=True)
              for g, s, d in ((1, 1, 128), (4, 1, 64), (5, 3, 128), (7, 1, 96), (16, 16, 128), (64, 1, 256))),
            *(workload(B=6, H=8, S=2, T=1000, D=128, kv_heads=2, lengths="uneven", cache=c, scales="heads", plan=True)
              for c in ("fp8", "int8")),
            workload(B=6, H=8, S=2, T=3000, D=128, kv_heads=2, lengths="uneven", left=1000, sinks=True, plan=True),
            workload(B=6, H=8, S=1, T=3000, D=192, dv=128, kv_heads=2, lengths="uneven", softcap=3000, invariant=True),
        ],
        "huge": [workload("bf16", B=2, H=8, S=1, T=2**20 + 7, D=128, kv_heads=8, lengths="half")],  # over 2**31 elements
        "bench": [
            *(workload("bf16", **LLAMA, B=b, T=t) for b, t in ((1, 8192), (16, 8192), (64, 4096), (1, 131072))),
            workload("bf16", **LLAMA, B=64, T=8192, lengths="uneven", plan=True),
            workload("bf16", **LLAMA, B=16, T=8192, lengths="half"),
            workload("bf16", B=16, H=32, S=1, T=4097, D=128),
            workload("bf16", B=16, H=64, S=1, T=8192, D=64, kv_heads=8, left=127, sinks=True),
            workload("bf16", B=16, H=28, S=4, T=8192, D=128, kv_heads=4),
            *(workload("bf16", **LLAMA, B=16, T=8192, cache=c, scales="one") for c in ("fp8", "int8")),
        ],
        "quick": [workload("bf16", **LLAMA, B=16, T=8192)],
        "compile": [
            *(workload("bf16", B=4, H=h, S=s, T=8192, D=d, kv_heads=8, lengths="half", plan=p, causal=s > 1)
              for h, s, d, p in ((32, 1, 128, False), (32, 1, 64, True), (64, 16, 128, False), (8, 1, 256, False))),
            *(workload("bf16", **LLAMA, B=4, T=8192, cache=c, scales="heads") for c in ("fp8", "int8")),
            workload("fp16", **LLAMA, B=4, T=8192, softcap=3000, alibi="heads", sinks=True, left=100, lse=True),
            workload("bf16", **LLAMA, B=64, T=4096),
            workload("fp32", **LLAMA, B=4, T=8192),
            workload("bf16", **LLAMA, B=4, T=8192, invariant=True),
        ],
        "tune": [workload(t, B=16, H=4 * 8, S=1, T=8192, D=d, kv_heads=8) for t in ("fp32", "bf16") for d in (64, 128, 256)],
        "model": [
            workload("bf16", **LLAMA, B=64, T=4096),
            workload("bf16", B=16, H=64, S=1, T=8192, D=64, kv_heads=8, left=127, sinks=True),
        ],
    },
    mutants=MISTAKES,
)  # fmt: skip


@decode_attention.implementation("triton", arch=">=sm_80")
def decode_attention_triton(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
    tensors, options = parts_of(NAME, q, k, v, **named)
    return by_operator(tensors, options) if traced(*tensors) else TRITON.of(tensors, options)(*tensors)


peers.register(decode_attention, in_torch)
decode_attention.implementation("flashinfer", requires="flashinfer-python", devices=("cuda",))(flashinfer)
decode_attention.implementation("fa3", requires="fa3-fwd", devices=("cuda",))(fa3)


@decode_attention.choice
def choose(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Choice:
    return choose_of(NAME, q, k, v, **named)


@decode_attention.function
def decode_attention_function(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, causal: bool = True,
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, alibi: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    return_lse: bool = False, batch_invariant: bool = False, plan: DecodePlan | None = None, checked: bool = False,
) -> Any:  # fmt: skip
    """Attention of the newest queries of each sequence over its cache of keys and values, split over the keys.

    Query i of Sq is at position lengths - Sq + i: the last one is the last valid key's (whose cache entry it finds there:
    ``append_to_cache`` comes first). One that sees no key, as in a sequence of length 0, gets zeros.

    Args:
        q: [B, H, Sq, D]; float32, float16 or bfloat16, D and Dv 16 … 256 for the kernel; made for Sq of 1 to about 16.
        k, v: [B, G, S, D] and [B, G, S, Dv], of q's dtype, or int8 or float8_e4m3fn; of any strides, so also
            ``cache.transpose(1, 2)`` of [B, S, G, D]. G divides H, and head h of q reads head h // (H / G).
        lengths: int32 [B], valid keys of each sequence; S for all if None. Read on the device, and taken as 0 … S. What lies
            behind them in the cache is not read.
        causal: a query sees no later key. Without it all see all of the valid ones.
        window, scale, softcap, sinks, alibi: as in ``weft.ops.attention``; distances are between positions.
        k_scale, v_scale: float32 [] or [G], what k and v are multiplied with: the scales of their codes.
        return_lse: also return the natural log-sum-exp of each row of scores (with the sink), float32 [B, H, Sq].
        batch_invariant: keys are divided at multiples of 512, so that the bits of a sequence's result do not depend on what
            else is in the batch, on its size or on the cache's room; slower where there are few sequences.
        plan: of :func:`~weft.operators.attention.decode_function.decode_plan`: divides the keys of uneven sequences evenly.
            Without one each sequence is divided into the same number of parts.
        checked: raise ValueError for a length out of range: waits for the device.

    Returns:
        [B, H, Sq, Dv] of q's dtype, in the order that q lies in. The same bits every time; sums are in fp32. Nothing waits for
        the device: captured in a CUDA graph, the call follows the lengths of each replay.

    Raises:
        TypeError: tensors of other dtypes, options of other types.
        ValueError: shapes or devices that do not fit, head dims over 256 (latent attention), a plan of another call.

    Gradients come from PyTorch's operators. Source: Dao et al. 2023 (Flash-Decoding), Ye et al. 2025 (arXiv 2501.01005).
    """
    named = {
        "lengths": lengths, "causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks,
        "alibi": alibi, "k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse, "batch_invariant": batch_invariant,
        "plan": plan,
    }  # fmt: skip
    return called(NAME, decode, q, k, v, checked, named)

"""``paged_decode_attention(q, k_pages, v_pages, page_table, lengths)``: decoding from a cache whose pages lie anywhere.

``decode_attention``'s kernel with another address of a key: reads the valid keys, values and page numbers once.
"""

from typing import Any

from torch import Tensor

from weft.definition import Operator, workload
from weft.operators import peers
from weft.operators.attention.decode_attention import LLAMA, TOLERANCE
from weft.operators.attention.decode_dispatch import DecodePlan
from weft.operators.attention.decode_function import TRITON, called, parts_of
from weft.operators.attention.decode_function import choose as choose_of
from weft.operators.attention.decode_mistakes import PAGED_MISTAKES
from weft.operators.attention.decode_peers import paged_fa3, paged_flashinfer, paged_in_torch
from weft.operators.attention.decode_points import AXES, PAGED_OPTIONS, cost, paged_inputs
from weft.operators.attention.decode_reference import paged_decode
from weft.operators.call import Choice

NAME = "paged_decode_attention"

paged_decode_attention = Operator(
    name=NAME,
    axes=AXES,
    inputs=paged_inputs,
    reference=paged_decode,
    cost=cost,
    options=PAGED_OPTIONS,
    tolerance=TOLERANCE,
    workloads={
        "verify": [
            workload(B=2, H=2, S=1, T=70, D=16, page=16, lse=True),
            workload(B=1, H=4, S=2, T=40, D=16, kv_heads=2, page=1, lengths="half"),
            workload(B=6, H=7, S=3, T=100, D=24, kv_heads=1, page=7, lengths="uneven", lse=True, sinks=True, dv=40),
            workload(B=2, H=4, S=1, T=200, D=16, kv_heads=2, page=8, holes=True, lengths="half"),
            workload(B=2, H=2, S=2, T=300, D=16, page=256, plan=True, lengths="half"),
            workload(B=6, H=4, S=1, T=200, D=32, page=64, holes=True, lengths="uneven", layout="transposed", plan=True),
            workload(B=2, H=4, S=2, T=130, D=16, kv_heads=2, page=32, left=40, alibi="heads", softcap=150, layout="sliced"),
            workload(B=2, H=4, S=1, T=66, D=16, kv_heads=2, page=16, cache="fp8", scales="heads", lengths="half"),
            workload(B=2, H=4, S=2, T=66, D=16, kv_heads=2, page=5, cache="int8", scales="heads", lse=True),
            workload(B=2, H=2, S=1, T=600, D=16, page=16, invariant=True, causal=False, scale=30),
            workload(B=2, H=2, S=2, T=40, D=16, page=4, layout="strided", times=3),
            workload(B=2, H=2, S=1, T=0, D=16, page=4, lse=True),
            workload(B=1, H=2, S=1, T=9, D=8, page=2),
        ],
        "full": [
            *(workload(B=6, H=8, S=2, T=1000, D=128, kv_heads=2, page=p, lengths="uneven", lse=True, holes=True)
              for p in (1, 3, 16, 64, 128, 256)),
            *(workload(B=6, H=8, S=1, T=1000, D=128, kv_heads=2, page=16, lengths="uneven", cache=c, scales="heads")
              for c in ("fp8", "int8")),
        ],
        "huge": [workload("bf16", B=2, H=8, S=1, T=2**20 + 7, D=128, page=16, lengths="half")],
        "bench": [
            *(workload("bf16", **LLAMA, B=b, T=t, page=16) for b, t in ((1, 8192), (16, 8192), (64, 4096), (1, 131072))),
            *(workload("bf16", **LLAMA, B=16, T=8192, page=p) for p in (1, 64, 256)),
            workload("bf16", **LLAMA, B=64, T=8192, page=16, lengths="uneven", plan=True),
            workload("bf16", **LLAMA, B=16, T=8192, page=16, cache="fp8", scales="one"),
        ],
        "quick": [workload("bf16", **LLAMA, B=16, T=8192, page=16)],
        "compile": [
            *(workload("bf16", **LLAMA, B=4, T=8192, page=p, lengths="half") for p in (1, 16, 256)),
            workload("bf16", **LLAMA, B=4, T=8192, page=16, cache="fp8", scales="one", plan=True),
            workload("fp16", B=4, H=8, S=4, T=8192, D=64, page=16, left=1000, sinks=True),
            workload("fp32", **LLAMA, B=4, T=8192, page=16),
        ],
        "model": [workload("bf16", **LLAMA, B=64, T=4096, page=16)],
    },
    mutants=PAGED_MISTAKES,
)  # fmt: skip


@paged_decode_attention.implementation("triton", arch=">=sm_80")
def paged_decode_attention_triton(q: Tensor, k_pages: Tensor, v_pages: Tensor, **named: Any) -> Any:
    tensors, options = parts_of(NAME, q, k_pages, v_pages, **named)
    return TRITON.of(tensors, options)(*tensors)


peers.register(paged_decode_attention, paged_in_torch)
paged_decode_attention.implementation("flashinfer", requires="flashinfer-python", devices=("cuda",))(paged_flashinfer)
paged_decode_attention.implementation("fa3", requires="fa3-fwd", devices=("cuda",))(paged_fa3)


@paged_decode_attention.choice
def choose(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, **named: Any) -> Choice:
    return choose_of(NAME, q, k_pages, v_pages, page_table=page_table, lengths=lengths, **named)


@paged_decode_attention.function
def paged_decode_attention_function(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, *, causal: bool = True,
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, alibi: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    return_lse: bool = False, batch_invariant: bool = False, plan: DecodePlan | None = None, checked: bool = False,
) -> Any:  # fmt: skip
    """``decode_attention`` from a paged cache: key j of sequence b is token j % page of page ``page_table[b, j // page]``.

    Args:
        q: [B, H, Sq, D], as in ``decode_attention``.
        k_pages, v_pages: [P, page, G, D] and [P, page, G, Dv], of any strides: ``pages.transpose(1, 2)`` of [P, G, page, D].
            Pages may have any number of tokens.
        page_table: int32 [B, N], the page of each stretch of a sequence. Keys of a page that is none (below 0, or P and more)
            are hidden, and nothing is read for them: a freed page behind a window may be -1.
        lengths: int32 [B], valid keys of each sequence, taken as 0 … N · page.
        checked: raise ValueError for a length or, within the lengths, a page out of range: waits for the device.
        All others are those of ``decode_attention``.

    Returns:
        As ``decode_attention``.

    Raises:
        TypeError, ValueError: as ``decode_attention``.

    Source: Kwon et al. 2023 (arXiv 2309.06180).
    """
    named = {
        "page_table": page_table, "lengths": lengths, "causal": causal, "window": window, "scale": scale, "softcap": softcap,
        "sinks": sinks, "alibi": alibi, "k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse,
        "batch_invariant": batch_invariant, "plan": plan,
    }  # fmt: skip
    return called(NAME, paged_decode, q, k_pages, v_pages, checked, named)

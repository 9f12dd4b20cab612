"""``attention(q, k, v, …)``: softmax(scale q kᵀ) v with masks, biases and score functions; the scores are never stored.

Forward reads q, k, v and writes the output; two products of each visible pair of query and key are its work. Backward makes the
probabilities again: five products. The matrix units are the limit.
"""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Operator, Tolerance, torch_dtype, workload
from weft.operators import peers
from weft.operators.attention.dispatch import BACKWARD, FORWARD, NAME, result_like
from weft.operators.attention.function import PUBLIC, attention_hopper, attention_triton, launched, parts_of, with_seed
from weft.operators.attention.mistakes import LEAVES, MISTAKES
from weft.operators.attention.operator import by_operator
from weft.operators.attention.peers import fa3, flex, in_torch, same_as_torchs
from weft.operators.attention.points import OPTIONS, SCORES, SHAPES, cost, gradient_terms, inputs
from weft.operators.attention.reference import reference
from weft.operators.attention.score import Score
from weft.operators.call import Choice, cast_for_products, eager, guarded, traced
from weft.operators.checks import check_flag, is_number
from weft.operators.dropout.seeds import check_seed
from weft.operators.hopper.gemm import ON_HOPPER

# B batch (or N packed sequences), H heads of q, G heads of k and v, S queries, T keys, D head dim of q and k, Dv of v

SMALL = {"B": 1, "H": 2, "S": 35, "T": 40, "D": 16}
GROUPED = {"B": 1, "H": 4, "S": 5, "T": 37, "D": 16, "kv_heads": 2}
TOKENS = 16384

attention = Operator(
    name="attention",
    axes={"B": "batches, or packed sequences", "H": "heads of q", "S": "queries", "T": "keys", "D": "head dim of q and k"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        **OPTIONS,
        "mask": tuple(SHAPES),
        "bias": tuple(SHAPES),
        "hidden": (False, True),
        "score": tuple(SCORES),
        "dropout": range(101),
        "seed": ("number", "tensor"),
        "packed": (False, True),
        "ahead": range(2**16),
    },
    differentiable=LEAVES,
    # terms: products over a head dim, and keys, or for dk and dv the queries of a group; probabilities and their gradients are
    # rounded to q's dtype before they are multiplied, the result once more
    tolerance={
        "forward": Tolerance(ulps=2.0, terms=lambda w: w["D"] + w["T"]),
        "backward": Tolerance(
            ulps=2.0, eps=lambda w: torch.finfo(torch_dtype(w.dtype)).eps, scale=gradient_terms,
            terms=lambda w: 2 * w["D"] + w["T"] + w["S"] * w["H"] // w.option("kv_heads", w["H"]),
        ),
    },
    workloads={
        "verify": [
            workload(B=1, H=1, S=1, T=1, D=16),
            workload(B=2, H=1, S=3, T=5, D=16),
            workload(B=2, H=2, S=4, T=8, D=16),
            workload(**SMALL, causal=True, lse=True),
            workload(**GROUPED, causal=True, layout="transposed", sinks=True),
            workload(B=1, H=1, S=70, T=66, D=24, dv=40, left=20, right=9, layout="strided"),
            workload(**GROUPED, mask="keys", softcap=150, alibi="heads", layout="sliced"),
            workload(B=2, H=2, S=35, T=70, D=16, mask="keys", causal=True, lse=True),
            workload(**GROUPED, mask="heads", hidden=True, lse=True, sinks=True),
            workload(B=2, H=2, S=5, T=37, D=16, kv_heads=1, mask="full", hidden=True, lse=True, alibi="batches"),
            workload(B=2, H=2, S=3, T=35, D=16, bias="heads", times=3),
            workload(B=2, H=2, S=35, T=6, D=16, bias="keys", causal=True, layout="unaligned"),
            workload(B=2, H=2, S=6, T=7, D=16, bias="queries", sinks=True, dropout=30),
            workload(B=1, H=2, S=7, T=9, D=16, bias="square", hidden=True, lse=True),
            workload(**GROUPED, score="near", lse=True, left=12),
            workload(**SMALL, dropout=40, seed="tensor"),
            workload(B=3, H=2, S=9, T=40, D=16, kv_heads=1, packed=True, causal=True, lse=True, alibi="batches", dropout=20),
            workload(B=2, H=2, S=9, T=40, D=16, packed=True, ahead=35, left=20, sinks=True, alibi="batches", dropout=20),
            workload(**GROUPED, scale=-20, layout="expanded", bias="one"),
            workload(B=2, H=2, S=4, T=0, D=16, sinks=True, lse=True),
            workload(B=2, H=2, S=0, T=3, D=16),
            workload(B=1, H=2, S=3, T=3, D=8),
            workload(B=1, H=4, S=70, T=150, D=64, kv_heads=2, causal=True, lse=True, sinks=True),
            workload(B=1, H=2, S=130, T=66, D=128, left=40, right=9, layout="transposed"),
            workload(B=2, H=2, S=70, T=150, D=64, mask="keys", softcap=150, causal=True, lse=True),
        ],
        "full": [
            *(workload(B=1, H=4, S=s, T=t, D=d, kv_heads=2, causal=c, lse=True)
              for s, t, d in ((300, 333, 64), (129, 1025, 128), (513, 257, 96), (200, 200, 256)) for c in (False, True)),
            *(workload(B=2, H=6, S=257, T=301, D=64, kv_heads=2, bias=b, mask="full", dropout=10)
              for b in ("full", "batches", "keys")),
            workload(B=2, H=4, S=700, T=700, D=128, causal=True, left=128, sinks=True, softcap=3000, times=3),
            workload(B=5, H=4, S=300, T=300, D=64, kv_heads=1, packed=True, causal=True, lse=True, sinks=True),
            workload(B=5, H=4, S=300, T=330, D=128, kv_heads=2, packed=True, left=90, lse=True),
            workload(B=2, H=4, S=300, T=333, D=128, kv_heads=2, mask="keys", softcap=3000, sinks=True, times=3),
            workload(B=4, H=4, S=300, T=300, D=128, kv_heads=2, packed=True, ahead=200, causal=True, lse=True, alibi="batches"),
            workload(B=1, H=4, S=257, T=301, D=192, dv=128, score="near", alibi="heads"),
        ],
        "huge": [workload("bf16", B=1, H=1, S=46400, T=46400, D=64, bias="full")],  # more than 2**31 scores
        "bench": [
            *(workload("bf16", B=TOKENS // s, H=2048 // d, S=s, T=s, D=d, causal=c)
              for d in (64, 128) for s in (1024, 4096, 16384) for c in (False, True)),
            workload("bf16", B=4, H=32, S=4096, T=4096, D=128, kv_heads=8, causal=True),
            workload("bf16", B=4, H=64, S=4096, T=4096, D=64, kv_heads=8, causal=True, left=127, sinks=True),
            workload("bf16", B=4, H=16, S=4096, T=4096, D=192, dv=128, causal=True),
            workload("bf16", B=4, H=8, S=4096, T=4096, D=256, kv_heads=4, causal=True, softcap=5000),
            workload("bf16", B=4, H=16, S=4096, T=4096, D=128, mask="keys"),
            workload("bf16", B=4, H=16, S=4097, T=4097, D=128, causal=True),
            workload("bf16", B=23, H=16, S=704, T=704, D=128, causal=True),
        ],
        "quick": [workload("bf16", B=1, H=16, S=2048, T=2048, D=128, causal=True)],
        "ladder": [workload("bf16", B=4, H=16, S=4096, T=4096, D=128, causal=True)],
        "compile": [
            *(workload(dtype, B=1, H=4, S=512, T=512, D=d, causal=True)
              for dtype, d in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp16", 128), ("fp32", 64), ("fp32", 256))),
            *(workload("bf16", B=1, H=4, S=512, T=512, D=128, kv_heads=2, left=100, **more)
              for more in ({"bias": "heads", "mask": "keys", "alibi": "heads"},
                           {"softcap": 3000, "dropout": 10, "score": "near"})),
            workload("bf16", B=4, H=4, S=512, T=512, D=192, dv=128, packed=True, causal=True, sinks=True),
            workload("bf16", B=4, H=4, S=512, T=512, D=128, packed=True),
            workload("bf16", B=1, H=4, S=512, T=512, D=64, softcap=3000, mask="keys"),
        ],
        "tune": [workload("bf16", B=TOKENS // 4096, H=2048 // d, S=4096, T=4096, D=d, causal=c)
                 for d in (64, 128, 256) for c in (False, True)],
        "model": [
            workload("bf16", B=1, H=32, S=8192, T=8192, D=128, kv_heads=8, causal=True),
            workload("bf16", B=1, H=64, S=8192, T=8192, D=64, kv_heads=8, causal=True, left=127, sinks=True),
            workload("bf16", B=1, H=128, S=4096, T=4096, D=192, dv=128, causal=True),
        ],
    },
    mutants=MISTAKES,
)  # fmt: skip

attention.implementation("triton", arch=">=sm_80")(attention_triton)
attention.implementation("hopper", backend="cuda", **ON_HOPPER)(attention_hopper)
peers.register(attention, in_torch)
attention.implementation("flex_attention", devices=("cuda",))(flex)
attention.implementation("fa3", requires="fa3-fwd", devices=("cuda",), directions=("forward",))(fa3)


@attention.choice
@guarded
def choose(q: Tensor, k: Tensor, v: Tensor, *, direction: str = "forward", **named: Any) -> Choice:
    q, k, v = cast_for_products(q, k, v)
    tensors, options, _, _ = parts_of(q, k, v, **named)
    chosen = FORWARD.choose(*tensors, options)
    if options.threshold:
        check_seed(NAME, q, named.get("seed"), named.get("offset", 0))
    check_flag(NAME, "return_lse", named.get("return_lse", False))
    if direction == "forward" or chosen.implementation == "torch":  # then backward is PyTorch's, too
        return chosen
    o = result_like(q, v.shape[-1])
    return BACKWARD.choose(q, k, v, o, o, *tensors[3:], options)


@attention.function
def attention_function(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, alibi: Tensor | None = None,
    mask: Tensor | None = None, bias: Tensor | None = None, score: Score | None = None, dropout: float = 0.0,
    seed: int | Tensor | None = None, offset: int = 0, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, return_lse: bool = False, deterministic: bool = False,
    batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Attention: softmax(scale · q kᵀ, changed as the options say) v, the scores never stored.

    Query i of Sq has position i + Sk - Sq among the Sk keys: the last query that of the last key (*bottom-right*, as in
    FlashAttention; PyTorch's ``is_causal`` differs where Sq and Sk do). A score is scaled, capped, ``alibi`` and ``bias`` are
    added and ``score`` applied; then causal, window and mask hide keys. A query that sees no key gets zeros, and its gradients
    are zero.

    Args:
        q: [B, H, Sq, D]; float32, float16 or bfloat16, D and Dv 16 … 256 for the kernels. Of any strides:
            ``x.transpose(1, 2)`` of [B, S, H, D] is read where it lies, and the result lies so, too.
        k, v: [B, G, Sk, D] and [B, G, Sk, Dv], of q's dtype; G divides H, and head h of q reads head h // (H / G).
        causal: keys behind a query's position are hidden.
        window: (left, right): so many keys before and behind a query's position are seen; None for all of a side.
        scale: of the products; D**-0.5 if None.
        softcap: c, for scores c · tanh(s / c) (Gemma 2).
        sinks: [H], a logit for each head of a key without a value: it takes its share of the softmax (gpt-oss).
        alibi: slopes [H] or [B, H]: a score loses slope · |distance of query and key| (Press et al. 2021).
        mask: boolean, broadcastable to [B, H, Sq, Sk]; true is seen. Key padding is [B, 1, 1, Sk].
        bias: of q's dtype or float32, broadcastable to [B, H, Sq, Sk]; added to the scores.
        score: a :class:`~weft.operators.attention.score.Score`, any function of a score and its position.
        dropout: probability of setting a softmax weight to 0; the others are divided by 1 - p. Rounded to a multiple of 2**-16.
        seed, offset: of dropout's mask, as ``weft.ops.dropout`` takes them: the weight at (b, h, i, j) has the mask of that
            index in [B, H, Sq, Sk rounded up to 8] (packed: [H, total, total of keys rounded up], j within its sequence).
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1], where N packed sequences of any lengths begin, and the last one's end: q is
            [total, H, D] then, k [total of keys, G, D], v likewise; a query sees its own sequence. Nothing waits for the
            device. Tokens ahead of the first sequence and behind the last one get zeros.
        return_lse: also return the log-sum-exp of each row of scores (with the sink).
        deterministic: gradients are the same bits every time, as they also are under
            ``torch.use_deterministic_algorithms(True)``. Without it q's may not be on Hopper (``explain``: ``hopper``).
        batch_invariant: kernel and tiles are chosen by a sequence's own shape, so that the bits of its result and of its
            gradients (of q, k, v) do not depend on what else is in the batch. Packed they may differ from unpacked; where
            PyTorch's operators compute (``explain``) they are as theirs.

    Returns:
        [B, H, Sq, Dv] (packed: [total, H, Dv]) of q's dtype; with ``return_lse`` also the natural log-sum-exp in float32,
        [B, H, Sq] ([H, total]), -inf where nothing is seen. Gradients flow from both to q, k, v, bias and sinks.
        Products of float32 are in full precision (no tf32), softmax is in fp32. Under autocast q, k and v are cast as PyTorch
        casts them for products.

    Raises:
        TypeError: tensors of other dtypes, options of other types.
        ValueError: shapes or devices that do not fit, options out of range, a mask or bias beside cu_seqlens, dropout beside
            batch_invariant, a ``score`` without a gradient where one is needed.

    Source: Dao et al. 2022 (arXiv 2205.14135), Milakov & Gimelshein 2018 (arXiv 1805.02867).
    """
    q, k, v = cast_for_products(q, k, v)
    named: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks, "alibi": alibi, "mask": mask,
        "bias": bias, "score": score, "dropout": dropout, "seed": seed, "offset": offset, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "return_lse": return_lse, "deterministic": deterministic,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
    tensors = tuple(t for t in (mask, bias, sinks, alibi, cu_seqlens_q, cu_seqlens_k) if t is not None)
    usual = (
        isinstance(return_lse, bool) and is_number(dropout) and not (isinstance(alibi, Tensor) and alibi.requires_grad)
    )
    if usual and eager(q, k, v, *tensors, gradient=True, autocast=True):
        parts = parts_of(q, k, v, **with_seed(q, named))
        if (plan := FORWARD.of(parts[0], parts[1])) is not None:
            if dropout and seed is not None:
                check_seed(NAME, q, seed, offset)
            return launched(parts, return_lse, PUBLIC, plan)
    choice = choose(q, k, v, **named).implementation
    named = with_seed(q, named)
    if choice == "torch":
        one = torch.compiler.is_compiling() and same_as_torchs(q, k, **named)
        return (in_torch if one else reference)(q, k, v, **named)
    if traced(q, k, v, *tensors):
        return by_operator(parts_of(q, k, v, **named), return_lse)
    return launched(parts_of(q, k, v, **named), return_lse, PUBLIC)

"""``rotary_embedding(q, k, cos, sin, interleaved=False)``: rotates pairs of columns of every head by a token's angles."""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.call import Choice, eager, guarded, traced
from weft.operators.layout import sharing
from weft.operators.opaque import opaque
from weft.operators.random_inputs import VALUES, random_tensor
from weft.operators.rotary.dispatch import BACKWARD, FORWARD, narrowed

# B batch, S sequence, H heads of q, G heads of k, D head dim, R rotated columns
Pair = tuple[Tensor, Tensor]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotated = 2 * cos.shape[-1]
    wide = x if x.dtype == torch.float64 else x.float()
    cos, sin = cos.to(wide.dtype).unsqueeze(-2), sin.to(wide.dtype).unsqueeze(-2)  # [.., S, 1, R/2]
    a, b = (wide[..., 0:rotated:2], wide[..., 1:rotated:2]) if interleaved else wide[..., :rotated].chunk(2, -1)
    one, other = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((one, other), -1).flatten(-2) if interleaved else torch.cat((one, other), -1)
    return torch.cat((turned.to(x.dtype), x[..., rotated:]), -1)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Pair:
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


TRITON = FORWARD.kernel("triton")


def _results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _launch(results: Pair, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool) -> None:
    if q.numel() or k.numel():
        plans = BACKWARD if conjugate else TRITON
        plans.of((q, k, cos, sin), interleaved, False, conjugate)(q, k, cos, sin, *results)


rotate = opaque("rotary_embedding", _results, _launch)  # what a compiler sees


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    ctx.save_for_backward(*inputs[2:4])
    ctx.interleaved, ctx.conjugate = inputs[4:]


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    return (*rotate(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate), None, None, None, None)


rotate.register_autograd(_backward, setup_context=_save)


class Rotation(KernelFunction):
    """Linear in q and k; its gradient is itself with the angles negated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *flags: bool) -> Pair:
        inplace, conjugate = (*flags, False, False)[:2]
        if inplace:
            ctx.mark_dirty(q, k)
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.conjugate = interleaved, conjugate
        if not inplace:
            results = _results(q, k, cos, sin, interleaved, conjugate)
            _launch(results, q, k, cos, sin, interleaved, conjugate)
            return results
        if q.numel() or k.numel():
            plans = BACKWARD if conjugate else TRITON
            plans.of((q, k, cos, sin), interleaved, True, conjugate)(q, k, cos, sin, q, k)
        return q, k

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        gradients = differentiable(Rotation, dq, dk, cos, sin, ctx.interleaved, False, not ctx.conjugate)
        return (*gradients, *(None,) * 5)


def rotary_embedding_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Pair:
    return differentiable(Rotation, q, k, cos.detach(), sin.detach(), interleaved)


def torch_rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Pair:
    """As model code has it: tables as wide as what they multiply, ``x * cos + rotate_half(x) * sin``."""
    wide = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
    cos, sin = wide(cos).unsqueeze(-2), wide(sin).unsqueeze(-2)
    rotated = cos.shape[-1]

    def rotate(x: Tensor) -> Tensor:
        part = x[..., :rotated]
        a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        half = torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)
        part = (part * cos + half * sin).to(x.dtype)
        return part if rotated == x.shape[-1] else torch.cat((part, x[..., rotated:]), -1)

    return rotate(q), rotate(k)


def quack(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Pair:
    from quack.rotary import apply_rotary_emb

    if cos.ndim != 2:
        raise Declined("QuACK takes tables [S, R/2]")
    return apply_rotary_emb(q, cos, sin, interleaved), apply_rotary_emb(k, cos, sin, interleaved)


def liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Pair:
    """In place, in forward and in backward: it takes [B, H, S, D] views of memory that lies [B, S, H, D]."""
    from liger_kernel.ops.rope import LigerRopeFunction

    if interleaved:
        raise Declined("Liger takes halves, not interleaved pairs")
    rows = (t if t.ndim == 3 else t.unsqueeze(0) for t in (cos, sin))
    a, b = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), *rows, None, 1, 2 * cos.shape[-1])
    return a.transpose(1, 2), b.transpose(1, 2)


VIEWS = ("contiguous", "packed", "transposed", "unaligned", "sliced", "strided", "expanded")


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """q is [B, S, H, D], k [B, S, G, D]. Options: ``kv_heads`` (G, when not H), ``rotary`` (R, when not D), ``interleaved``,
    ``table`` (its dtype: q's, or fp32), ``batched`` (tables [B, S, R/2] instead of [S, R/2]), ``values``, ``layout``
    (``packed``: views of one [B, S, H + 2 G, D]; ``transposed``: of [B, H, S, D])."""
    (b, s, h, d), kv = (w[a] for a in "BSHD"), w.option("kv_heads", w["H"])
    layout, values = w.option("layout", "contiguous"), w.option("values", "normal")

    def drawn(heads: int) -> Tensor:
        if layout == "transposed":
            return random_tensor(g, (b, heads, s, d), w.dtype, device, values=values).transpose(1, 2)
        return random_tensor(g, (b, s, heads, d), w.dtype, device, layout=layout, values=values)

    if layout == "packed":
        q, k, _ = random_tensor(g, (b, s, h + 2 * kv, d), w.dtype, device, values=values).split((h, kv, kv), 2)
    else:
        q, k = drawn(h), drawn(kv)
    shape = (*((b,) if w.option("batched") else ()), s, w.option("rotary", d) // 2)
    angles = random_tensor(g, shape, "fp32", device) * 3
    dtype = torch.float32 if w.option("table") == "fp32" else q.dtype
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return {"q": q, "k": k, "cos": cos, "sin": sin, "interleaved": w.option("interleaved", False)}


def cost(w: Workload, direction: str) -> Cost:
    """q and k read and written (or their gradients), the tables read; 6 operations a pair."""
    tokens, heads, rotated = w["B"] * w["S"], w["H"] + w.option("kv_heads", w["H"]), w.option("rotary", w["D"])
    size = tokens * heads * w["D"] * w.bytes_per_element
    rows = tokens if w.option("batched") else w["S"]
    tables = rows * rotated * (4 if w.option("table") == "fp32" else w.bytes_per_element)
    return Cost(size + tables, size, vector_flops=3 * tokens * heads * rotated)


def gradient(dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Pair:
    return reference(dq, dk, cos, -sin, interleaved)


def _rest_left_out(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Pair:
    pair = reference(q, k, cos, sin, interleaved)
    for y in pair:
        y[..., 2 * cos.shape[-1] :] = 0
    return pair


def _first_batch(table: Tensor) -> Tensor:
    return table if table.ndim == 2 else table[:1].expand(table.shape)


MODEL = {"B": 8, "S": 8192, "H": 32, "D": 128, "kv_heads": 8}
SHORT = {"B": 1, "S": 64, "H": 32, "D": 128, "kv_heads": 8}
FEW = {"B": 2, "S": 3, "H": 4, "D": 16, "kv_heads": 2}

rotary_embedding = Operator(
    name="rotary_embedding",
    axes={"B": "batch", "S": "sequence", "H": "heads of q", "D": "head dim"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "layout": VIEWS,
        "values": VALUES,
        "kv_heads": range(2**16),
        "rotary": range(2, 2**16, 2),
        "table": ("same", "fp32"),
        "batched": (False, True),
        "interleaved": (False, True),
    },
    differentiable=("q", "k"),
    tolerance=Tolerance(),
    workloads={
        "verify": [
            workload(B=1, S=1, H=1, D=2, kv_heads=1),
            workload(B=1, S=2, H=1, D=2, kv_heads=1, interleaved=True),
            *(
                workload(B=b, S=s, H=h, D=d, kv_heads=g)
                for b, s, h, g, d in ((2, 3, 4, 2, 16), (1, 5, 3, 1, 40), (2, 2, 40, 5, 64), (1, 2, 2, 9, 128))
            ),
            *(workload(**FEW, interleaved=pairs, rotary=6) for pairs in (False, True)),
            *(workload(**FEW, interleaved=pairs, table="fp32") for pairs in (False, True)),
            *(workload(**FEW, interleaved=pairs, batched=True) for pairs in (False, True)),
            workload(B=2, S=3, H=4, D=7, kv_heads=2, rotary=6),
            workload(B=1, S=3, H=12, D=80, kv_heads=12, rotary=20, interleaved=True),
            *(workload(**FEW, layout=layout) for layout in VIEWS[1:]),
            *(workload(**FEW, layout=layout, interleaved=True, rotary=8) for layout in VIEWS[1:4]),
            # tokens nearer than heads: several to a program, the last of them short
            workload(B=2, S=19, H=4, D=16, kv_heads=2, layout="transposed"),
            workload(B=2, S=33, H=4, D=16, kv_heads=3, layout="transposed", rotary=6),
            workload(B=2, S=40, H=4, D=16, kv_heads=9, layout="transposed", interleaved=True, rotary=8, batched=True),
            workload(B=1, S=70, H=3, D=40, kv_heads=1, layout="transposed", rotary=20, table="fp32"),
            *(workload(**{**FEW, axis: 0}) for axis in ("B", "S", "kv_heads")),
            *(workload(B=2, S=9, H=4, D=32, kv_heads=2, values=values) for values in ("large", "tiny", "nonfinite")),
        ],
        "bench": [
            *(workload(**MODEL, **other) for other in ({}, {"interleaved": True}, {"rotary": 32})),
            *(workload(**MODEL, layout=layout) for layout in ("transposed", "packed")),
        ],
        "quick": [workload(B=1, S=1024, H=32, D=128, kv_heads=8)],
        "compile": [
            *(workload(**SHORT, **other) for other in ({}, {"table": "fp32", "interleaved": True})),
            workload(B=1, S=64, H=12, D=80, kv_heads=12, rotary=32),
            *(workload(B=1, S=64, H=8, D=256, kv_heads=1, layout=layout) for layout in ("packed", "strided")),
            *(workload(**SHORT, layout="transposed", **other) for other in ({}, {"rotary": 32})),
        ],
        "tune": [
            workload(dtype, B=2**26 // (4096 * 40 * d), S=4096, H=32, D=d, kv_heads=8, interleaved=pairs)
            for dtype in ("fp32", "bf16")
            for d in (64, 128, 256)
            for pairs in (False, True)
        ],
        "huge": [workload("bf16", B=1, S=2**22 + 1, H=4, D=128, kv_heads=1)],
        "model": [workload("bf16", B=1, S=8192, H=h, D=128, kv_heads=8) for h in (32, 64)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("angle negated", mutants.changed(reference, sin=torch.neg)),
        Mutant("cosine and sine exchanged", lambda q, k, cos, sin, **n: reference(q, k, sin, cos, **n)),
        Mutant("next angle", mutants.changed(reference, **dict.fromkeys(("cos", "sin"), lambda t: t.roll(1, -2)))),
        Mutant("first batch's angles", mutants.changed(reference, cos=_first_batch, sin=_first_batch)),
        Mutant("rest left out", _rest_left_out),
        Mutant("k passed on", lambda q, k, *a, **n: (reference(q, k, *a, **n)[0], k.clone())),
        Mutant("pairs for halves", mutants.changed(reference, interleaved=lambda interleaved: not interleaved)),
        *mutants.usual(gradient, "backward"),
        Mutant("angle not negated", lambda dq, dk, q, k, *a, **n: reference(dq, dk, *a, **n), "backward"),
        Mutant("sine left out", mutants.changed(gradient, sin=torch.zeros_like), "backward"),
        Mutant("k's passed on", lambda dq, dk, *a, **n: (gradient(dq, dk, *a, **n)[0], dk.clone()), "backward"),
    ],
)

rotary_embedding.implementation("triton", arch=">=sm_80")(rotary_embedding_triton)
peers.register(rotary_embedding, torch_rotary_embedding)
rotary_embedding.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)
# last: it writes over the arguments and gradients that all share
rotary_embedding.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)


@rotary_embedding.choice
@guarded
def choose(*call: Any, direction: str = "forward") -> Choice:
    chosen = FORWARD.choose(*call)
    if direction == "forward" or chosen.implementation == "torch":
        return chosen
    return BACKWARD.choose(*call[:5])


@rotary_embedding.function
def rotary_embedding_function(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys, both in one launch.

    Columns i and i + R/2 of every head (interleaved: 2 i and 2 i + 1) are a pair (a, b) that becomes
    (a cos - b sin, b cos + a sin) with the token's angle i; columns from R on are left as they are.

    Args:
        q: [B, S, H, D]; float32, float16 or bfloat16. Of any strides: views of one packed tensor, or
            ``x.transpose(1, 2)`` of [B, H, S, D], are read where they lie.
        k: [B, S, G, D], of q's dtype; any number of heads.
        cos, sin: [S, R/2], [1, S, R/2] or [B, S, R/2], of q's dtype or float32, R <= D. Tables of over D/2 columns are taken
            for ones that repeat them in two halves (Hugging Face's ``cat((freqs, freqs), -1)``), of which the first is read;
            of narrower ones that do pass ``cos[..., :R // 2]``, and of ``interleaved`` ones that repeat each column
            ``cos[..., ::2]``, which are views.
        interleaved: pairs are neighbours (GPT-J) instead of halves (GPT-NeoX, Llama).
        inplace: write the results over q and k. With a gradient, PyTorch takes it for tensors that are no views or leaves;
            where the tables want one, q and k are copied first.

    Returns:
        The rotated q and k, of their shapes and dtype, computed in fp32 and rounded once; with ``inplace``, q and k.

    Raises:
        TypeError: tensors of other dtypes, or options that are no bool.
        ValueError: shapes or devices that do not fit, or ``inplace`` on tensors whose elements share memory.

    The gradient is the rotation by the negative angles; cos and sin get one only through PyTorch's operators.
    Source: Su et al. 2021 (arXiv 2104.09864).
    """
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor)
    if inplace is True and tensors and not traced(q, k) and sharing(q, k):  # which a plan does not know
        raise ValueError(
            "rotary_embedding: inplace=True and arguments 'q' and 'k' that share memory; expected places of their own (as "
            "disjoint views of one packed tensor have)"
        )
    fixed = eager(q, k, cos, sin, gradient=True, autocast=True) and not (cos.requires_grad or sin.requires_grad)
    ready = fixed and FORWARD.of((q, k, cos, sin), interleaved, inplace) is not None
    ours = ready or choose(q, k, cos, sin, interleaved, inplace).implementation == "triton"
    if ours and (ready or not traced(q, k, cos, sin)):
        return differentiable(Rotation, q, k, cos, sin, interleaved, inplace)
    cos, sin = (narrowed(table, q.shape[-1]) for table in (cos, sin))
    if ours:
        found: Pair = rotate(q, k, cos, sin, interleaved, False)
        return found
    if not inplace:
        return reference(q, k, cos, sin, interleaved)
    wanted = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    kept = (q.clone(), k.clone()) if wanted else (q, k)  # the tables' gradient needs them as they were
    rotated = reference(*kept, cos, sin, interleaved)
    return q.copy_(rotated[0]), k.copy_(rotated[1])

"""Attention where what is asked of every operator does not reach: rows that see nothing, packed sequences, groups, gradients of
broadcast biases, compilations, a model."""

import functools
import gc
import weakref

import pytest
import torch
from refused import EITHER, bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE, printed

from weft import ops
from weft.definition import Declined
from weft.operators.attention.dispatch import BACKWARD, options
from weft.operators.attention.function import attention_triton
from weft.operators.attention.points import SCORES, SHAPES
from weft.operators.attention.reference import reference
from weft.operators.attention.score import Score

pytestmark = pytest.mark.device
close = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed + sum(shape)), device=DEVICE)


def qkv(b=2, h=2, g=2, s=20, t=37, d=16):
    return random(b, h, s, d), random(b, g, t, d, seed=1), random(b, g, t, d, seed=2)


def gradients(function, tensors, **call):
    """Results and gradients of random sums of them."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves, **call)
    outs = out if isinstance(out, tuple) else (out,)
    finite = [torch.where(o.isfinite(), o, 0.0) for o in outs]
    return *outs, *torch.autograd.grad(sum((o * random(*o.shape, seed=5)).sum() for o in finite), leaves)


@pytest.mark.parametrize("hide", ["mask", "bias", "causal", "window"])
def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients(hide):
    s, t = (40, 20) if hide == "causal" else (20, 37)
    hidden = torch.zeros(s, t, device=DEVICE, dtype=torch.bool)
    hidden[: s - t if hide == "causal" else 7] = True
    call = {"mask": {"mask": ~hidden}, "bias": {"bias": torch.zeros(s, t, device=DEVICE).masked_fill(hidden, -torch.inf)},
            "causal": {"causal": True}, "window": {"window": (None, 0), "mask": ~hidden}}[hide]  # fmt: skip
    o, lse, dq, dk, dv = gradients(ops.attention, qkv(s=s, t=t), return_lse=True, **call)
    nothing = hidden.all(-1)
    assert nothing.any() and not nothing.all()
    assert not o[:, :, nothing].any() and not dq[:, :, nothing].any() and lse[:, :, nothing].eq(-torch.inf).all()
    assert o[:, :, ~nothing].ne(0).all() and dq[:, :, ~nothing].ne(0).all() and lse[:, :, ~nothing].isfinite().all()
    assert all(x.isfinite().all() for x in (o, dq, dk, dv))


def test_a_large_negative_bias_is_a_number():
    """Of a row that has -1e30 everywhere the weights are equal, in backward too."""
    q, k, v = qkv(t=33)
    bias = torch.zeros(20, 33, device=DEVICE).index_fill(0, torch.arange(5, device=DEVICE), -1e30)
    o, _, _, dv = gradients(functools.partial(ops.attention, bias=bias), (q, k, v))
    close(o[:, :, :5], v.mean(2, keepdim=True).expand(2, 2, 5, 16))
    close(dv, gradients(functools.partial(reference, bias=bias), (q, k, v))[-1])


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_those_of_separate_calls(causal):
    queries, keys = [5, 0, 33, 1, 7, 0], [9, 4, 40, 0, 70, 0]
    h, g, rest = 4, 2, 3  # tokens of no sequence, which get zeros
    q, k, v = (
        random(sum(n) + rest, heads, 16, seed=i) for i, (n, heads) in enumerate(((queries, h), (keys, g), (keys, g)))
    )
    call = {"causal": causal, "sinks": random(h), "alibi": random(6, h).abs(), "window": (50, None), "return_lse": True}
    cu_q, cu_k = (torch.tensor([0, *n], device=DEVICE).cumsum(0, dtype=torch.int32) for n in (queries, keys))
    packed = functools.partial(ops.attention, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **call)

    def separate(q, k, v):
        found = []
        for n in range(6):
            parts = (t[c[n] : c[n + 1]].transpose(0, 1)[None] for t, c in ((q, cu_q), (k, cu_k), (v, cu_k)))
            o, lse = reference(*parts, **{**call, "alibi": call["alibi"][n]})
            found.append((o[0].transpose(0, 1), lse[0]))
        behind = q[-rest:] * 0, torch.where(q[-rest:, :, 0].t() * 0 == 0, call["sinks"][:, None], 0.0)
        return torch.cat([o for o, _ in found] + [behind[0]]), torch.cat([lse for _, lse in found] + [behind[1]], 1)

    for got, want in zip(gradients(packed, (q, k, v)), gradients(separate, (q, k, v)), strict=True):
        close(got, want)


@pytest.mark.parametrize("packed", [False, True])
def test_the_bits_of_a_sequence_do_not_depend_on_the_others(packed):
    """On Hopper few heads would otherwise have another kernel than many."""
    many, s, t = 65 if DEVICE == "cuda" else 3, 40, 70
    q, k, v, do = (random(many, heads, n, 64, seed=heads + n).half() for heads, n in ((2, s), (1, t), (1, t), (2, s)))
    dlse = random(many, 2, s)
    if packed:
        q, k, v, do = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, do))
        dlse = dlse.transpose(0, 1).flatten(1)

    def cut(x, rows, axis=0):
        """Of the second sequence."""
        return x.narrow(axis, rows if packed else 1, rows if packed else 1)

    def found(tensors, upstream, sequences):
        bounds = (torch.arange(sequences + 1, device=DEVICE, dtype=torch.int32) * rows for rows in (s, t))
        cu = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds, strict=True)) if packed else {}
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        outs = ops.attention(*leaves, causal=True, window=(60, None), return_lse=True, batch_invariant=True, **cu)
        return *outs, *torch.autograd.grad(outs, leaves, upstream)

    o, lse, dq, dk, dv = found((q, k, v), (do, dlse), many)
    alone = found((cut(q, s), cut(k, t), cut(v, t)), (cut(do, s), cut(dlse, s, int(packed))), 1)
    for x, y in zip(alone, (cut(o, s), cut(lse, s, int(packed)), cut(dq, s), cut(dk, t), cut(dv, t)), strict=True):
        assert x.equal(y)


@pytest.mark.parametrize("group", [1, 5, 7])
def test_groups_of_heads_share_keys_and_values(group):
    q, k, v = qkv(b=1, h=2 * group, s=3, t=34)
    got = gradients(ops.attention, (q, k, v), causal=True)
    repeated = lambda q, k, v, **n: reference(q, *(t.repeat_interleave(group, 1) for t in (k, v)), **n)  # noqa: E731
    for a, b in zip(got, gradients(repeated, (q, k, v), causal=True), strict=True):
        close(a, b)


def test_sinks_are_read_where_they_lie():
    sinks = random(8)[::2]
    tensors = *qkv(h=4, g=2, s=5), sinks
    of = lambda f: lambda q, k, v, sinks: f(q, k, v, sinks=sinks)  # noqa: E731
    for a, b in zip(gradients(of(ops.attention), tensors), gradients(of(reference), tensors), strict=True):
        close(a, b)
    close(ops.attention(*tensors[:3], sinks=sinks), reference(*tensors[:3], sinks=sinks))


@pytest.mark.parametrize("window", [(3, 2**31 - 1), (2**31 - 1, 0), (2**31 - 1, 2**31 - 1)])
@pytest.mark.parametrize("s", [20, 41])
def test_a_bound_of_the_largest_integer_is_none(window, s):
    unbounded = tuple(None if n == 2**31 - 1 else n for n in window)
    found = gradients(functools.partial(ops.attention, window=window), qkv(s=s))
    for x, want in zip(found, gradients(functools.partial(reference, window=unbounded), qkv(s=s)), strict=True):
        close(x, want)


@pytest.mark.parametrize("scale", [1e-40, -1e-50])
def test_a_scale_below_fp32s_range_is_zero(scale):
    q, k, v = qkv()
    close(ops.attention(q, k, v, scale=scale, causal=True), reference(q, k, v, scale=0.0, causal=True))


def test_the_plans_of_backward_keep_no_tensor():
    tensors = (*qkv(), random(2, 2, 20, 16), random(2, 2, 20, 16), random(1, 1, 20, 37))
    launch = BACKWARD.of(tensors, options(("bias",), False, None, None, None, None, 0.0))
    alive = [weakref.ref(t) for t in tensors]
    del tensors
    gc.collect()
    assert launch.bias and not any(t() is not None for t in alive)


@pytest.mark.share(6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("more", [{"causal": True, "softcap": 2.0}, {"score": SCORES["near"], "window": (3, 5)}])
def test_a_bias_that_was_broadcast_has_the_sum_of_all_gradients(shape, more):
    q, k, v = qkv(h=2, g=1, s=35, t=36)
    bias = random(*SHAPES[shape](2, 2, 35, 36))
    got, want = (
        gradients(lambda *t, f=f: f(*t[:3], bias=t[3], **more), (q, k, v, bias)) for f in (ops.attention, reference)
    )
    for a, b in zip(got, want, strict=True):
        close(a, b, atol=1e-4)


def test_the_result_lies_as_q_does():
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv())
    o = ops.attention(q, k, v)
    assert o.transpose(1, 2).is_contiguous() and ops.attention(*qkv()).is_contiguous()
    close(o, reference(*qkv()))


def test_dropout_draws_from_pytorchs_generator():
    q, k, v = qkv()
    first, second = (ops.attention(q, k, v, dropout=0.5) for _ in range(2))
    state = torch.manual_seed(3) and ops.attention(q, k, v, dropout=0.5)
    assert not first.equal(second) and torch.manual_seed(3) and state.equal(ops.attention(q, k, v, dropout=0.5))
    assert not ops.attention(q, k, v, dropout=1.0, seed=1).any()
    many = torch.stack([ops.attention(q, k, v, dropout=0.3, seed=9, offset=n) for n in range(16)])
    assert float((many.mean(0) - reference(q, k, v)).square().mean()) < 2 / 16 * float(many.var(0).mean())


def test_a_score_without_a_gradient_is_for_inference():
    inference = Score(SCORES["near"].kernel, SCORES["near"].plain)
    q, k, v = qkv()
    close(ops.attention(q, k, v, score=inference), reference(q, k, v, score=inference))
    with pytest.raises(ValueError, match="'score' is a Score without a gradient"):
        ops.attention(q.requires_grad_(), k, v, score=inference)


def test_slopes_have_gradients_through_pytorch():
    q, k, v = qkv()
    slopes = torch.rand(2, device=DEVICE).requires_grad_()
    assert "slopes need a gradient" in ops.explain("attention", q, k, v, alibi=slopes).reason
    got, want = (
        torch.autograd.grad(f(q, k, v, alibi=slopes).square().sum(), slopes) for f in (ops.attention, reference)
    )
    close(got, want)
    with pytest.raises(Declined, match="slopes need a gradient"):
        attention_triton(q, k, v, alibi=slopes)


def test_a_compiler_sees_one_operator():
    calls = []

    def backend(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    q, k, v = qkv(g=1, s=8, t=8)
    close(
        torch.compile(ops.attention, backend=backend, fullgraph=True)(q, k, v, causal=True),
        reference(q, k, v, causal=True),
    )
    (one,) = (call for call in calls if "getitem" not in call)
    chosen = ops.explain("attention", q, k, v, causal=True, compiled=True).implementation
    assert ("scaled_dot_product_attention" if chosen == "torch" else "weft.attention") in one


def test_autocast_casts_as_for_products():
    with torch.autocast(DEVICE, torch.float16):
        o, lse = ops.attention(*qkv(), bias=random(20, 37), return_lse=True)
    assert o.dtype == torch.float16 and lse.dtype == torch.float32
    close(o.float(), reference(*qkv(), bias=random(20, 37)), rtol=1e-2, atol=1e-2)


COMPILED = """
import torch
from weft.operators.attention import kernels
from weft.operators.attention.function import attention_triton
from weft.operators.launch import compiling_for
def random(*shape):
    return torch.empty(shape, dtype=torch.float16, device="meta")
for sm in (80, 90):  # by addresses, by tensor descriptors
    with compiling_for(sm, lambda *kernel: None):
        for s, t in ((1, 1), (2, 5), (100, 33), (1024, 1024), (4097, 700), (33, 100000)):
            for window in ((s, 0), (1, 0)):
                attention_triton(random(2, 4, s, 16), random(2, 2, t, 16), random(2, 2, t, 16), window=window)
print([len(cache) for cache, *_ in kernels.forward.device_caches.values()])
"""


@pytest.mark.share(2)
def test_no_length_and_no_window_is_compiled_anew():
    assert printed("-c", COMPILED).strip() == "[1, 1]"


ON_HOPPER = """
import torch
from weft.bench.instructions import _disassemble
from weft.operators.attention.dispatch import BACKWARD, options
from weft.operators.attention.function import BY_TRITON, attention_triton
from weft.operators.launch import compiling_for
def printed(name, cubin, *_):
    text = _disassemble(cubin)
    print(name, text.count("WARPGROUP.ARRIVE"), text.count("HGMMA"))
q, o = (torch.empty(1, 2, 256, 64, dtype=torch.float16, device="meta") for _ in range(2))
rows = torch.empty(1, 2, 256, dtype=torch.float32, device="meta")
with compiling_for(90, printed):
    attention_triton(q, q, q, causal=True)
    call = options((), True, None, None, None, None, 0.0)
    BY_TRITON[1].of((q, q, q, o, o), call)(q, q, q, o, rows, rows, o, None, {}, 0, 0, frozenset("q"))
"""


@pytest.mark.long
def test_matrix_instructions_of_a_product_do_not_wait_for_each_other():
    """ptxas, where it sees an accumulator written among them, has each of a product's begin anew (its message C7515)."""
    found = {name: (int(begun), int(all)) for name, begun, all in map(str.split, printed("-c", ON_HOPPER).splitlines())}
    assert found["forward"] == (4, 16)  # two products, in two loops, of 64 columns by 16
    begun, every = found["query_gradients"]
    assert begun <= 8 and every >= 20


SPILLS = """
import torch
from weft.bench.compile_check import resource_usage
from weft.operators.attention.function import attention_triton
from weft.operators.launch import compiling_for
q = torch.empty(1, 2, 256, 128, dtype=torch.bfloat16, device="meta")
square = torch.empty(1, 2, 256, 256, dtype=torch.bfloat16, device="meta")
with compiling_for(90, lambda name, cubin, *_: print(resource_usage(cubin)["STACK"])):
    attention_triton(q, q, q, mask=square.bool())
    attention_triton(q, q, q, bias=square, causal=True)
"""


@pytest.mark.long
def test_masks_and_biases_are_loaded_by_vectors():
    """A load of its own for each score, or one whose layout the scores take, spills hundreds of bytes a thread."""
    assert max(map(int, printed("-c", SPILLS).split())) <= 128


class Block(torch.nn.Module):
    """A layer of a small GPT: 4 heads of 16, 2 of them of k and v."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 128), torch.nn.Linear(64, 64)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(64), torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
        )
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x, attend):
        heads = self.qkv(self.norm(x)).unflatten(-1, (8, 16)).transpose(1, 2)
        x = x + self.out(attend(*heads.split((4, 2, 2), 1), causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def losses(attend, steps):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Embedding(32, 64), Block(), Block(), torch.nn.Linear(64, 32)]).to(DEVICE)
    optimizer, found = torch.optim.AdamW(model.parameters(), 3e-3), []
    text = torch.randint(32, (2, 40), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for _ in range(steps):
        x = model[0](text[:, :-1])
        x = model[3](model[2](model[1](x, attend), attend))
        loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.share(2)
def test_a_small_gpt_learns_as_with_standard_attention():
    steps = 200 if DEVICE == "cuda" else 4
    mine, standard = losses(ops.attention, steps), losses(reference, steps)
    assert mine[-1] < mine[0] - 0.2
    assert mine[:4] == pytest.approx(standard[:4], rel=1e-4) and mine[-1] == pytest.approx(standard[-1], rel=5e-2)


@pytest.mark.gpu
def test_memory_beside_the_results_grows_with_the_length_alone():
    q, k, v = (torch.randn(1, 4, 8192, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.attention(q, k, v, causal=True).sum().backward()
    tensors, rows = 6, 4 * 8192 * 4 * 4  # o, do and gradients with room for one more; statistics
    assert torch.cuda.max_memory_allocated() - before < tensors * q.nbytes + 2 * rows


@pytest.mark.gpu
def test_more_scores_than_32_bits_count():
    """Output and all gradients of 46400² scores, whose bias has as many elements, against float64 by parts of the queries."""
    s, d = 46400, 64
    made = torch.Generator("cuda").manual_seed(1)
    q, k, v, do = (torch.randn(1, 1, s, d, device="cuda", generator=made).bfloat16() for _ in range(4))
    bias = torch.randn(1, 1, s, s, device="cuda", generator=made, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]
    o = ops.attention(q, k, v, bias=bias)
    dq, dk, dv, dbias = torch.autograd.grad(o, leaves, do)
    wide_k, wide_v = k.detach()[0, 0].double(), v.detach()[0, 0].double()
    sums = {"k": torch.zeros_like(wide_k), "v": torch.zeros_like(wide_v)}

    def agree(got, want):
        assert (got.double() - want).abs().max() < 2e-2 * want.abs().max()

    for at in range(0, s, 1600):
        rows = (0, 0, slice(at, at + 1600))
        wide_q, wide_do = q.detach()[rows].double(), do[rows].double()
        p = torch.softmax(wide_q @ wide_k.t() / d**0.5 + bias.detach()[rows], -1)
        want = p @ wide_v
        ds = p * (wide_do @ wide_v.t() - (wide_do * want).sum(-1, keepdim=True))
        sums["k"] += ds.t() @ wide_q / d**0.5
        sums["v"] += p.t() @ wide_do
        for got, expected in ((o, want), (dq, ds @ wide_k / d**0.5), (dbias, ds)):
            agree(got.detach()[rows], expected)
    agree(dk[0, 0], sums["k"])
    agree(dv[0, 0], sums["v"])


Q, K, V = qkv()
CU = torch.tensor([0, 3, 9], dtype=torch.int32, device=DEVICE)
P = random(9, 2, 16)
REFUSED = [
    bad("attention", ValueError, "'q' has shape (2, 20, 16); expected [B, heads, S, D]", Q[0], K, V),
    bad("attention", TypeError, "'k' has dtype float16 and 'q' has float32", Q, K.half(), V),
    bad("attention", ValueError, "'k' has shape (2, 2, 37, 8); the head dim (and batch) of 'q'", Q, K[..., :8], V),
    bad("attention", ValueError, "'k' has shape; a number of heads that divides the 2 of 'q'", Q, random(2, 3, 37, 16), V),
    bad("attention", ValueError, "'v' has shape (2, 2, 5, 16); that of 'k', (2, 2, 37, 16)", Q, K, V[:, :, :5]),
    bad("attention", TypeError, "'causal' is 1; True or False", Q, K, V, causal=1),
    *(bad("attention", ValueError, "'window'; (left, right)", Q, K, V, window=w) for w in (3, (1,), (-1, 0), (1.0, 2))),
    bad("attention", ValueError, "'scale' is nan; a finite number", Q, K, V, scale=float("nan")),
    bad("attention", ValueError, "'softcap' is 0; a positive number", Q, K, V, softcap=0),
    bad("attention", ValueError, "'sinks' has shape (3,); (2,), a logit for each head of 'q'", Q, K, V, sinks=random(3)),
    bad("attention", ValueError, "'alibi' has shape (3, 2); (2,) or (2, 2)", Q, K, V, alibi=random(3, 2)),
    bad("attention", TypeError, "'mask' has dtype float32; expected bool", Q, K, V, mask=random(20, 37)),
    bad("attention", ValueError, "'mask' has shape (37, 20); broadcasts to [B, H, Sq, Sk] = (2, 2, 20, 37)", Q, K, V,
        mask=random(37, 20) > 0),
    bad("attention", TypeError, "'bias' has dtype float16; expected float32", Q, K, V, bias=random(20, 37).half()),
    bad("attention", ValueError, "'bias' has shape (1, 1, 1, 20, 37); broadcasts", Q, K, V, bias=random(1, 1, 1, 20, 37)),
    bad("attention", TypeError, "'score'; expected a Score, or None", Q, K, V, score=max),
    bad("attention", ValueError, "'dropout' is 2; a probability", Q, K, V, dropout=2),
    bad("attention", ValueError, "'offset' is -1; an int", Q, K, V, dropout=0.5, seed=1, offset=-1),
    bad("attention", EITHER, "'seed'; one element of torch.int64", Q, K, V, dropout=0.5, seed=random(2)),
    bad("attention", TypeError, "'return_lse' is 1; True or False", Q, K, V, return_lse=1),
    bad("attention", TypeError, "'batch_invariant' is 1; True or False", Q, K, V, batch_invariant=1),
    bad("attention", ValueError, "'dropout' is 0.5 beside batch_invariant=True; expected 0", Q, K, V, dropout=0.5,
        batch_invariant=True),
    bad("attention", ValueError, "'cu_seqlens_k' is None beside 'cu_seqlens_q'; both", P, P, P, cu_seqlens_q=CU),
    bad("attention", TypeError, "'cu_seqlens_q' has dtype int64; int32", P, P, P, cu_seqlens_q=CU.long(), cu_seqlens_k=CU),
    bad("attention", ValueError, "'cu_seqlens_q' has shape (3,); both alike", P, P, P, cu_seqlens_q=CU, cu_seqlens_k=CU[:2]),
    bad("attention", ValueError, "'q' has shape (2, 2, 20, 16); [total, heads, D]", Q, K, V, cu_seqlens_q=CU, cu_seqlens_k=CU),
    bad("attention", ValueError, "'mask' of shape (9, 9) beside cu_seqlens", P, P, P, cu_seqlens_q=CU, cu_seqlens_k=CU,
        mask=random(9, 9) > 0),
]  # fmt: skip

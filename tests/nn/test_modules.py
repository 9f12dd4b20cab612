"""``weft.nn`` against ``torch.nn``: the same results and gradients for any arguments, and a layer written out."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from where import DEVICE

from weft import nn

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

pytestmark = pytest.mark.device
close = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=5e-5)
E, H = 32, 2
booleans = st.booleans()


def random(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=g, device=DEVICE, dtype=dtype)


def with_gradients(function, tensors, parameters=()):
    """The result, and gradients of a random sum of it by ``tensors`` and ``parameters``."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    o, *rest = out if isinstance(out := function(*leaves), tuple) else (out,)
    total = (o * random(*o.shape, seed=9)).sum() + sum(
        (w * random(*w.shape, seed=8)).sum() for w in rest if w is not None
    )
    return o, *(w for w in rest if w is not None), *torch.autograd.grad(total, [*leaves, *parameters])


def all_close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        close(x, y)


def hidden(kind, *shape, seed=1):
    """A mask as PyTorch's module takes it, which leaves each query the first key."""
    if kind is None:
        return None
    if kind == "float":
        return random(*shape, seed=seed)
    made = random(*shape, seed=seed) > 0.3
    made[..., 0] = False
    return made if kind == "bool" else torch.zeros(shape, device=DEVICE).masked_fill(made, -torch.inf)


MODULES = {
    "dropout": st.just(0.0), "bias": booleans, "add_bias_kv": booleans, "add_zero_attn": booleans, 
    "kdim": st.sampled_from([None, 24]), "vdim": st.sampled_from([None, 40]), "batch_first": booleans,
}  # fmt: skip
CALLS = {
    "batched": booleans, "padding": st.sampled_from([None, "bool", "float", "infinite"]),
    "mask": st.sampled_from([None, "bool", "float", "infinite"]), "heads_apart": booleans, "need_weights": booleans,
    "average_attn_weights": booleans, "causal": booleans, "same": st.sampled_from(["self", "key is value", "none"]),
}  # fmt: skip


@settings(max_examples=24, deadline=None, database=None, derandomize=True)
@given(st.fixed_dictionaries(MODULES), st.fixed_dictionaries(CALLS), st.sampled_from([(1, 1), (5, 37), (35, 4)]))
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
def test_multihead_attention_is_pytorchs(module, call, sizes):
    torch.manual_seed(0)
    same, batched = call["same"], call["batched"]
    if same != "none":
        module = {**module, "kdim": None, "vdim": None}
    queries, keys = (sizes[1], sizes[1]) if same == "self" or call["causal"] else sizes
    theirs = torch.nn.MultiheadAttention(E, H, **module, device=DEVICE)
    for p in theirs.parameters():  # biases are zero, and a wrong one would not show
        torch.nn.init.normal_(p, std=0.3)
    ours = nn.MultiheadAttention(E, H, **module, device=DEVICE)
    ours.load_state_dict(theirs.state_dict())
    n, first = 3 if batched else 1, module["batch_first"]
    shape = lambda s, width: (s, width) if not batched else (n, s, width) if first else (s, n, width)  # noqa: E731
    query, key = random(*shape(queries, E)), random(*shape(keys, module["kdim"] or E), seed=1)
    value = random(*shape(keys, module["vdim"] or E), seed=2)
    options = {"need_weights": call["need_weights"], "average_attn_weights": call["average_attn_weights"]}
    options["key_padding_mask"] = hidden(call["padding"], *((n, keys) if batched else (keys,)))
    options["attn_mask"] = hidden(
        call["mask"], *((n * H, queries, keys) if call["heads_apart"] else (queries, keys)), seed=3
    )
    if call["causal"] and not module["add_bias_kv"] and not module["add_zero_attn"]:  # which PyTorch's hint hides
        options["attn_mask"] = torch.ones(queries, keys, device=DEVICE, dtype=torch.bool).triu(1)
        options["is_causal"] = True
    given = {"self": (query,), "key is value": (query, key), "none": (query, key, value)}[same]
    every = {"self": lambda q: (q, q, q), "key is value": lambda q, k: (q, k, k), "none": lambda *t: t}[same]
    found, wanted = (
        with_gradients(lambda *t, m=m: m(*every(*t), **options), given, list(m.parameters())) for m in (ours, theirs)
    )
    all_close(found, wanted)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_query_that_sees_nothing_gives_the_bias_of_the_output(need_weights):
    ours = nn.MultiheadAttention(E, H, batch_first=True, device=DEVICE)
    torch.nn.init.normal_(ours.out_proj.bias)
    padding = torch.tensor([[False] * 5, [True] * 5], device=DEVICE)
    o, weights, dx = (*with_gradients(
        lambda x: ours(x, x, x, key_padding_mask=padding, need_weights=need_weights), [random(2, 5, E)]), None)[:3]  # fmt: skip
    if need_weights:
        assert not weights[1].any() and not dx[1].any()
    close(o[1], ours.out_proj.bias.expand(5, E))
    assert o.isfinite().all()


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (9, 4), (4, 9)])
def test_causal_without_a_mask_is_aligned_at_the_first_key(queries, keys):
    ours = nn.MultiheadAttention(E, H, device=DEVICE)
    q, k = random(queries, 2, E), random(keys, 2, E, seed=1)
    mask = torch.ones(queries, keys, device=DEVICE, dtype=torch.bool).triu(1)
    close(ours(q, k, k, need_weights=False, is_causal=True)[0], ours(q, k, k, attn_mask=mask)[0])
    close(ours(q, k, k, is_causal=True)[1], ours(q, k, k, attn_mask=mask)[1])


def test_dropout_drops_weights_in_training_alone():
    ours = nn.MultiheadAttention(E, H, dropout=0.5, device=DEVICE)
    x = random(40, 2, E)
    for need_weights in (False, True):
        run = lambda: ours.eval()(x, x, x, need_weights=need_weights)[0]  # noqa: B023, E731
        still = run()
        close(run(), still)
        many = torch.stack([ours.train()(x, x, x, need_weights=need_weights)[0] for _ in range(8)])
        assert not many[0].equal(many[1])
        spread = many.std(0).mean()
        assert (many.mean(0) - still).square().mean().sqrt() < 2 * spread / 8**0.5


def test_states_go_both_ways_and_a_copy_is_one():
    theirs = torch.nn.MultiheadAttention(E, H, add_bias_kv=True, device=DEVICE)
    ours = nn.MultiheadAttention(E, H, add_bias_kv=True, device=DEVICE)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    copied = copy.deepcopy(ours)
    x = random(6, 1, E)
    close(copied(x, x, x)[0], theirs(x, x, x)[0])
    layer = torch.nn.TransformerEncoderLayer(E, H, 8, dropout=0.0, device=DEVICE)
    wanted = layer(x)
    layer.self_attn = nn.MultiheadAttention(E, H, device=DEVICE)
    layer.self_attn.load_state_dict(theirs.state_dict(), strict=False)
    assert layer(x).shape == wanted.shape and isinstance(ours, torch.nn.MultiheadAttention)


@pytest.mark.parametrize("made", ["multihead", "grouped"])
def test_it_traces_and_runs_under_autocast(made):
    torch.manual_seed(0)
    if made == "multihead":
        module = nn.MultiheadAttention(E, H, batch_first=True, device=DEVICE)
        call = lambda m, x: m(x, x, x, need_weights=False)[0]  # noqa: E731
    else:
        module = nn.GroupedQueryAttention(E, 4, 2, head_dim=16, device=DEVICE)
        call = lambda m, x: m(x)  # noqa: E731

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return call(self.inner, x)

    whole, x = Whole(), random(2, 9, E)
    wanted = whole(x)
    close(torch.compile(whole, backend="aot_eager", fullgraph=True)(x), wanted)
    close(torch.export.export(whole, (x,)).module()(x), wanted)
    with torch.autocast(DEVICE, torch.float16):
        half = whole(x)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), wanted, rtol=0.05, atol=0.02)


SDPA = {
    "lead": st.sampled_from([(), (2,), (2, 3), (2, 2, 3)]), "mask": st.sampled_from([None, "bool", "float"]),
    "causal": booleans, "scale": st.sampled_from([None, 0.3]), "gqa": booleans, "dv": st.sampled_from([16, 24]),
}  # fmt: skip


@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(st.fixed_dictionaries(SDPA), st.sampled_from([(1, 5), (7, 7), (9, 4), (4, 33)]))
def test_scaled_dot_product_attention_is_pytorchs(call, sizes):
    (queries, keys), lead = sizes, call["lead"]
    gqa = call["gqa"] and bool(lead)
    heads = (*lead[:-1], 2 * lead[-1]) if gqa else lead
    q, k, v = random(*heads, queries, 16), random(*lead, keys, 16, seed=1), random(*lead, keys, call["dv"], seed=2)
    mask = hidden(None if call["causal"] else call["mask"], queries, keys)
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask
    options = {"is_causal": call["causal"], "scale": call["scale"], "enable_gqa": gqa}
    extra = [mask] if mask is not None and mask.is_floating_point() else []
    wanted, found = (
        with_gradients(lambda q, k, v, m=mask, f=f: f(q, k, v, attn_mask=m, **options), [q, k, v, *extra])
        for f in (F.scaled_dot_product_attention, nn.scaled_dot_product_attention)
    )
    all_close(found, wanted)


def test_batches_of_scaled_dot_product_attention_broadcast():
    q, k, v = random(2, 3, 5, 16), random(1, 3, 7, 16), random(7, 16)
    close(nn.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v.expand(2, 3, 7, 16)))
    mask = random(2, 1, 3, 5, 7) > 0
    five = (random(2, 4, 3, n, 16) for n in (5, 7, 7))
    q, k, v = five
    for m in (mask, random(4, 3, 5, 7) > 0, random(5, 7)):
        close(nn.scaled_dot_product_attention(q, k, v, m), F.scaled_dot_product_attention(q, k, v, m))


def test_grouped_query_attention_is_the_layer_written_out():
    torch.manual_seed(0)
    layer = nn.GroupedQueryAttention(
        E, 4, 2, head_dim=16, bias=True, qk_norm=1e-5, window=(5, None), softcap=3.0, sinks=True, device=DEVICE
    )
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, angles = random(2, 9, E), random(9, 8)
    cos, sin = angles.cos(), angles.sin()

    def turn(t):
        a, b = t.chunk(2, -1)
        return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1)

    def plain(x):
        q, k, v = (
            F.linear(x, m.weight, m.bias).unflatten(-1, (-1, 16)) for m in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = F.rms_norm(q, (16,), layer.q_norm.weight, 1e-5), F.rms_norm(k, (16,), layer.k_norm.weight, 1e-5)
        q, k, v = (t.transpose(1, 2) for t in (turn(q), turn(k).repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
        s = 3 * torch.tanh(q @ k.transpose(-1, -2) / 4 / 3)
        i = torch.arange(x.shape[1], device=DEVICE)
        away = i[:, None] - i
        s = s.masked_fill((away < 0) | (away > 5), -torch.inf)
        sinks = layer.sinks[:, None, None].expand(2, 4, x.shape[1], 1)
        p = torch.softmax(torch.cat((s, sinks), -1), -1)[..., :-1]
        return layer.o_proj((p @ v).transpose(1, 2).flatten(2))

    parameters = list(layer.parameters())
    all_close(with_gradients(lambda x: layer(x, (cos, sin)), [x], parameters), with_gradients(plain, [x], parameters))
    cu = torch.tensor([0, 3, 3, 9], dtype=torch.int32, device=DEVICE)
    packed = layer(x[0], (cos, sin), cu_seqlens=cu)
    close(packed[:3], layer(x[:1, :3], (cos[:3], sin[:3]))[0])
    close(packed[3:], layer(x[:1, 3:], (cos[3:], sin[3:]))[0])


@pytest.mark.parametrize("options", [{}, {"window": (3, None), "softcap": 3.0, "sinks": True, "qk_norm": 1e-5}])
def test_a_cache_gives_what_the_whole_sequence_gives(options):
    """A prompt, one of several tokens after it, tokens one at a time; then again from the beginning."""
    torch.manual_seed(1)
    layer = nn.TransformerLayer(E, 4, 2, 48, head_dim=16, device=DEVICE, **options).eval()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.2)
    x, angles = random(2, 9, E), random(12, 8)
    cos, sin = angles.cos(), angles.sin()
    with torch.no_grad():
        wanted, cache = layer(x, (cos[:9], sin[:9])), layer.self_attn.cache(2, 12)
        for _ in range(2):
            parts = [layer(piece, (cos, sin), cache=cache) for piece in x.split([4, 3, 1, 1], 1)]
            close(torch.cat(parts, 1), wanted)
            assert cache.lengths.tolist() == [9, 9] and cache.filled == 9
            cache.reset()
        layer(x, (cos, sin), cache=cache)
        cache.lengths.copy_(torch.tensor([9, 4]))  # five of the second prompt were padding
        close(layer(x[:, 4:5], (cos, sin), cache=cache)[1], wanted[1, 4:5])
        assert cache.lengths.tolist() == [10, 5]


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


x, q = zeros(5, 2, E), zeros(2, 2, 5, 16)
nested = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
module, sdpa = nn.MultiheadAttention(E, H, device=DEVICE), nn.scaled_dot_product_attention
grouped = functools.partial(nn.GroupedQueryAttention, E)
small = nn.GroupedQueryAttention(E, 2, 2, device=DEVICE)
REFUSED = [
    (
        functools.partial(small, cache=small.cache(2, 8)),
        (x.transpose(0, 1),),
        ValueError,
        "'cache' where gradients are recorded; torch.no_grad",
    ),
    (
        functools.partial(torch.no_grad()(small), cache=small.cache(2, 4)),
        (x.transpose(0, 1),),
        ValueError,
        "room for 4 tokens, 0 taken; for 5 more",
    ),
    (
        functools.partial(small, cache=small.cache(2, 8), mask=q > 0),
        (x.transpose(0, 1),),
        ValueError,
        "'mask' beside a cache; expected None",
    ),
    (
        module,
        (nested, nested, nested),
        TypeError,
        "argument 'query' is a nested tensor; key_padding_mask; cu_seqlens_q",
    ),
    (module, (x, x[..., :8], x), ValueError, "'key' has shape (5, 2, 8); [length, N, 32]"),
    (module, (x, x, x[:4]), ValueError, "'value' has shape (4, 2, 32); as many tokens"),
    (module, (x, x[:, :1], x[:, :1]), ValueError, "'key' has shape (5, 1, 32); one batch size"),
    (module, (x, x, x, zeros(5, 2)), ValueError, "'key_padding_mask' has shape (5, 2); (2, 5)"),
    (module, (x, x, x, None, False, zeros(5, 4)), ValueError, "'attn_mask' has shape (5, 4); (5, 5) or (4, 5, 5)"),
    (module, (x, x, x, zeros(2, 5, dtype=torch.int32)), TypeError, "'key_padding_mask' has dtype torch.int32; bool"),
    (sdpa, (q, q, q, zeros(5, 5), 0.0, True), ValueError, "'attn_mask' is given beside is_causal=True"),
    (sdpa, (q, q.repeat(1, 2, 1, 1), q), ValueError, "(2, 4, 5, 16); expected ones that broadcast"),
    (sdpa, (q, q[..., :8], q), ValueError, "'k' has shape"),
    (sdpa, (q, q, q, zeros(5, 5, dtype=torch.int64)), TypeError, "'attn_mask' has dtype int64"),
    (grouped, (4, 3), ValueError, "'kv_heads' is 3; a divisor of heads = 4"),
    (grouped, (5, 1), ValueError, "'heads' is 5; a divisor of dim = 32"),
    (grouped(4, 2, device=DEVICE), (x[0],), ValueError, "'x' has shape (2, 32); [B, S, dim]"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "words"), REFUSED, ids=[of[-1] for of in REFUSED])
def test_it_is_refused_in_words_that_help(function, arguments, error, words):
    with pytest.raises(error) as caught:
        function(*arguments)
    assert all(word in str(caught.value) for word in words.split("; ")), caught.value

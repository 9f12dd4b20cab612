"""Decoding where what is asked of every operator does not reach: one cache in three forms, plans, bits that do not depend on
the batch, holes, what is written by an append, captured calls."""

import functools
import itertools
import math

import pytest
import torch
from refused import EITHER, bad, refused, test_it_is_refused_in_words_that_help  # noqa: F401
from waits import no_wait
from where import DEVICE

from weft import ops
from weft.operators.attention.decode_dispatch import DecodeCall, unsupported
from weft.operators.attention.decode_function import decode_plan, parts_of
from weft.operators.launch import compiling_for

pytestmark = pytest.mark.device
close = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5)


def random(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed + sum(shape)), device=DEVICE)
    return x.to(dtype)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def paged(cache, page, seed=0):
    """Pages in random order that hold a cache [B, G, S, D], and their table."""
    b, g, s, d = cache.shape
    each = -(-s // page)
    table = torch.randperm(b * each + 2, generator=torch.Generator().manual_seed(seed))[: b * each].view(b, each)
    pages = torch.full((b * each + 2, page, g, d), torch.nan, device=DEVICE, dtype=cache.dtype)
    whole = torch.nn.functional.pad(cache, (0, 0, 0, each * page - s)).transpose(1, 2)
    pages[table.flatten().to(DEVICE)] = whole.reshape(b * each, page, g, d)
    return pages, table.to(DEVICE, torch.int32)


@pytest.mark.share(2)
@pytest.mark.parametrize(("page", "group", "s"), [(1, 1, 2), (16, 5, 1), (256, 7, 3), (3, 64, 1)])
def test_pages_a_cache_and_attention_agree(page, group, s):
    q, k, v = random(3, 2 * group, s, 16), random(3, 2, 70, 16, seed=1), random(3, 2, 70, 16, seed=2)
    lengths, call = ints(70, 1, 37), {"window": (40, None), "softcap": 3.0, "return_lse": True}
    k_left, v_left = k.clone(), v.clone()
    for t in (k_left, v_left):
        t[0, :, : 70 - s - 40] = torch.nan  # before the window: freed pages may be another sequence's
    o, lse = ops.decode_attention(q, k_left, v_left, lengths=lengths, **call)
    pages = [paged(t, page) for t in (k_left, v_left)]
    close(ops.paged_decode_attention(q, pages[0][0], pages[1][0], pages[0][1], lengths, **call), (o, lse))
    for b, n in enumerate(lengths.tolist()):
        one = ops.attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], causal=True, **call)
        close((o[b : b + 1], lse[b : b + 1]), one)


@pytest.mark.share(2)
@pytest.mark.parametrize("form", ["evenly", "plan", "stale plan", "invariant"])
def test_however_the_keys_are_divided(form):
    q, k, v = random(5, 4, 2, 16), random(5, 2, 700, 16, seed=1), random(5, 2, 700, 16, seed=2)
    lengths = ints(700, 3, 0, 512, 645)
    more = {"batch_invariant": form == "invariant"}
    if "plan" in form:
        more["plan"] = decode_plan(q, k, v, ints(9, 700, 8, 0, 60) if "stale" in form else lengths)
    o, lse = ops.decode_attention(q, k, v, lengths=lengths, return_lse=True, **more)
    assert not o[2].any() and lse[2].eq(-torch.inf).all()
    for b, n in enumerate(lengths.tolist()):
        close(o[b, :, -1:], ops.attention(q[b, None, :, -1:], k[b, None, :, :n], v[b, None, :, :n])[0])


def test_a_plan_fills_its_slots_evenly():
    q, k = random(6, 2, 1, 16), random(6, 2, 1000, 16)
    lengths = ints(1000, 0, 1, 400, 1000, 33)
    plan = decode_plan(q, k, k, lengths)
    tile, first, each = plan.made_for[-1], plan.first[:-1].tolist(), int(plan.first[-1])
    parts = [b - a for a, b in itertools.pairwise(first)]

    def needs(each):
        return [max(math.ceil(math.ceil(n / tile) / each), 1) for n in lengths.tolist()]

    assert parts == needs(each) and sum(parts) <= plan.slots and max(parts) > 1
    assert each == 1 or plan.slots < sum(needs(each - 1))
    plan.update(ints(1, 1, 1, 1, 1, 1))
    assert plan.first.tolist() == [0, 1, 2, 3, 4, 5, 6, 1]


def test_a_plan_is_of_the_dtypes_that_autocast_gives():
    q, k, lengths = random(2, 4, 1, 16, dtype=torch.float16), random(2, 2, 70, 16), ints(70, 7)
    with torch.autocast(DEVICE, torch.float16):
        found, wanted = (
            ops.decode_attention(q, k, k, lengths=lengths, plan=p) for p in (decode_plan(q, k, k, lengths), None)
        )
    assert found.dtype == torch.float16
    close(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("page", [0, 16])
def test_the_bits_of_a_sequence_do_not_depend_on_the_batch(page):
    q, k, v = random(4, 4, 1, 16), random(4, 2, 1200, 16, seed=1), random(4, 2, 1200, 16, seed=2)
    lengths = ints(1100, 530, 17, 1030)

    def call(rows, room):
        short = [t[rows, :, :room] for t in (k, v)]
        if not page:
            return ops.decode_attention(q[rows], *short, lengths=lengths[rows], batch_invariant=True)
        pages = [paged(t, page, seed=len(rows)) for t in short]
        return ops.paged_decode_attention(
            q[rows], pages[0][0], pages[1][0], pages[0][1], lengths[rows], batch_invariant=True
        )

    together = call([0, 1, 2, 3], 1200)
    for rows, room in (([1, 3], 1040), ([1, 2], 540), ([2], 40)):
        assert call(rows, room).equal(together[rows])


def test_keys_of_a_page_that_is_none_are_hidden_and_not_read():
    q, cache = random(2, 2, 1, 16), random(2, 1, 64, 16, seed=1)
    pages, table = paged(cache, 8)
    there = torch.ones(2, 64, dtype=torch.bool, device=DEVICE)
    for b, n, wrong in ((0, 0, -1), (0, 3, -(2**31)), (1, 2, len(pages)), (1, 7, 2**31 - 1)):
        table[b, n], there[b, 8 * n : 8 * n + 8] = wrong, False
    got = ops.paged_decode_attention(q, pages, pages, table, ints(64, 64))
    close(got, ops.attention(q, cache, cache, mask=there[:, None, None]))
    none = ops.paged_decode_attention(q, pages, pages, table * 0 - 1, ints(64, 64), return_lse=True)
    assert not none[0].any() and none[1].eq(-torch.inf).all()


@pytest.mark.share(2)
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8, None])
@pytest.mark.parametrize("page", [0, 4])
def test_decoding_token_by_token_is_causal_attention(codes, page):
    """What is appended is what is attended to: rotated, quantised, in place."""
    b, t, d = 2, 11, 16
    q, k, v = random(b, 4, t, d), random(b, 2, t, d, seed=1), random(b, 2, t, d, seed=2)
    angles = torch.arange(13.0, device=DEVICE)[:, None] / 10 ** torch.linspace(0, 2, d // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    caches = [torch.zeros(b, 2, 12, d, device=DEVICE).to(codes or torch.float32) for _ in range(2)]
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.tensor(0.03, device=DEVICE)) if codes else {}
    table = None
    if page:
        caches = [torch.zeros(7, page, 2, d, device=DEVICE).to(codes or torch.float32) for _ in range(2)]
        table = torch.tensor([[5, 0, 2], [1, 6, 3]], dtype=torch.int32, device=DEVICE)
    lengths, found = ints(0, 0), []
    for first, last in ((0, 6), (6, 7), (7, 10), (10, 11)):
        lengths += last - first
        new = (x[:, :, first:last] for x in (k, v))
        turned = ops.append_to_cache(*new, *caches, lengths, table, q=q[:, :, first:last], cos=cos, sin=sin, **scales)
        attend = ops.paged_decode_attention if page else functools.partial(ops.decode_attention)
        where = (table, lengths) if page else ()
        found.append(attend(turned, *caches, *where, **({} if page else {"lengths": lengths}), **scales))
    rotated = ops.rotary_embedding(*(x.transpose(1, 2).contiguous() for x in (q, k)), cos[:t], sin[:t])
    want = ops.attention(*(x.transpose(1, 2) for x in rotated), v, causal=True)
    error = (torch.cat(found, 2) - want).abs().max()
    assert error < (2e-5 if codes is None else 0.25) and (codes is None or error > 1e-4)


@pytest.mark.parametrize(
    ("q", "k", "page"), [((16, 16, 16, 2**23), (1, 1, 1, 1), 0), ((1, 1, 1, 1), (1, 2**22, 1, 1), 511)]
)
def test_a_tile_that_spans_too_much_is_pytorchs(q, k, page):
    q = torch.empty_strided((1, 2, 1, 16), q, device="meta")
    k = torch.empty_strided((3, page, 2, 16) if page else (1, 2, 9, 16), k, device="meta")
    named = {"page_table": torch.empty((1, 2), dtype=torch.int32, device="meta")} if page else {}
    tensors, options = parts_of("decode", q, k, k, **named)
    with compiling_for(90, lambda *kernel: None):
        assert "spans 2**31 elements" in unsupported(DecodeCall(*tensors, options))


def test_what_has_no_place_is_not_written():
    cache = random(3, 2, 5, 16)
    before, new = cache.clone(), random(3, 2, 3, 16, seed=1)
    ops.append_to_cache(new, new, cache, (other := cache.clone()), ints(6, 1, 0))
    assert cache[0, :, 3:].equal(new[0, :, :2]) and cache[1, :, :1].equal(new[1, :, 2:]) and cache.equal(other)
    cache[0, :, 3:], cache[1, :, :1] = before[0, :, 3:], before[1, :, :1]
    assert cache.equal(before)


def test_a_gradient_is_pytorchs():
    q, k = random(2, 2, 1, 16).requires_grad_(), random(2, 2, 40, 16)
    assert "gradient" in ops.explain("decode_attention", q, k, k).reason
    (dq,) = torch.autograd.grad(ops.decode_attention(q, k, k).sum(), q)
    close(dq, torch.autograd.grad(ops.attention(q, k, k).sum(), q)[0])


@pytest.mark.parametrize("page", [0, 8])
def test_a_compiler_sees_one_operator(page):
    calls = []

    def backend(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    q, k, lengths = random(2, 4, 1, 16), random(2, 2, 40, 16), ints(7, 40)
    where, call = (k, k), functools.partial(ops.decode_attention, lengths=lengths)
    if page:
        pages, table = paged(k, page)
        where, call = (pages, pages), functools.partial(ops.paged_decode_attention, page_table=table, lengths=lengths)
    close(torch.compile(call, backend=backend, fullgraph=True)(q, *where), call(q, *where))
    assert [name for name in calls if "getitem" not in name] == ["weft.decode_attention.default"]


def test_inference_mode_takes_caches_made_in_it():
    with torch.inference_mode():
        cache, new = torch.zeros(1, 1, 4, 16, device=DEVICE), random(1, 1, 1, 16)
        assert ops.append_to_cache(new, new, cache, cache.clone(), ints(3)) is None
        close(ops.decode_attention(new, cache[:, :, 2:3], cache[:, :, 2:3]), new)


@pytest.mark.gpu
def test_a_captured_call_follows_lengths_that_grow():
    q, k, v = (random(3, h, s, 128, seed=h, dtype=torch.bfloat16) for h, s in ((8, 1), (2, 3000), (2, 3000)))
    lengths = ints(5, 900, 0)
    plan = decode_plan(q, k, v, lengths)
    for more in ({}, {"plan": plan}, {"batch_invariant": True}):
        call = functools.partial(ops.decode_attention, q, k, v, lengths=lengths, **more)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            if more.get("plan"):
                plan.update(lengths)
            o = call()
        for now in ([6, 901, 1], [3000, 1500, 2999], [0, 1, 64]):
            lengths.copy_(ints(*now))
            graph.replay()
            close(o, call(), rtol=0, atol=0)
            close(o.float(), ops.decode_attention(*(t.cpu().float() for t in (q, k, v)), lengths=lengths.cpu()).to(DEVICE),
                  rtol=2e-2, atol=2e-2)  # fmt: skip


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    q, cache = random(2, 4, 1, 64, dtype=torch.bfloat16), random(2, 2, 500, 64, dtype=torch.bfloat16)
    call = functools.partial(ops.decode_attention, q, cache, cache, lengths=ints(3, 400))
    call()
    with no_wait():
        call()


def x(*shape, dtype=torch.float32):
    return torch.ones(shape, device=DEVICE, dtype=dtype)


Q, K, PAGES, TABLE, TWO = x(2, 4, 1, 16), x(2, 2, 8, 16), x(5, 4, 2, 16), ints(0, 1, 2, 3).view(2, 2), ints(8, 8)
NEW, CACHE, OTHER = x(2, 2, 1, 16), x(2, 2, 8, 16), x(2, 2, 8, 16)
REFUSED = [
    bad("decode_attention", EITHER, "'q'; list", [1.0], K, K),
    bad("decode_attention", ValueError, "'k'; (3, 2, 8, 16); batch; 2", Q, x(3, 2, 8, 16), x(3, 2, 8, 16)),
    bad("decode_attention", ValueError, "'k'; (2, 3, 8, 16); divides the 4", Q, x(2, 3, 8, 16), x(2, 3, 8, 16)),
    bad("decode_attention", TypeError, "'k'; float16; same dtype", Q, K.half(), K.half()),
    bad("decode_attention", ValueError, "'lengths'; (3,); (2,)", Q, K, K, lengths=ints(1, 2, 3)),
    bad("decode_attention", TypeError, "'lengths'; int64; int32", Q, K, K, lengths=torch.tensor([1, 2], device=DEVICE)),
    bad("decode_attention", ValueError, "'lengths'; 9; 0 … 8", Q, K, K, lengths=ints(9, 8), checked=True),
    bad("decode_attention", ValueError, "'window'; (-1, 0); at least 0", Q, K, K, window=(-1, 0)),
    bad("decode_attention", ValueError, "'v_scale'; None; both", Q, K, K, k_scale=x()),
    bad("decode_attention", ValueError, "'k_scale'; (3,); (2,)", Q, K, K, k_scale=x(3), v_scale=x(3)),
    bad("decode_attention", TypeError, "'plan'; 3; DecodePlan", Q, K, K, plan=3),
    bad("decode_attention", ValueError, "'k'; 576; latent attention; FlashMLA", x(2, 4, 1, 576), x(2, 1, 8, 576),
        x(2, 1, 8, 512)),
    bad("paged_decode_attention", ValueError, "'k_pages'; divides the 4", Q, x(5, 4, 3, 16), x(5, 4, 3, 16), TABLE, TWO),
    bad("paged_decode_attention", ValueError, "'page_table'; (1, 4); 2", Q, PAGES, PAGES, TABLE.view(1, 4), TWO),
    bad("paged_decode_attention", ValueError, "'page_table'; 5 at (1, 1); 0 … 4", Q, PAGES, PAGES, ints(0, 1, 2, 5).view(2, 2),
        TWO, checked=True),
    bad("append_to_cache", ValueError, "'k_cache'; (2, 3, 8, 16); [B, G, S, D]", NEW, NEW, x(2, 3, 8, 16), x(2, 3, 8, 16), TWO),
    bad("append_to_cache", ValueError, "'k_cache'; separate memory", NEW, NEW, x(1, 2, 8, 16).expand(2, 2, 8, 16), CACHE, TWO),
    bad("append_to_cache", ValueError, "'cos'; (4, 8); 8 positions", NEW, NEW, CACHE, OTHER, TWO, cos=x(4, 8), sin=x(4, 8)),
    bad("append_to_cache", ValueError, "'k_scale'; float32; no codes", NEW, NEW, CACHE, OTHER, TWO, k_scale=x(), v_scale=x()),
    bad("append_to_cache", ValueError, "'k'; gradient; detach", x(2, 2, 1, 16).requires_grad_(), NEW, CACHE, OTHER, TWO),
    bad("append_to_cache", ValueError, "'v_cache'; gradient; detach", NEW, NEW, CACHE, x(2, 2, 8, 16).requires_grad_(), TWO),
]  # fmt: skip


def test_a_plan_of_another_call_is_refused():
    plan = decode_plan(Q, K, K, TWO)
    with refused(ValueError, "'plan'; expected a plan made of such a call"):
        ops.decode_attention(x(2, 2, 1, 16), K, K, plan=plan)
    with refused(ValueError, "'plan'; batch_invariant=True"):
        ops.decode_attention(Q, K, K, plan=plan, batch_invariant=True)
    assert ops.decode_attention(Q, K, K, plan=plan, lengths=TWO).eq(1).all()


def test_sinks_are_read_where_they_lie():
    q, k, v, sinks = random(2, 4, 1, 16), random(2, 2, 40, 16, seed=1), random(2, 2, 40, 16, seed=2), random(8)[::2]
    close(ops.decode_attention(q, k, v, sinks=sinks), ops.attention(q, k, v, sinks=sinks))

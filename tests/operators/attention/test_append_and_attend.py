"""A step of decoding in one launch: what it shares with an append and attention, and where the new tokens lie."""

import functools

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE

from weft import ops
from weft.operators.attention.append_and_attend import separate

pytestmark = pytest.mark.device
close = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5)
PAGE = 4
CODE = {
    torch.int8: {"atol": 1.0},
    torch.float8_e4m3fn: {"rtol": 0.13, "atol": 0.002},
}  # where a number is between two codes


def random(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed + sum(shape)), device=DEVICE)
    return x.to(dtype)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def step(lengths, tokens=1, heads=4, groups=2, d=16, width=12, dtype=torch.float32, codes=None, page=PAGE):
    """Arguments of a step: random pages in random order, the sequences' tables full."""
    b = len(lengths)
    shape = (b * width + 1, page, groups, d)
    pages = [random(*shape, seed=s) for s in (1, 2)]
    order = torch.randperm(b * width + 1, generator=torch.Generator().manual_seed(0))[: b * width].view(b, width)
    angles = torch.arange(float(width * page), device=DEVICE)[:, None] / 10 ** torch.linspace(
        0, 2, d // 2, device=DEVICE
    )
    named = {"q_norm": random(d, seed=6, dtype=dtype), "k_norm": random(d, seed=7, dtype=dtype)}
    if codes is not None:
        named |= {
            "k_scale": random(groups, seed=8).abs() / 30 + 0.02,
            "v_scale": random(groups, seed=9).abs() / 30 + 0.02,
        }
        pages = [(t * 30).clamp(-127, 127).round().to(codes) for t in pages]
    else:
        pages = [t.to(dtype) for t in pages]
    new = [random(b, n, tokens, d, seed=s, dtype=dtype) for n, s in ((heads, 3), (groups, 4), (groups, 5))]
    return (*new, *pages, order.to(DEVICE, torch.int32), ints(*lengths)), {
        "cos": angles.cos(),
        "sin": angles.sin(),
        **named,
    }


def bits(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@pytest.mark.share(2)
@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("tokens", [1, 3])
def test_it_is_an_append_and_then_attention(codes, tokens):
    """With sequences of length 0 and 1, pages that are full before, full with, and full but for the new tokens."""
    call, named = step((48, 1, 0, 5, 4, 33, 7), tokens, codes=codes)
    call[5][2] = -1  # an empty slot of a padded batch
    other = [t.clone() for t in call]
    counters = torch.zeros(7 * 2, dtype=torch.int32, device=DEVICE)
    o = ops.append_and_attend(*call, **named, counters=counters)
    want = separate(*other, **named)
    close(o, want)
    assert not o[2].any() and not counters.any()
    assert bits(call[4]).equal(bits(other[4]))
    close(call[3].float(), other[3].float(), **CODE.get(codes, {}))


@pytest.mark.parametrize("tokens", [1, 2])
def test_new_tokens_are_not_read_from_the_cache(tokens):
    """Nor is what lies behind them."""
    lengths = (48, 1, 17, 33)
    call, named = step(lengths, tokens)
    want = separate(*(t.clone() for t in call), **named)
    for b, n in enumerate(lengths):
        for at in range(max(n - tokens, 0), 48):
            for pages in call[3:5]:
                pages[call[5][b, at // PAGE], at % PAGE] = torch.nan
    close(ops.append_and_attend(*call, **named), want)


def test_a_token_without_a_place_is_neither_written_nor_seen():
    call, named = step((9, 50, 6), 2)
    call[5][0, 2] = -1  # the page of the newest token
    call[5][2, 1] = len(call[3])
    before = [t.clone() for t in call]
    o = ops.append_and_attend(*call, **named)
    close(o, separate(*before, **named))
    close(call[3:5], before[3:5])


def test_without_angles_or_norms():
    call, _ = step((9, 20))
    other = [t.clone() for t in call]
    close(ops.append_and_attend(*call), ops.paged_decode_attention(call[0], *call[3:]))
    ops.append_to_cache(*other[1:5], other[6], other[5])
    assert all(mine.equal(theirs) for mine, theirs in zip(call[3:5], other[3:5], strict=True))


def test_a_compiler_takes_it_apart():
    call, named = step((9, 20))
    graph = torch.compile(functools.partial(ops.append_and_attend, **named), backend="eager", fullgraph=True)
    other = [t.clone() for t in call]
    close(graph(*call), ops.append_and_attend(*other, **named))
    close(call[3:5], other[3:5])


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "groups", "d"), [(32, 8, 128), (28, 4, 128), (14, 2, 64), (8, 8, 96), (6, 2, 80)])
def test_captured_steps_follow_lengths_and_repeat_their_bits(heads, groups, d, codes):
    """Parts are merged by whichever program is last; the result does not depend on which one that is. Codes are those of
    float32: nothing is rounded between the norm and the code."""
    call, named = step((700, 1, 33, 4000), 1, heads, groups, d, 256, torch.bfloat16, codes, page=16)
    counters = torch.zeros(4 * groups, dtype=torch.int32, device=DEVICE)
    run = functools.partial(ops.append_and_attend, *call, **named, counters=counters)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            o = run()
    for lengths in ((701, 2, 34, 4001), (4096, 16, 0, 17), (1, 1, 1, 1), (2048, 2049, 2047, 4095)):
        call[6].copy_(ints(*lengths))
        other, weights = [t.clone() for t in call], named
        if codes is not None:
            other[:3] = (t.float() for t in other[:3])
            weights = {n: t.float() for n, t in named.items()}
        want = separate(*other, **weights)
        graph.replay()
        first = o.clone()
        if codes is not None:
            close(call[3].float(), other[3].float(), **CODE[codes])
        close(first.float(), want.float(), rtol=2e-2, atol=0.02)
        for _ in range(50):
            graph.replay()
            assert o.equal(first)
        assert not counters.any()


@pytest.mark.gpu
def test_a_captured_step_without_counters_is_right():
    call, named = step((700, 4000), 1, 32, 8, 128, 256, torch.bfloat16, page=16)
    want = ops.append_and_attend(*call, **named)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = ops.append_and_attend(*call, **named)
    for _ in range(3):
        graph.replay()
        assert o.equal(want)


def x(*shape, dtype=torch.float32):
    return torch.ones(shape, device=DEVICE, dtype=dtype)


Q, K, PAGES, TABLE, TWO = x(2, 4, 1, 16), x(2, 2, 1, 16), x(5, 4, 2, 16), ints(0, 1, 2, 3).view(2, 2), ints(8, 8)
NAME = "append_and_attend"
REFUSED = [
    bad(NAME, ValueError, "'k_pages'; divides the 4", Q, x(2, 3, 1, 16), K, x(5, 4, 3, 16), x(5, 4, 3, 16), TABLE, TWO),
    bad(NAME, ValueError, "'k_pages'; (5, 4, 2, 16); sizes of 'k'", Q, x(2, 1, 1, 16), x(2, 1, 1, 16), PAGES, x(5, 4, 2, 16),
        TABLE, TWO),
    bad(NAME, ValueError, "'q'; (2, 4, 2, 16); T", x(2, 4, 2, 16), K, K, PAGES, x(5, 4, 2, 16), TABLE, TWO),
    bad(NAME, ValueError, "'k_norm'; None; both", Q, K, K, PAGES, x(5, 4, 2, 16), TABLE, TWO, q_norm=x(16)),
    bad(NAME, ValueError, "'q_norm'; (4,); (16,)", Q, K, K, PAGES, x(5, 4, 2, 16), TABLE, TWO, q_norm=x(4), k_norm=x(4)),
    bad(NAME, ValueError, "'counters'; (3,); (4,)", Q, K, K, PAGES, x(5, 4, 2, 16), TABLE, TWO, counters=ints(0, 0, 0)),
    bad(NAME, TypeError, "'counters'; float32; int32", Q, K, K, PAGES, x(5, 4, 2, 16), TABLE, TWO, counters=x(4)),
    bad(NAME, ValueError, "'cos'; (4, 8); 8 positions", Q, K, K, PAGES, x(5, 4, 2, 16), TABLE, TWO, cos=x(4, 8), sin=x(4, 8)),
    bad(NAME, ValueError, "'q'; gradient; detach", Q.clone().requires_grad_(), K, K, PAGES, x(5, 4, 2, 16), TABLE, TWO),
    bad(NAME, ValueError, "'k_pages'; separate memory", Q, K, K, x(1, 4, 2, 16).expand(5, 4, 2, 16), PAGES, TABLE, TWO),
    bad(NAME, ValueError, "'window'; (-1, 0); at least 0", Q, K, K, PAGES, x(5, 4, 2, 16), TABLE, TWO, window=(-1, 0)),
]  # fmt: skip

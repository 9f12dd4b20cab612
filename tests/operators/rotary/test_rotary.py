"""The rotary embedding where what is asked of every operator does not reach: in place, tables as models have them, what a
rotation keeps."""

import pytest
import torch
from refused import EITHER, bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE

from weft import ops

pytestmark = pytest.mark.device

B, S, H, G, D = 2, 5, 4, 2, 16


def drawn(rotary=D, dtype=torch.float32):
    g = torch.Generator(DEVICE).manual_seed(1)
    q, k = (torch.randn(B, S, n, D, generator=g, device=DEVICE).to(dtype) for n in (H, G))
    frequency = 10000.0 ** (-torch.arange(0, rotary, 2, device=DEVICE) / rotary)
    angle = torch.arange(S, device=DEVICE)[:, None] * frequency
    return q, k, angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [D, 6])
def test_in_place_writes_the_same_numbers_where_they_lay(interleaved, rotary):
    q, k, cos, sin = drawn(rotary)
    want = ops.rotary_embedding(q, k, cos, sin, interleaved)
    packed = torch.cat((q, k, k), 2)
    mine = packed.split((H, G, G), 2)
    got = ops.rotary_embedding(mine[0], mine[1], cos, sin, interleaved, inplace=True)
    assert got[0] is mine[0] and got[1] is mine[1]
    assert got[0].equal(want[0]) and got[1].equal(want[1]) and mine[2].equal(k)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary", "first", "dtype"), [
    (D, 0, torch.float32), (D, 0, torch.float16), (8, 0, torch.float16), (6, 0, torch.float16), (D, 1, torch.float16),
])  # fmt: skip
def test_every_other_element_is_a_head_and_the_others_stay(interleaved, rotary, first, dtype):
    q, k, cos, sin = drawn(rotary, dtype)
    want = ops.rotary_embedding(q, k, cos, sin, interleaved)
    both = [torch.stack((t, t), -1).flatten(3) for t in (q, k)]
    spread = [t[..., first::2] for t in both]
    for inplace in (False, True):
        got = ops.rotary_embedding(*spread, cos, sin, interleaved, inplace=inplace)
        assert got[0].equal(want[0]) and got[1].equal(want[1])
    assert both[0][..., 1 - first :: 2].equal(q) and both[1][..., 1 - first :: 2].equal(k)


def test_in_place_has_a_gradient():
    q, k, cos, sin = drawn()
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    weights = [torch.randn_like(q), torch.randn_like(k)]

    def gradients(inplace):
        pair = ops.rotary_embedding(leaves[0] * 2, leaves[1] * 2, cos, sin, inplace=inplace)
        return torch.autograd.grad(sum((y * w).sum() for y, w in zip(pair, weights, strict=True)), leaves)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("of_q", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_tables_have_gradients_too(interleaved, of_q):
    """They are sums of what q and k were."""
    q, k, cos, sin = drawn()
    leaves = [cos.requires_grad_(), sin.requires_grad_(), *((q.requires_grad_(), k.requires_grad_()) if of_q else ())]
    weights = [torch.randn_like(q), torch.randn_like(k)]

    def gradients(inplace):
        pair = ops.rotary_embedding(q.clone(), k.clone(), cos, sin, interleaved, inplace=inplace)
        return torch.autograd.grad(sum((y * w).sum() for y, w in zip(pair, weights, strict=True)), leaves)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert a.equal(b)


def test_lengths_of_pairs_stay_and_the_negative_angle_turns_back():
    q, k, cos, sin = drawn()
    a, b = ops.rotary_embedding(q, k, cos, sin)
    length = [t[..., : D // 2] ** 2 + t[..., D // 2 :] ** 2 for t in (q, a)]
    torch.testing.assert_close(*length)
    torch.testing.assert_close(ops.rotary_embedding(a, b, cos, -sin), (q, k))


def test_scores_depend_on_the_distance_alone():
    q, k, cos, sin = drawn()
    a, b = ops.rotary_embedding(q[:, :1].expand(B, S, H, D), k[:, :1].expand(B, S, G, D), cos, sin)
    scores = torch.einsum("bshd,bthd->bhst", a[:, :, :G], b)
    for lag in range(1, S):
        diagonal = scores.diagonal(lag, -2, -1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_what_models_write(dtype):
    """Heads first, tables [1, S, D] that repeat their columns."""
    q, k, cos, sin = drawn(dtype=dtype)
    q, k = (t.transpose(1, 2).contiguous() for t in (q, k))  # [B, H, S, D]
    cos, sin = (torch.cat((t, t), -1)[None].to(dtype) for t in (cos, sin))

    def rotate_half(x):
        return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)

    tables = (t[..., : D // 2].expand(B, S, D // 2) for t in (cos, sin))
    got = ops.rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), *tables)
    for y, x in zip(got, (q, k), strict=True):
        want = x * cos[:, None] + rotate_half(x) * sin[:, None]
        rtol = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(y.transpose(1, 2), want, rtol=rtol, atol=rtol)


def test_tables_get_gradients_through_pytorch():
    q, k, cos, sin = drawn()
    cos.requires_grad_()
    a, b = ops.rotary_embedding(q, k, cos, sin)
    (got,) = torch.autograd.grad(a.sum() + b.sum(), cos)
    halves = (torch.cat((q, k), 2)[..., : D // 2] + torch.cat((q, k), 2)[..., D // 2 :]).sum((0, 2))
    torch.testing.assert_close(got, halves)
    assert "cos or sin needs a gradient" in ops.explain("rotary_embedding", q, k, cos, sin).reason


QUERY, KEYS, COS, SIN = drawn()
REFUSED = [
    bad("rotary_embedding", EITHER, "'q' has shape (5, 4, 16); expected [B, S, heads, D]", QUERY[0], KEYS, COS, SIN),
    bad("rotary_embedding", EITHER, "expected the same batch, sequence and head dim", QUERY, KEYS[:1], COS, SIN),
    bad("rotary_embedding", EITHER, "'k' has dtype float16", QUERY, KEYS.half(), COS, SIN),
    bad("rotary_embedding", EITHER, "'cos' has shape (3, 8); expected [S, R/2] or [B, S, R/2]", QUERY, KEYS, COS[:3], SIN),
    bad("rotary_embedding", EITHER, "'sin' has shape (5, 8); both tables alike", QUERY, KEYS, torch.cat((COS, COS), -1), SIN),
    bad("rotary_embedding", EITHER, "'sin' has shape (5, 3)", QUERY, KEYS, COS, SIN[:, :3]),
    bad("rotary_embedding", EITHER, "'cos' has dtype float16; expected float32", QUERY, KEYS, COS.half(), SIN.half()),
    bad("rotary_embedding", EITHER, "'interleaved' is 1; expected True or False", QUERY, KEYS, COS, SIN, 1),
    bad("rotary_embedding", ValueError, "inplace=True and argument 'q' of shape (2, 5, 4, 16) with strides",
        QUERY[:, :, :1].expand(B, S, H, D), KEYS, COS, SIN, False, True),
]  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_each_argument_and_of_the_gradient(interleaved):
    from weft.operators.rotary.rotary_embedding import reference

    q, k, cos, sin = drawn(6)

    def gradients(function, dtype):
        leaves = [q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_()]
        tables = cos.to(dtype), sin.to(dtype)
        pair = function(*leaves, *tables, interleaved)
        first = torch.autograd.grad(sum((y**3).sum() for y in pair), leaves, create_graph=True)
        second = torch.autograd.grad(sum((f**2).sum() for f in first), leaves)
        alone = [
            torch.autograd.grad(function(leaves[0], k.to(dtype), *tables, interleaved)[0].sum(), leaves[0])[0],
            torch.autograd.grad(function(q.to(dtype), leaves[1], *tables, interleaved)[1].sum(), leaves[1])[0],
        ]
        return [t.detach() for t in (*first, *second, *alone)]

    for a, b in zip(gradients(ops.rotary_embedding, torch.float32), gradients(reference, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))

"""Mixture of experts where what is asked of every operator does not reach: the tile schedule, odd routes, gathers without their
inverse, layouts of gradients, wrong arguments."""

import math

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random, with_memory
from waits import no_wait
from where import DEVICE, printed

from weft import ops, registry
from weft.definition import SHARED_LIMIT
from weft.operators.mixture_of_experts import kernels
from weft.operators.mixture_of_experts.dispatch import GROUPED
from weft.operators.mixture_of_experts.reference import grouped_product as reference
from weft.operators.mixture_of_experts.reference import ordered, random_offsets, random_places
from weft.operators.mixture_of_experts.route_top_k import Route

pytestmark = pytest.mark.device


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def triton(name: str):
    return registry.get(name).find("triton").function


@pytest.mark.parametrize("loads", ["zipf", "even", "one", "empty"])
def test_random_offsets_are_as_they_are_called(loads):
    offsets = random_offsets(torch.Generator().manual_seed(0), 100, 6, loads, "cpu")
    sizes = offsets.diff()
    assert offsets[0] == 0 and offsets[-1] == 100 and bool((sizes >= 0).all())
    assert int((sizes == 0).sum()) == {"one": 5, "empty": 3}.get(loads, 0)


def test_unchecked_offsets_that_do_not_fit_reach_nothing_outside():
    """Decreasing, negative and too large ones: NaN around x is not read, what lies around y is not written."""
    w = random(3, 8, 16)
    for offsets in ((0, 15, 5, 20), (0, -7, 3, 20), (0, 9, 400, 500), (3, 9, 12, 20)):
        x, y = torch.full((60, 16), torch.nan, device=DEVICE), torch.full((60, 8), 7.0, device=DEVICE)
        x[20:40] = 1
        plan = GROUPED.kernel("triton").of((x[20:40], w), 20, False, False, False)
        plan(x[20:40], w, int32(*offsets), x, x, y[20:40], y)
        assert not bool(y.isnan().any()) and bool((y[:20] == 7).all()) and bool((y[40:] == 7).all())
        assert bool((y[20:40] != 7).any())


def test_a_source_out_of_range_gives_nan_rows():
    x, w = random(5, 16), random(2, 8, 16)
    source = int32(0, 4, 5, -1, 2, 2)
    y = triton("grouped_matmul")(x, w, int32(0, 3, 6), source)
    assert y.isnan().all(1).tolist() == [False, False, True, True, False, False]
    assert y.isnan().any(1).tolist() == y.isnan().all(1).tolist()
    rows = triton("permute_tokens")(x, source)
    assert rows.isnan().any(1).tolist() == y.isnan().all(1).tolist()


def test_a_position_out_of_range_gives_a_nan_token():
    y, weights = random(6, 9), random(3, 2)
    position = torch.tensor([[0, 1], [2, 6], [-1, 5]], dtype=torch.int32, device=DEVICE)
    out = triton("combine_tokens")(y, position, weights)
    assert out.isnan().any(1).tolist() == [False, True, True]


@pytest.mark.parametrize("sm", SHARED_LIMIT)
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_fit_shared_memory(sm, gated):
    for rows in (16, 64, 128, 2048):
        key = (sm, torch.bfloat16, "T", gated, rows, 2048, 2048)
        found = [kernels.heuristic(*key), *kernels.candidates(*key)]
        assert len(found) > 4
        for c in found:
            stage = (c["BLOCK_M"] + c["BLOCK_N"] * (1 + gated)) * c["BLOCK_K"] * 2
            assert stage * c["num_stages"] <= SHARED_LIMIT[sm]


def test_a_route_by_hand():
    logits = torch.tensor([[0.0, 3, 1, 1], [2, 0, 2, 2], [5, 4, 4, 0]], device=DEVICE)
    found = ops.route_top_k(logits, 2, normalise=False)
    assert found.experts.tolist() == [[1, 2], [0, 2], [0, 1]]  # of equal ones the first
    assert found.offsets.tolist() == [0, 2, 4, 6, 6]
    assert found.source.tolist() == [1, 2, 0, 2, 0, 1]  # tokens of an expert in their order
    assert found.position.tolist() == [[2, 4], [0, 5], [1, 3]]
    torch.testing.assert_close(found.weights, logits.softmax(-1).gather(1, found.experts.long()))
    assert all(t.dtype == torch.int32 for t in found[1:])


def test_no_zeros_are_made_for_the_integers_of_a_route(monkeypatch):
    found, backward = [], Route.backward
    monkeypatch.setattr(
        Route, "backward", staticmethod(lambda ctx, *given: (found.append(given[1:]), backward(ctx, *given))[1])
    )
    logits = random(9, 7).requires_grad_()
    torch.autograd.grad(triton("route_top_k")(logits, 2).weights[:, 0].sum(), logits)
    assert found == [(None,) * 4]


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def test_a_route_whose_weights_are_read_without_a_gradient_has_none():
    logits = random(9, 7).requires_grad_()
    weights = triton("route_top_k")(logits, 2).weights
    (got,) = torch.autograd.grad(Undefined.apply(weights).sum() + logits.sum(), logits)
    assert bool((got == 1).all())


@pytest.mark.parametrize(("tokens", "experts", "k"), [(300, 20, 3), (70, 130, 2), (40, 3, 3)])
def test_places_are_a_permutation_over_several_blocks(tokens, experts, k):
    found = triton("route_top_k")(random(tokens, experts), k)
    places = torch.arange(tokens * k, dtype=torch.int32, device=DEVICE)
    assert found.position.reshape(-1).sort().values.equal(places)
    for got, want in zip(found[2:], ordered(found.experts.long(), experts), strict=True):
        assert got.equal(want)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_nan_logits_still_give_different_experts(scoring):
    logits = random(4, 6)
    logits[0] = torch.nan
    logits[1, 2:4] = torch.nan
    logits[2] = -torch.inf
    found = triton("route_top_k")(logits, 3, scoring=scoring)
    assert all(len(set(row)) == 3 for row in found.experts.tolist())
    assert found.experts[0].tolist() == [0, 1, 2] and found.experts[1, :2].tolist() == [2, 3]
    assert bool(found.weights[:2].isnan().all()) and not bool(found.weights[3].isnan().any())


def test_a_zero_of_either_sign_is_a_tie():
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1, 0.0, -0.0]], device=DEVICE)
    assert triton("route_top_k")(logits, 2).experts.tolist() == [[1, 2], [1, 2]]


def test_a_bias_chooses_and_does_not_weigh():
    logits = random(30, 8)
    bias = torch.zeros(8, device=DEVICE)
    bias[5] = 10
    found = triton("route_top_k")(logits, 2, scoring="sigmoid", bias=bias, normalise=False)
    assert bool((found.experts[:, 0] == 5).all())
    torch.testing.assert_close(found.weights, logits.sigmoid().gather(1, found.experts.long()))


def gathered(position: bool, **named):
    source, places = random_places(torch.Generator().manual_seed(1), 9, 2, DEVICE)
    leaves = [t.requires_grad_() for t in (random(9, 12), random(3, 8, 12, seed=1))]
    function = named.pop("function", triton("grouped_matmul"))
    y = function(*leaves, int32(0, 4, 4, 18), source, places if position else None, **named)
    return torch.autograd.grad(y.square().sum(), leaves)


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_a_gather_without_its_inverse_has_the_same_gradient(activation):
    want = gathered(True, function=reference, activation=activation)
    for position in (True, False):
        torch.testing.assert_close(gathered(position, activation=activation), want, rtol=1e-4, atol=1e-3)


def test_a_weight_stored_transposed_gets_a_gradient_stored_so():
    stored = random(3, 12, 8).requires_grad_()
    y = triton("grouped_matmul")(random(10, 12), stored.transpose(1, 2), int32(0, 3, 3, 10))
    y.sum().backward()
    assert stored.grad.is_contiguous() and not bool(stored.grad[1].any()) and bool(stored.grad[0].any())


def test_a_layer_is_what_its_formula_says():
    """Token by token, expert by expert, with nothing of the family but its public function."""
    x, router, up, down = random(7, 12), random(4, 12, seed=1), random(4, 10, 12, seed=2), random(4, 12, 5, seed=3)
    p = (x @ router.t()).softmax(-1)
    want = torch.zeros_like(x)
    for t in range(7):
        best = p[t].topk(2)
        for share, e in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            gate, value = (up[e] @ x[t]).chunk(2)
            want[t] += share * (down[e] @ (gate * gate.sigmoid() * value))
    got = ops.moe_feed_forward(x, router, up, down, 2)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_the_choice_can_be_explained_in_both_directions():
    x, source, position = random(6, 4), int32(0, 1, 2, 3, 4, 5), int32(0, 1, 2, 3, 4, 5).view(6, 1)
    up, down = random(3, 10, 4), random(3, 4, 5)
    calls = {
        "route_top_k": (x, 2),
        "permute_tokens": (x, source),
        "combine_tokens": (x, position, random(6, 1)),
        "grouped_matmul": (x, up, int32(0, 2, 2, 6)),
        "moe_feed_forward": (x, random(3, 4), up, down, 2),
    }
    for name, call in calls.items():
        for direction in ("forward", "backward"):
            assert ops.explain(name, *call, direction=direction).implementation == "triton"


@pytest.mark.share(2)
def test_no_tokens_have_gradients_of_zero():
    """On a CPU, in a process that does not interpret: there the gradient of no rows has no shape to guess."""
    printed("-c", NO_TOKENS)


NO_TOKENS = """
import torch
from weft import ops
x, router, up, down = (torch.randn(s, requires_grad=True) for s in ((0, 8), (3, 8), (3, 10, 8), (3, 8, 5)))
ops.moe_feed_forward(x, router, up, down, 2).sum().backward()
assert x.grad.shape == (0, 8) and not up.grad.any() and not down.grad.any() and up.grad.shape == up.shape
"""


X, W, OFFSETS = random(6, 4), random(2, 3, 4), int32(0, 2, 6)
REFUSED = [
    bad("route_top_k", ValueError, "'logits' has shape", X[0], 1),
    bad("route_top_k", ValueError, "'k' is 5; expected 1 … 4", X, 5),
    bad("route_top_k", ValueError, "'k' is 0", X, 0),
    bad("route_top_k", TypeError, "'k' is True", X, True),
    bad("route_top_k", TypeError, "int32", X.int(), 1),
    bad("route_top_k", ValueError, "2147483648 places", X[:1].expand(2**30, 4), 2),
    bad("permute_tokens", TypeError, "'source' has dtype int64", X, OFFSETS.long()),
    bad("permute_tokens", ValueError, "expected 6 rows and 3 elements", X, OFFSETS, int32(0, 1, 2)[None]),
    bad("combine_tokens", ValueError, "one row for each position", X, int32(0, 1)[None], random(1, 2)),
    bad("combine_tokens", ValueError, "one row for each position", X, OFFSETS.view(3, 1), X),
    bad("grouped_matmul", ValueError, "'w' has shape (3, 4)", X, W[0], OFFSETS),
    bad("grouped_matmul", ValueError, "'offsets' has shape (2,); expected (3,), one more", X, W, OFFSETS[:2]),
    bad("grouped_matmul", TypeError, "'offsets' has dtype int64", X, W, OFFSETS.long()),
    bad("moe_feed_forward", ValueError, "'w_gate_up' has shape", X, X, W, W, 1),
    bad("moe_feed_forward", ValueError, "'k' is 3", X, random(2, 4), random(2, 6, 4), random(2, 4, 3), 3),
    *(bad("grouped_matmul", ValueError, words, X, W, int32(*offsets), check_offsets=True) for offsets, words in (
        ((0, 5, 4), "decreasing after offset 1"), ((0, 2, 7), "at most 6"), ((1, 2, 6), "runs from 1"))),
    bad("permute_tokens", ValueError, "'source' has 6 at (1,)", X, int32(0, 6), check_source=True),
    bad("combine_tokens", ValueError, "'position' has -1 at (0, 1)", X, int32(0, -1, 2, 3, 4, 5).view(3, 2), random(3, 2),
        check_positions=True),
    bad("grouped_matmul", ValueError, "'source' has 9", X, W, int32(0, 1, 2), source=int32(0, 9), check_offsets=True),
]  # fmt: skip


TRACED = """
import torch
from weft import ops
torch.manual_seed(0)
x, router, up, down = torch.randn(6, 8), torch.randn(3, 8), torch.randn(3, 10, 8), torch.randn(3, 8, 5)
compiled = torch.compile(ops.moe_feed_forward, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(x, router, up, down, 2), ops.moe_feed_forward(x, router, up, down, 2))
"""


@pytest.mark.share(2)
def test_a_compiler_sees_the_layer_without_a_graph_break():
    printed("-W", "ignore", "-c", TRACED)


@pytest.mark.gpu
def test_a_layer_waits_for_nothing():
    x, router = random(64, 128).bfloat16(), random(8, 128).bfloat16()
    up, down = random(8, 64, 128).bfloat16(), random(8, 128, 32).bfloat16()
    leaves = [t.requires_grad_() for t in (x, router, up, down)]
    ops.moe_feed_forward(*leaves, 2).sum().backward()
    with no_wait():
        ops.moe_feed_forward(*leaves, 2).sum().backward()


@pytest.mark.gpu
def test_gathered_rows_are_never_written():
    tokens, k, d, h = 4096, 8, 1024, 64
    source, position = random_places(torch.Generator("cuda").manual_seed(0), tokens, k, "cuda")
    x, w = random(tokens, d).bfloat16(), random(8, 2 * h, d).bfloat16()
    offsets = torch.arange(9, dtype=torch.int32, device="cuda") * (tokens * k // 8)
    gathered = {"source": source, "position": position, "activation": "swiglu"}
    y, taken = with_memory(lambda: ops.grouped_matmul(x, w, offsets, **gathered))
    assert taken < y.nbytes + math.prod((tokens, d))


def test_the_layer_runs_under_autocast_with_its_gradients():
    """What lies between its products is narrow where its matrices are not."""
    x, router, up, down = (random(*s, seed=i) for i, s in enumerate(((6, 5), (4, 5), (4, 6, 5), (4, 5, 3))))
    leaves = [t.requires_grad_() for t in (x, router, up, down)]
    with torch.autocast(DEVICE, torch.float16):
        y = ops.moe_feed_forward(x, router, up, down, 2)
    assert y.dtype == torch.float16 and y.shape == (6, 5)
    found = torch.autograd.grad(y.float().square().sum(), leaves)
    narrow = [t.detach().half().requires_grad_() for t in leaves]
    want = ops.moe_feed_forward(*narrow, 2)
    assert y.equal(want)
    for got, expected in zip(found, torch.autograd.grad(want.float().square().sum(), narrow), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected.float(), rtol=1e-2, atol=1e-2)

"""Dropout where what is asked of every operator does not reach: the random numbers themselves, and that the mask is a function
of seed, offset and index alone."""

import pytest
import torch
from refused import EITHER, bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE

from weft import ops
from weft.operators.dropout import dispatch
from weft.operators.dropout import dropout as dropout_module
from weft.operators.dropout.philox import at_least, words

pytestmark = pytest.mark.device

FULL = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)  # digits of pi: counter and key


@pytest.mark.parametrize(("counter", "key", "expected"), [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((FULL,) * 4, (FULL,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI[:4], PI[4:], "d16cfe09 94fdcceb 5001e420 24126ea1"),
])  # fmt: skip
def test_philox_has_the_known_answers(counter, key, expected):
    found = words(tuple(torch.tensor(c) for c in counter), key)
    assert " ".join(f"{int(word):08x}" for word in found) == expected


def kept(x=None, shape=(4096,), p=0.5, seed=1, offset=0, dtype=torch.float32):
    x = torch.ones(shape, device=DEVICE, dtype=dtype) if x is None else x
    return ops.dropout(x, p, seed, offset) != 0


def test_the_kernel_takes_sixteen_bits_of_each_word_in_order():
    """Of the first group under seed 0: the words' halves, the lower first."""
    halves = (0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00)
    for threshold in (*halves, *(half + 1 for half in halves)):
        mask = kept(shape=(8,), p=threshold / 2**16, seed=0)
        assert mask.tolist() == [half >= threshold for half in halves]


@pytest.mark.parametrize(("columns", "copied_from"), [(88, 2**18), (83, 2**18), (83, 0)])
def test_the_mask_is_one_for_every_dtype_and_layout(columns, copied_from, monkeypatch):
    monkeypatch.setattr(dispatch, "COPIED_FROM", copied_from)
    for plans in (dispatch.DROPOUT, dispatch.DROPOUT.kernel("triton")):
        plans.known.clear()
    shape = (24, columns)
    want = at_least(shape, 7, 3, 2**14, torch.device(DEVICE))
    for dtype in (torch.float32, torch.float16):
        wide = torch.ones(24, 90, device=DEVICE, dtype=dtype)
        for x in (
            torch.ones(shape, device=DEVICE, dtype=dtype),
            wide[:, :columns],
            wide[:, 1 : columns + 1],
            torch.ones(24, 2 * columns, device=DEVICE, dtype=dtype)[:, ::2],
            torch.ones(columns, 24, device=DEVICE, dtype=dtype).T,
            torch.ones(1, columns, device=DEVICE, dtype=dtype).expand(shape),
            torch.ones(2, 12, columns, device=DEVICE, dtype=dtype),
            torch.ones(12, 2, columns, device=DEVICE, dtype=dtype).transpose(0, 1),  # does not collapse into rows
        ):
            assert kept(x, p=0.25, seed=7, offset=3).flatten().equal(want.flatten())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("function", [ops.dropout, dropout_module.reference])
def test_what_is_dropped_is_zero_whatever_it_was(function, value, p, seed):
    torch.manual_seed(0)
    x = torch.full((64,), value, device=DEVICE, requires_grad=True)
    y = function(x, p, seed)
    zeros = int((y == 0).sum())
    assert zeros == 64 if p == 1 else 0 < zeros < 64
    assert int((~y.isfinite()).sum()) == 64 - zeros
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(x))
    assert dx.equal(torch.where(y.detach() == 0, 0.0, 2.0))


def test_of_what_is_finite_a_formula_without_a_seed_makes_pytorchs_result():
    x = torch.randn(1000, device=DEVICE)
    torch.manual_seed(5)
    want = torch.nn.functional.dropout(x, 0.25)
    torch.manual_seed(5)
    assert dropout_module.reference(x, 0.25).equal(want)


def test_seeds_are_taken_modulo_two_to_the_64th_as_numbers_and_as_tensors():
    for seed in (-1, 2**63 + 5, 2**40 + 1):
        held = torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device=DEVICE)
        assert kept(seed=seed).equal(kept(seed=held)) and kept(seed=seed).equal(kept(seed=seed % 2**64))


def test_p_is_what_is_dropped_and_the_expectation_is_x():
    n = 2**15
    x = torch.ones(n, device=DEVICE)
    for p in (0.1, 0.5, 0.9):
        y = ops.dropout(x, p, seed=42)
        spread = (p * (1 - p) / n) ** 0.5
        assert abs(float((y == 0).double().mean()) - p) < 5 * spread
        assert abs(float(y.double().mean()) - 1) < 5 * spread / (1 - p)
        assert abs(float(y.double().var()) - p / (1 - p)) < 0.05 * p / (1 - p)


def test_neighbours_offsets_and_seeds_are_independent():
    n = 2**15
    keys = {"a": (5, 0), "offset": (5, 1), "seed": (6, 0), "upper": (5 + 2**32, 0)}
    signs = {name: kept(shape=(n,), seed=s, offset=o).double() * 2 - 1 for name, (s, o) in keys.items()}
    a = signs.pop("a")
    correlations = {f"lag {lag}": float((a[lag:] * a[:-lag]).mean()) for lag in (1, 2, 3, 4, 7, 8, 16, 1024, 2048)}
    correlations |= {name: float((a * other).mean()) for name, other in signs.items()}
    assert {name: c for name, c in correlations.items() if abs(c) > 5 / n**0.5} == {}


def test_drawn_masks_differ_and_follow_manual_seed():
    def draws():
        torch.manual_seed(3)
        return [kept(seed=None) for _ in range(3)]

    first, second = draws(), draws()
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert not first[0].equal(first[1]) and not first[1].equal(first[2])


ONES = torch.ones(8, device=DEVICE)
REFUSED = [
    bad("dropout", EITHER, "'p' is 1.5; expected a probability", ONES, p=1.5),
    bad("dropout", EITHER, "'p' is nan", ONES, p=float("nan")),
    bad("dropout", EITHER, "'p' is True", ONES, p=True),
    bad("dropout", EITHER, "expected an int of 64 bits", ONES, seed=2**64),
    bad("dropout", EITHER, "expected an int of 64 bits", ONES, seed=1.5),
    bad("dropout", EITHER, "'offset' is -1", ONES, seed=1, offset=-1),
    bad("dropout", EITHER, "expected a seed beside an offset", ONES, offset=3),
    bad("dropout", EITHER, "one element of torch.int64", ONES, seed=torch.zeros(2, dtype=torch.int64)),
    bad("dropout", EITHER, "'training' is 1; expected True or False", ONES, training=1),
]


@pytest.mark.gpu
def test_a_captured_graph_draws_anew_at_each_replay():
    x = torch.ones(4096, device="cuda")
    ops.dropout(x, 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.dropout(x, 0.5)
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(y != 0)
    torch.cuda.synchronize()
    assert not masks[0].equal(masks[1]) and not masks[1].equal(masks[2])


@pytest.mark.gpu
def test_drawing_moves_the_generator_on_as_pytorch_does():
    x = torch.ones(64, device="cuda")
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    ops.dropout(x, 0.5)
    assert not torch.cuda.get_rng_state().equal(before)


def fused(dtype=torch.float32):
    g = torch.Generator(DEVICE).manual_seed(2)
    x, residual = (torch.randn(3, 40, generator=g, device=DEVICE).to(dtype) for _ in range(2))
    return x, residual, torch.randn(40, generator=g, device=DEVICE).to(dtype)


def test_the_fused_norm_has_the_mask_of_dropout():
    x, residual, weight = fused()
    for seed in (9, torch.tensor([9], device=DEVICE)):
        y, h = ops.dropout_add_rms_norm(x, residual, weight, 0.25, seed, 4)
        torch.testing.assert_close(h, residual + ops.dropout(x, 0.25, 9, 4))
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(h, (40,), weight, 1e-6))


@pytest.mark.parametrize("results", [(0,), (1,), (0, 1)])
def test_the_fused_norm_has_first_and_second_gradients(results):
    from weft.operators.dropout.dropout_add_rms_norm import reference

    arguments = [t.double() for t in fused()]
    weights = [torch.randn(3, 40, device=DEVICE, dtype=torch.float64) for _ in range(2)]

    def gradients(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in arguments]
        pair = function(*leaves, 0.25, 9)
        total = sum((pair[i].square() * weights[i].to(dtype)).sum() for i in results)
        first = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum(f.square().sum() for f in first), leaves, materialize_grads=True)
        h = function(arguments[0].to(dtype), leaves[1], arguments[2].to(dtype), 0.25, 9)[1]
        alone = torch.autograd.grad(h.sum(), leaves[1])
        return [t.detach() for t in (*first, *second, *alone)]

    found, wanted = gradients(ops.dropout_add_rms_norm, torch.float32), gradients(reference, torch.float64)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_the_fused_norm_says_what_is_wrong_and_what_it_hands_over():
    x, residual, weight = fused()
    with pytest.raises(ValueError, match=r"have shapes \(3, 40\), \(2, 40\) and \(40,\)"):
        ops.dropout_add_rms_norm(x, residual[:2], weight)
    with pytest.raises(ValueError, match="'eps' is -1"):
        ops.dropout_add_rms_norm(x, residual, weight, eps=-1)
    narrow = ops.explain("dropout_add_rms_norm", x[:, :39], residual[:, :39], weight[:39])
    assert narrow.implementation == "triton"

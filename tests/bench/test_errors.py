"""The judgement of results: how far from float64 one may be, in which terms, and what is wrong whatever its size."""

import math

import pytest
import torch

from weft.bench.errors import judge
from weft.definition import Tolerance

RELATIVE = Tolerance(scale="element")


def draw(*shape: int, seed: int = 0, offset: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset


@pytest.mark.parametrize("scale", ["element", "row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_rounded_reference_passes_and_zeros_do_not(scale, dtype):
    want = draw(7, 33, offset=0.0)
    right = want.to(dtype)
    assert judge([right], [want], [right], Tolerance(scale=scale)).ok
    verdict = judge([torch.zeros_like(right)], [want], [right], Tolerance(scale=scale))
    assert not verdict.ok and verdict.share > 10


def test_one_wrong_element_is_named():
    want = draw(4, 100)
    got = want.float().clone()
    got[2, 17] += 0.01
    verdict = judge([got], [want], [want.float()], RELATIVE)
    assert not verdict.ok and "1 of 400 elements, first at (2, 17)" in verdict.reason


def test_the_maximum_and_the_mean_may_be_multiples_of_pytorchs_own():
    want = draw(1000).abs() + 1
    baseline = (want * 1.01).float()  # PyTorch itself is off by 1 % everywhere
    everywhere = {e: judge([(want * (1 + e)).float()], [want], [baseline], RELATIVE) for e in (0.019, 0.021)}
    assert everywhere[0.019].ok and everywhere[0.019].share == pytest.approx(0.95, rel=1e-3)
    assert not everywhere[0.021].ok and "root mean square" in everywhere[0.021].reason
    for error, ok in ((0.07, True), (0.09, False)):  # twice four root mean squares
        got = want.clone()
        got[5] *= 1 + error
        assert judge([got.float()], [want], [baseline], RELATIVE).ok == ok
    assert judge([(want * 1.025).float()], [want], [baseline], Tolerance(scale="element", multiple=3.0)).ok


def test_the_floor_is_counted_in_units_of_last_place():
    want = torch.ones(1, dtype=torch.float64)
    off = want.float() * (1 + 2**-22)  # two units of last place where PyTorch makes no error at all
    assert not judge([off], [want], [want.float()], Tolerance(scale="element", ulps=1.0)).ok
    assert judge([off], [want], [want.float()], Tolerance(scale="element", ulps=4.0)).ok
    assert judge([off], [want], [want.float()], Tolerance(scale="element", ulps=1.0), terms=16).ok


def test_errors_are_relative_to_the_scale():
    want = torch.tensor([[1e-6, 1.0, 1.0, 1.0], [1e-6, 1e-6, 1e-6, 1e-6]], dtype=torch.float64)
    first, second = want.float().clone(), want.float().clone()
    first[0, 0] += 1e-8  # small against its row
    second[1, 0] += 1e-8  # large against its row, small against the tensor

    def passes(scale, got):
        return judge([got], [want], [want.float()], Tolerance(scale=scale)).ok

    verdicts = {scale: [passes(scale, got) for got in (first, second)] for scale in ("element", "row", "tensor")}
    assert verdicts == {"element": [False, False], "row": [True, False], "tensor": [True, True]}
    assert judge([second], [want], [want.float()], RELATIVE, scales=[torch.ones(2, 1, dtype=torch.float64)]).ok


@pytest.mark.parametrize(("got", "ok"), [
    ([1.0, math.nan, math.inf, -math.inf], True), ([math.nan, math.nan, math.inf, -math.inf], False),
    ([1.0, 2.0, math.inf, -math.inf], False), ([1.0, math.nan, math.nan, -math.inf], False),
    ([1.0, math.nan, -math.inf, -math.inf], False), ([1.0, math.nan, math.inf, -3e38], False),
    ([math.inf, math.nan, math.inf, -math.inf], False),
])  # fmt: skip
def test_nan_and_infinities_must_be_where_pytorch_puts_them(got, ok):
    want = torch.tensor([1.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
    for tolerance in (RELATIVE, Tolerance(exact=True)):
        verdict = judge([torch.tensor(got)], [want], [want.float()], tolerance)
        assert verdict.ok == ok, tolerance
        assert ok or "PyTorch has" in verdict.reason


def test_exact_means_bit_for_bit():
    want = draw(100)
    right = want.float()
    off = right.clone()
    off[3] = torch.nextafter(off[3], torch.tensor(9.0))
    assert judge([right.clone()], [want], [right], Tolerance(exact=True)).ok
    verdict = judge([off], [want], [right], Tolerance(exact=True))
    assert not verdict.ok and "1 of 100 elements, first at (3,)" in verdict.reason


@pytest.mark.parametrize(("right", "wrong"), [
    (torch.arange(10), torch.arange(10) + (torch.arange(10) == 4).long()),  # integers are compared exactly
    (torch.empty(0, 7), torch.empty(7, 0)), (torch.tensor(2.0), torch.tensor(2.0) * 1.1),
], ids=["integers", "empty", "scalar"])  # fmt: skip
def test_integers_empty_results_and_scalars_are_judged(right, wrong):
    want = right.double() if right.is_floating_point() else right
    assert judge([right.clone()], [want], [right], Tolerance()).ok
    assert not judge([wrong], [want], [right], Tolerance()).ok


@pytest.mark.parametrize(("got", "words"), [
    ([torch.ones(2, 3)], "shape is torch.Size([2, 3]); expected torch.Size([3, 2])"),
    ([torch.ones(3, 2, dtype=torch.float64)], "dtype is torch.float64; expected torch.float32"),
    ([torch.ones(3, 2, device="meta")], "device is meta; expected cpu"), ([], "0 results; expected 1"),
    ([torch.ones(3, 2)] * 2, "2 results; expected 1"),
])  # fmt: skip
def test_another_form_is_wrong(got, words):
    want = torch.ones(3, 2)
    verdict = judge(got, [want.double()], [want], Tolerance())
    assert not verdict.ok and verdict.reason == words


def test_the_wrong_one_of_several_results_is_named():
    want = [draw(5, seed=1), draw(5, seed=2)]
    right = [w.float() for w in want]
    verdict = judge([right[0], right[0]], want, right, Tolerance())
    assert not verdict.ok and verdict.reason.startswith("result 1: ")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits_are_judged_by_their_own_epsilon(dtype):
    want = torch.linspace(1, 2, 64, dtype=torch.float64)
    right = want.to(dtype)
    assert judge([right], [want], [right], Tolerance()).ok
    step = torch.finfo(dtype).eps
    assert judge([(right.double() + step).to(dtype)], [want], [right], Tolerance(multiple=3.0, ulps=4.0)).ok
    assert not judge([(right.double() * (1 + 4 * step)).to(dtype)], [want], [right], Tolerance()).ok
    assert not judge([torch.full((64,), torch.nan).to(dtype)], [want], [right], Tolerance()).ok

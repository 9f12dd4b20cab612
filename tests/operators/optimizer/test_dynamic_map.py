"""Codes of 8 bits for an optimizer's moments: the dynamic map, and blocks that share a scale."""

import math

import pytest
import torch

from weft.operators.optimizer import blockwise, dynamic_map


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_has_its_values(signed):
    """As in the paper: the upper decade of the signed map has 64 steps of 0.9 / 64, and each one below half of them."""
    values = dynamic_map.values(signed)
    assert len(values) == 256 and values == sorted(set(values))
    assert values[-1] == 1.0 and 0.0 in values
    cells = 64 if signed else 128
    top = [v for v in values if 0.1 <= v < 1]
    assert len(top) == cells and math.isclose(top[1] - top[0], 0.9 / cells)
    decades = [sum(10.0**-k <= v < 10.0 ** (1 - k) for v in values) for k in (2, 3, 7)]
    assert decades == [cells // 2, cells // 4, cells // 64]
    if signed:
        assert values[126::-1] == [-v for v in values[128:255]]


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_the_maps_values_are_their_numbers(signed):
    table = torch.tensor(dynamic_map.values(signed), dtype=torch.float64)
    everything = torch.arange(256, dtype=torch.uint8)
    assert dynamic_map.encode(table, signed).equal(everything)
    half = torch.full_like(table, 0.5)
    assert dynamic_map.encode(table, signed, half).equal(everything)


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_at_most_half_an_interval_away(signed):
    table = torch.tensor(dynamic_map.values(signed), dtype=torch.float64)
    y = 10 ** torch.linspace(-6.9, 0, 20001, dtype=torch.float64)
    decade = torch.ceil(torch.log10(y)).clamp(-6, 0)
    cells = 2.0 ** (6 + decade) * (1 if signed else 2)
    for sign in (1, -1) if signed else (1,):
        off = (table[dynamic_map.encode(sign * y, signed).long()] - sign * y).abs()
        assert bool((off <= 0.5001 * 0.9 * 10**decade / cells).logical_or(decade == -6).all())


@pytest.mark.parametrize("signed", [True, False])
def test_stochastic_codes_have_the_numbers_expectation(signed):
    table = torch.tensor(dynamic_map.values(signed), dtype=torch.float64)
    y = 10 ** torch.linspace(-6, 0, 61, dtype=torch.float64)
    uniform = ((torch.arange(8192, dtype=torch.float64) + 0.5) / 8192).expand(61, -1)
    codes = dynamic_map.encode(y[:, None].expand(-1, 8192), signed, uniform)
    mean = table[codes.long()].mean(1)
    torch.testing.assert_close(mean, y, rtol=1e-3, atol=1e-9)


def test_a_second_moment_is_0_only_where_it_is_0():
    y = torch.tensor([0.0, 1e-30, 1e-9, 1.0])
    assert dynamic_map.encode(y, False).tolist() == [0, 1, 1, 255]
    for format in blockwise.STATE_FORMATS:
        codes, scales = torch.zeros(4, dtype=torch.uint8), torch.zeros(1)
        blockwise.quantize(y, codes, scales, 256, False, format)
        assert (blockwise.dequantize(codes, scales, 256, False, format) > 0).tolist() == [False, True, True, True]


@pytest.mark.parametrize("format", blockwise.STATE_FORMATS)
@pytest.mark.parametrize("signed", [True, False])
def test_the_largest_of_a_block_is_kept_exactly_and_others_near(signed, format):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=g) * 1e-3
    x = x if signed else x.square()
    codes, scales = torch.zeros(1000, dtype=torch.uint8), torch.zeros(4)
    blockwise.quantize(x, codes, scales, 256, signed, format)
    got = blockwise.dequantize(codes, scales, 256, signed, format)
    for block, kept, scale in zip(x.split(256), got.split(256), scales, strict=True):
        assert scale == block.abs().max()
        largest = block.abs().argmax()
        if format == "fp8" or block[largest] > 0:
            torch.testing.assert_close(kept[largest], block[largest], rtol=1e-6, atol=0)
        assert float((kept - block).abs().max() / scale) < (0.0075 if format == "dynamic" else 0.07)


def test_a_block_with_a_nan_is_lost_and_its_neighbours_are_not():
    x = torch.ones(600)
    x[300] = math.nan
    codes, scales = torch.zeros(600, dtype=torch.uint8), torch.zeros(3)
    blockwise.quantize(x, codes, scales, 256, True, "dynamic")
    got = blockwise.dequantize(codes, scales, 256, True, "dynamic")
    assert got[:256].eq(1).all() and got[256:512].isnan().all() and got[512:].eq(1).all()

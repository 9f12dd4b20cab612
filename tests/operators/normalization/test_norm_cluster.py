"""Norms by clusters without a GPU: ``cluster.cu`` run on a CPU that plays its PTX (``ptx_on_cpu.hpp``) with the launches that
Python computes; how far LayerNorm's deviations err, also in rows far from 0."""

from __future__ import annotations

import pytest
from cuda_on_cpu import player_of_cases

pytest.importorskip("torch")
pytest.importorskip("triton")

from norms_on_cpu import ADDED, FAR, FP16, FP32, LAYER, RMS, Case, Norms, with_headers

from weft.operators.normalization import cluster

CASES = {
    "fp32": Case(FP32, LAYER),
    "fp32 far": Case(FP32, LAYER, FAR),
    "fp32 wild": Case(FP32, LAYER, wild=5.0),
    "fp32 huge": Case(FP32, LAYER, times=1.5e17),
    "fp32 added": Case(FP32, ADDED, FAR),
    "fp32 odd": Case(FP32, LAYER, columns=4004),
    "fp32 two rows": Case(FP32, LAYER, FAR, columns=4004, at_once=2),
    "fp16": Case(FP16, LAYER),
    "fp16 far": Case(FP16, LAYER, FAR),
    "fp16 added": Case(FP16, ADDED, FAR),
    "fp32 rms": Case(FP32, RMS),
}
MISTAKES = {
    "around 0": ("fp16 far", "const float d = CENTERED ? f[i] - around[k] : f[i];", "const float d = f[i];"),
    "around x without the residual": ("fp16 added", "(r ? to_float(*r) : 0.f)", "0.f"),
    "squares about 0": (
        "fp32 far",
        "const float own = of_row(sums, k).x * in_mine;",
        "const float own = 0.f;",
    ),
    "means that are not joined": ("fp32", "warp_sum(of.y + count * off * off)", "warp_sum(of.y)"),
    "a warp's share for a block's": ("fp32", "warps = false;", ""),
    "a row's end counted as a whole slice": (
        "fp32 odd",
        "elements % ROUND - warp * MINE, MINE",
        "ROUND - warp * MINE, MINE",
    ),
}


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Runs a case, or one of ``MISTAKES``, and returns what is wrong with its result."""
    return player_of_cases(tmp_path_factory.mktemp("played"), with_headers(cluster.SOURCE), Norms, CASES, MISTAKES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(play, name):
    assert play(name) == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(play, mistake):
    assert play(MISTAKES[mistake][0], mistake)

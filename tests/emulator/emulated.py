"""The tests of a file that has ``SUITES`` of kernels on the CPU emulator, which does ``from emulated import *``."""

import pytest

__all__ = ["test_a_mistake_is_noticed", "test_it_is_right", "test_it_is_right_in_other_orders"]


def test_it_is_right(emulated, suite, case):
    """Tensors lie before pages that may not be touched; threads, copies and arrivals take turns at random."""
    assert emulated(suite).what_is_wrong(emulated(suite).suite.cases[case]) == ""


@pytest.mark.long
def test_it_is_right_in_other_orders(emulated, suite, case):
    made = emulated(suite)
    for seed in made.suite.seeds:
        assert made.what_is_wrong(made.suite.cases[case], seed) == ""


def test_a_mistake_is_noticed(emulated, suite, mistake):
    """With some operands, in some order of threads."""
    case = emulated(suite).suite.of_mistake(mistake)
    assert any(emulated(suite).what_is_wrong(case, seed, mistake) for seed in range(40))

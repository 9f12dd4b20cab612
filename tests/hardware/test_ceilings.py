"""The limit that measured ceilings set to a cost."""

import pytest

from weft.definition import Cost
from weft.hardware.ceilings import Ceilings


def test_the_limit_is_taken_at_the_nearest_mix_of_reads_and_writes():
    ceilings = Ceilings("cuda", {(1, 0): 100.0, (0, 1): 50.0, (1, 1): 80.0, (2, 1): 90.0})
    for reads, writes, mix in ((9, 0, (1, 0)), (0, 9, (0, 1)), (5, 5, (1, 1)), (66, 34, (2, 1)), (97, 3, (1, 0))):
        microseconds, name = ceilings.limit(Cost(reads=reads, writes=writes))
        assert name == f"memory {mix[0]}:{mix[1]}"
        assert microseconds == pytest.approx((reads + writes) / ceilings.bandwidth[mix] * 1e6)


def test_the_slower_of_memory_and_matrix_unit_binds():
    ceilings = Ceilings("cuda", {(1, 1): 1e12}, {"bf16": 1e15})
    assert ceilings.limit(Cost(10**6, 10**6, {"bf16": 1e6}))[1] == "memory 1:1"
    assert ceilings.limit(Cost(10**6, 10**6, {"bf16": 1e13})) == (pytest.approx(1e4), "bf16 matrix")
    assert ceilings.limit(Cost(10**6, 10**6, {"fp8": 1e13}))[1] == "memory 1:1"  # a rate that was not measured
    assert ceilings.limit(Cost()) == (0.0, "")
    assert ("bf16 matrix", "matrix rate", 1e15, "FLOP/s") in list(ceilings.rows())

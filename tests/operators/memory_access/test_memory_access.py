"""The predictions of the memory-access patterns, and that records carry them."""

import math

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE

from weft import ops, registry
from weft.bench.compare import Bench
from weft.definition import workload
from weft.hardware.ceilings import Ceilings
from weft.learn import cuda, ptx
from weft.operators import memory_access
from weft.operators.cuda import CudaPlan
from weft.operators.memory_access import histogram, shared_memory_access, strided_access, vectorized_access
from weft.operators.memory_access.machine import Machine

pytestmark = pytest.mark.device
FAMILY = [registry.get(name) for name in registry.names() if registry.family(name) == "memory_access"]
H200 = Machine()


@pytest.mark.parametrize("op", FAMILY, ids=lambda op: op.name)
def test_every_pattern_is_predicted_at_every_point(op):
    for which in ("verify", "bench", "quick"):
        for w in op.cases(which):
            assert 0 < op.predicted(w, "forward") <= 1, w


def test_a_stride_moves_what_lies_between():
    def share(stride: int, dtype: str = "fp32") -> float:
        return strided_access.predicted_share(workload(dtype, N=1, stride=stride), H200)

    assert share(1) == 1
    assert share(2) == pytest.approx(2 / 3)  # two read and one written, of which one read and one written were wanted
    assert all(share(k) > share(k + 1) for k in range(1, 16))
    assert share(16) == share(32) == pytest.approx(8 / 68)  # an element a fetch: no further to fall
    assert share(32, "bf16") < share(32)


def test_conflicts_are_counted_bank_by_bank():
    for stride in range(1, 33):
        assert shared_memory_access.conflict_degree(stride, 4) == math.gcd(stride, 32)
    assert [shared_memory_access.conflict_degree(k, 2) for k in (1, 2, 4, 32)] == [1, 1, 2, 16]


def test_narrow_accesses_leave_too_little_under_way():
    shares = [vectorized_access.predicted_share(workload("fp32", N=1, width=w), H200) for w in (4, 8, 16)]
    assert shares[0] < shares[1] == shares[2] == 1


def test_what_fits_into_l2_is_read_faster_again():
    def rate(elements: int, passes: int = 16) -> float:  # bytes a second as the program sees them, of memory's
        return passes * memory_access.l2_resident_access.predicted_share(
            workload("fp32", N=elements, passes=passes), H200
        )

    assert rate(2**26) == 1
    assert 1.5 < rate(2**20) == rate(2**23) < H200.l2_rate / H200.memory


def test_a_block_brings_whole_fetches():
    shares = [memory_access.random_access.predicted_share(workload("fp32", N=1, block=b), H200) for b in (32, 64, 128)]
    assert shares[0] == pytest.approx(72 / 104) and shares[1:] == [1, 1]


def test_records_carry_the_prediction():
    op = strided_access.strided_access
    bench = Bench(DEVICE, Ceilings(DEVICE, {(1, 1): 1e15}), budget_s=0.01)
    w = workload("fp32", N=2**16, stride=4)
    records = bench.compare(op, w, "forward", [op.find("torch")])
    assert [r.details["predicted_share"] for r in records] == [pytest.approx(op.predicted(w, "forward"), rel=1e-4)]
    other = registry.get("vector_add")
    records = bench.compare(other, workload("fp32", N=2**16), "forward", [other.find("torch")])
    assert "predicted_share" not in records[0].details


def test_the_cuda_histogram_interpreted_is_the_reference(monkeypatch):
    pytest.importorskip("cuda.bindings")

    def interpreted(plan, *tensors):
        module, entry = cuda._compiled(plan.source.read_text(encoding="utf-8"), plan.expression)
        args = [*(t.numpy() for t in tensors), *(s.value for s in plan.scalars)]
        done = ptx.launch(module, entry, plan.grid, (plan.block,), args, ("x", "y", "n"))
        assert not done.problems

    monkeypatch.setattr(CudaPlan, "__call__", interpreted)
    for n in (1, 1500):
        x = torch.cat(
            [torch.rand(n, generator=torch.Generator().manual_seed(n)), torch.tensor([1.0, -0.1, 1.1, math.nan])]
        )
        y = histogram.result(x)
        histogram.cuda_plan(x)(x, y)
        assert y.equal(histogram.reference(x)) and y.sum() == n + 1
    assert histogram.cuda_declines(x[1:]) and histogram.cuda_declines(x.half()) and not histogram.cuda_declines(x)


REFUSED = [
    bad("coalesced_access", ValueError, "expected one dimension", torch.ones(2, 3)),
    bad("strided_access", ValueError, "'stride' is 33; expected 1 … 32", torch.ones(9), 33),
    bad("strided_access", TypeError, "expected an int", torch.ones(9), 2.0),
    bad("misaligned_access", ValueError, "expected 0 … 31", torch.ones(9), -1),
    bad("vectorized_access", ValueError, "expected 4, 8, 16", torch.ones(9), 12),
    bad("l2_resident_access", ValueError, "expected 1 … 4096", torch.ones(9), 0),
    bad("random_access", TypeError, "expected int64", torch.ones(9, 4), torch.ones(3)),
    bad("random_access", ValueError, "elements of a block", torch.ones(9), torch.ones(3, dtype=torch.int64)),
]


def test_what_is_no_pattern_goes_to_pytorch_and_says_so():
    wanted = torch.ones(64, device=DEVICE, requires_grad=True)
    assert "gradient" in ops.explain("strided_access", wanted).reason
    ops.strided_access(wanted).sum().backward()
    assert wanted.grad.sum() == 32
    assert "contiguous" in ops.explain("coalesced_access", torch.ones(64, device=DEVICE)[::2]).reason
    x, index = torch.randn(9, 12, device=DEVICE), torch.tensor([3, 1, 1], device=DEVICE)
    assert "powers of two" in ops.explain("random_access", x, index).reason
    assert ops.random_access(x, index).equal(x[index])

"""Times: quantiles, pairs, the order of calls, and what is too short to be true."""

import dataclasses
import functools
import signal
import time

import pytest
import torch

from weft import registry, timing
from weft.bench import compare
from weft.definition import workload
from weft.hardware import query
from weft.hardware.ceilings import Ceilings
from weft.timing import ImpossibleTime, Timer, Timing, paired_ratio, quantile


def test_quantiles_are_linear_between_sorted_values():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and quantile([0.0, 10.0], 0.2) == 2.0
    assert (quantile([5.0], 0.8), quantile([1.0, 2.0], 0.0), quantile([1.0, 2.0], 1.0)) == (5.0, 1.0, 2.0)


def test_ratios_are_taken_pair_by_pair():
    """The machine slows down threefold; the ratio does not notice, one of medians taken apart would."""
    ours, peer = Timing([1.0, 1.0, 3.0, 3.0]), Timing([2.0, 2.0, 6.0, 6.0])
    assert paired_ratio(peer, ours) == (2.0, 2.0, 2.0)
    assert paired_ratio(Timing([1.0, 2.0, 9.0]), Timing([1.0, 1.0, 3.0]))[0] == 2.0
    with pytest.raises(ValueError):
        paired_ratio(Timing([1.0]), Timing([1.0, 2.0]))


def test_calls_are_interleaved_rotated_and_take_turns_at_going_first():
    order: list[str] = []
    calls = {name: [functools.partial(order.append, f"{name}{i}") for i in range(2)] for name in "abc"}
    timings = Timer("cpu", budget_s=0.0, least=4, most=9).measure(calls)
    measured = order[-12:]
    assert measured == ["a0", "b0", "c0", "b1", "c1", "a1", "c0", "a0", "b0", "a1", "b1", "c1"]
    assert all(order.count(f"{name}{i}") >= 2 for name in "abc" for i in range(2))  # every set was warmed up
    assert all(len(t.times_us) == len(t.host_times_us) == 4 for t in timings.values())


def test_repetitions_stay_between_least_and_most():
    def count(**limits) -> int:
        return len(Timer("cpu", **limits).measure({"a": [lambda: None]})["a"].times_us)

    assert count(budget_s=60.0, least=1, most=7) == 7 and count(budget_s=0.0, least=3, most=7) == 3


def test_a_longer_call_takes_longer():
    calls = {"short": [lambda: time.sleep(0.001)], "long": [lambda: time.sleep(0.03)]}
    timings = Timer("cpu", budget_s=0.0, least=3).measure(calls)
    ratio, low, high = paired_ratio(timings["long"], timings["short"])
    assert timings["short"].median_us >= 1000 and timings["long"].median_us >= 30000 and 1 < low <= ratio <= high


def test_a_time_under_the_theoretical_bandwidth_is_an_error(monkeypatch):
    def measure(microseconds: float, **options) -> dict[str, Timing]:
        timer = Timer("cuda", budget_s=0.0, least=3, **options)
        monkeypatch.setattr(timer, "_once_cuda", lambda call, expected: (microseconds, 1.0))
        return timer.measure({"too good": [lambda: None]}, least_us=2.0)

    with pytest.raises(ImpossibleTime, match=r"too good: 1\.00 us, under the 2\.00 us"):
        measure(1.0)
    assert measure(2.1)["too good"].median_us == 2.1
    assert measure(1.0, cold=False)["too good"].median_us == 1.0  # a warm cache may beat the memory


def test_a_comparison_leaves_out_what_cannot_have_moved_its_bytes(monkeypatch):
    op, said = registry.get("vector_add"), []
    bench = compare.Bench("cpu", Ceilings("cpu"), budget_s=0.0, say=said.append)
    times = {"torch": 2.1, "numpy": 1.9}
    real = bench.timer.measure

    def measure(calls, **options):
        timed = {name: [lambda us=times[name]: us] for name in calls}
        monkeypatch.setattr(bench.timer, "_once_cpu", lambda call, expected: (call(), 1.0))
        return real(timed, **options)

    monkeypatch.setattr(bench.timer, "cold", True)
    monkeypatch.setattr(bench.timer, "measure", measure)
    monkeypatch.setattr(query, "theoretical_bandwidth", lambda: 6e6)  # 12 bytes in 2 us
    peers = [dataclasses.replace(op.find("torch"), name=name) for name in times]
    measured = bench.compare(op, workload("fp32", N=1), "forward", peers)
    assert [m.implementation for m in measured] == ["torch"]
    words = "left out of vector_add forward at N=1 fp32: numpy: 1.90 us, under the 2.00 us"
    assert len(said) == 1 and said[0].startswith(words)


def test_a_peer_that_is_never_ready_costs_a_comparison_only_its_limit(monkeypatch):
    def never(x, y):
        while True:
            try:
                time.sleep(60)
            except Exception:  # as autotuners do
                swallowed.append(time.monotonic())
                if len(swallowed) == 2:
                    raise

    swallowed, said = [], []
    monkeypatch.setattr(compare, "PREPARE_S", 0.2)
    op = registry.get("vector_add")
    peers = [dataclasses.replace(op.find("torch"), name="endless", function=never), op.find("torch")]
    bench = compare.Bench("cpu", Ceilings("cpu"), budget_s=0.0, say=said.append)
    before = signal.getsignal(signal.SIGALRM)
    measured = bench.compare(op, workload("fp32", N=8), "forward", peers)
    assert [m.implementation for m in measured] == ["torch"] and len(swallowed) == 2
    assert said == ["vector_add/endless at N=8 fp32 failed: TimeLimitExceeded: not ready within 0.2 s"]
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and signal.getsignal(signal.SIGALRM) is before


def test_a_timer_on_the_cpu_says_warm():
    assert (Timer("cpu").cache, Timer("cuda").cache, Timer("cuda", cold=False).cache) == ("warm", "cold", "warm")


@pytest.mark.gpu
def test_cold_times_on_the_gpu_are_possible_and_include_the_memory():
    x = torch.randn(2**24, device="cuda")
    least_us = 2 * x.numel() * 4 / query.theoretical_bandwidth() * 1e6
    t = Timer("cuda").measure({"clone": [x.clone]}, least_us=least_us)["clone"]
    assert least_us < t.median_us < 4 * least_us and timing.host_time_us(x.clone) < t.median_us

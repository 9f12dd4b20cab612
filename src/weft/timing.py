"""One timer for every room: interleaved, on device events, with the L2 flushed, medians with their spread.

What is compared is timed in turn within each repetition (A B C, A B C, …), so that a drift of clocks or power reaches
all alike and ratios can be taken pair by pair. Cold times are taken after reading four times the L2's size, which leaves
only clean lines behind: a flush by writing would make the timed kernel pay for the write-back.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], Any]


class ImpossibleTime(RuntimeError):
    """A cold time shorter than the bytes over the theoretical bandwidth: a cache was warm, or work was not done."""


@dataclass
class Timing:
    """Times of one implementation, microseconds, one for each repetition; ``host_us`` is the time the call took to return."""

    times_us: list[float] = field(default_factory=list)
    host_times_us: list[float] = field(default_factory=list)

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    @property
    def host_us(self) -> float:
        return statistics.median(self.host_times_us)

    def quantile(self, share: float) -> float:
        return quantile(self.times_us, share)


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the sorted values."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def paired_ratio(numerator: Timing, denominator: Timing) -> tuple[float, float, float]:
    """Median, p20 and p80 of numerator / denominator, repetition by repetition."""
    ratios = [a / b for a, b in zip(numerator.times_us, denominator.times_us, strict=True)]
    return statistics.median(ratios), quantile(ratios, 0.2), quantile(ratios, 0.8)


class Timer:
    """Times calls on one device.

    Args:
        device: ``cuda`` or ``cpu``.
        cold: flush the L2 before each call (on a CPU caches are left as they are, and records say warm).
        budget_s: time for all repetitions of one comparison; between ``least`` and ``most`` repetitions are made.
    """

    def __init__(self, device: str, *, cold: bool = True, budget_s: float = 0.5, least: int = 5, most: int = 60):
        self.device, self.cold = device, cold and device == "cuda"
        self.budget_s, self.least, self.most = budget_s, least, most
        self._buffer: Any = None

    @property
    def cache(self) -> str:
        return "cold" if self.cold else "warm"

    def measure(self, calls: dict[str, Sequence[Call]], *, least_us: float = 0.0) -> dict[str, Timing]:
        """Times all calls, interleaved.

        Args:
            calls: name → the same call on several input sets, taken in rotation.
            least_us: bytes over the theoretical bandwidth; a shorter cold median is an error.

        Raises:
            ImpossibleTime: a cold median under ``least_us``.
        """
        once = self._once_cuda if self.device == "cuda" else self._once_cpu
        timings = {name: Timing() for name in calls}
        for _ in range(2):  # warm up: compilation, allocator, clocks
            for sets in calls.values():
                for call in sets:
                    once(call, 0.0)
        pause = {name: once(sets[0], 0.0)[1] for name, sets in calls.items()}
        start = time.perf_counter()
        names = list(calls)
        for repetition in range(self.most):
            if repetition >= self.least and time.perf_counter() - start > self.budget_s:
                break
            shift = repetition % len(names)  # another goes first each time
            for name in names[shift:] + names[:shift]:
                sets = calls[name]
                device_us, host_us = once(sets[repetition % len(sets)], pause[name])
                timings[name].times_us.append(device_us)
                timings[name].host_times_us.append(host_us)
        if self.cold:
            for name, timing in timings.items():
                if timing.median_us < least_us:
                    raise ImpossibleTime(
                        f"{name}: {timing.median_us:.2f} us, under the {least_us:.2f} us that its bytes take at the "
                        "theoretical bandwidth: work was skipped, or the cache was not cold"
                    )
        return timings

    def _once_cuda(self, call: Call, expected_host_us: float) -> tuple[float, float]:
        """Device and host microseconds of one call. The device is kept busy (flush, then a pause as long as the call takes
        on the host), so that everything is queued before the first event passes: no launch gaps are timed."""
        import torch

        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.cold:
            self._flush()
        torch.cuda._sleep(int(2000 * min(max(2 * expected_host_us, 20.0), 50_000.0)))  # cycles: about 2 GHz
        before.record()
        start = time.perf_counter()
        call()
        host_us = (time.perf_counter() - start) * 1e6
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3, host_us

    def _once_cpu(self, call: Call, expected_host_us: float) -> tuple[float, float]:
        start = time.perf_counter()
        call()
        us = (time.perf_counter() - start) * 1e6
        return us, us

    def _flush(self) -> None:
        import torch

        if self._buffer is None:
            size = 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._buffer = torch.ones(max(size, 2**26) // 4, dtype=torch.float32, device="cuda")
        self._buffer.sum()


def host_time_us(call: Call, calls: int = 300) -> float:
    """Median time that a call takes to return, in bursts short enough not to fill the device's queue."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for _ in range(20):
        call()
    times = []
    for _ in range(max(calls // 20, 3)):
        wait()
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20 * 1e6)
    wait()
    return statistics.median(times)

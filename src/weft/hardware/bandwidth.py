"""What every link of the machine gives: host to device, device to device by copy engine and by SM, latency, managed memory.

The method is nvbandwidth's: everything is queued behind a pause on the device, timed with events, the median of several.
Rates are bytes copied per second and direction, in GB/s (1e9).
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from weft.hardware import topology

SIZE = 256 << 20  # bytes of a copy: copy engines reach their rate at 256 MiB only
REPETITIONS = 5
PAUSE = 2_000_000  # cycles, about 1 ms
CHASE = 4096  # dependent loads
Say = Callable[[str], None]


def measure(*, size: int = SIZE, say: Say = lambda text: None) -> dict[str, Any]:
    """All that this machine can: ``records`` of ``test``, ``from``, ``to``, ``value``, ``unit``, and ``notes`` on what is not
    there or not as it should be."""
    records: list[dict[str, Any]] = []
    links = topology.read()
    notes = list(links.notes)

    def add(test: str, source: str, target: str, value: float, unit: str = "GB/s", **more: Any) -> None:
        records.append({"test": test, "from": source, "to": target, "value": value, "unit": unit, **more})
        say(f"{test} {source} -> {target}: {value:,.4g} {unit}")

    _host(add, size)
    try:
        import torch

        gpus = torch.cuda.device_count()
    except ModuleNotFoundError:
        gpus = 0
        notes.append("no PyTorch: pip install 'weft[gpu]'")
    if not gpus:
        notes.append(
            "no GPU that PyTorch sees: host-device, device-device, latency and managed memory are not measured"
        )
        return {"records": records, "notes": notes}
    for gpu in range(gpus):
        with torch.cuda.device(gpu):
            _host_device(add, gpu, size, links, notes)
            _within(add, gpu, size)
            _managed(add, gpu, size, notes)
    for a in range(gpus):
        for b in range(gpus):
            if a != b:
                _peers(add, a, b, size, links, notes)
    if gpus < 2:
        notes.append("one GPU: nothing to measure between devices")
    return {"records": records, "notes": notes}


def copy_gb_s(a: int, b: int, size: int = SIZE) -> float:
    """The rate of a copy from GPU ``a`` to GPU ``b`` by copy engine."""
    import torch

    source = torch.empty(size, dtype=torch.uint8, device=f"cuda:{a}")
    target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{b}")
    with torch.cuda.device(a):
        return size / _seconds(lambda: target.copy_(source, non_blocking=True)) / 1e9


# ---- timing


def _seconds(call: Callable[[], Any]) -> float:
    """Median seconds of a call that queues work on the current stream."""
    import torch

    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPETITIONS):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE)
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times)


def _copy_s(target: Any, source: Any) -> float:
    return _seconds(lambda: target.copy_(source, non_blocking=True))


def _both(first: Callable[[], Any], second: Callable[[], Any], other: int | None = None) -> float:
    """Median seconds until both of two calls are done. The second has streams of its own, on device ``other`` too: a copy
    between devices waits for the current streams of both."""
    import torch

    sides = ([torch.cuda.Stream(other)] if other is not None else []) + [torch.cuda.Stream()]

    def call() -> None:
        begin = torch.cuda.Event()
        begin.record()
        first()
        with contextlib.ExitStack() as streams:
            for side in sides:  # the last one entered is the current device's
                side.wait_event(begin)
                streams.enter_context(torch.cuda.stream(side))
            second()
            end = torch.cuda.Event()
            end.record()
        torch.cuda.current_stream().wait_event(end)

    return _seconds(call)


# ---- the host


def _host(add: Callable[..., None], size: int) -> None:
    """Memory copy of the host, one thread and all, and from each NUMA node by the processors of each."""
    try:
        import torch
    except ModuleNotFoundError:
        return

    def rate(threads: int) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            a, b = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
            times = []
            for _ in range(REPETITIONS):
                begin = time.perf_counter()
                b.copy_(a)
                times.append(time.perf_counter() - begin)
            return size / statistics.median(times) / 1e9
        finally:
            torch.set_num_threads(before)

    add("host copy, one thread", "host", "host", rate(1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1:
        add(f"host copy, {cores} threads", "host", "host", rate(cores))


def _numa_nodes() -> list[tuple[int, set[int]]]:
    """NUMA nodes with the processors of theirs that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = os.sched_getaffinity(0)
    found = [(node.index, _cpus(node.cpus) & mine) for node in topology.read_nodes()]
    return [(node, cpus) for node, cpus in found if cpus]


def _cpus(text: str) -> set[int]:
    """``0-3,8``: {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


@contextlib.contextmanager
def _on(cpus: set[int]) -> Iterator[None]:
    """Runs on these processors, so that memory is first touched there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- host and device


def _host_device(add: Callable[..., None], gpu: int, size: int, links: topology.Topology, notes: list[str]) -> None:
    import torch

    name = f"GPU{gpu}"
    device = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
    best = 0.0
    for kind in ("pageable", "pinned"):
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        up = size / _copy_s(device, host) / 1e9
        down = size / _copy_s(host, device) / 1e9
        add(f"host to device, {kind}", "host", name, up)
        add(f"device to host, {kind}", name, "host", down)
        best = max(up, down)
    back, up_host = (torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    other = torch.empty_like(device)
    both = _both(lambda: device.copy_(up_host, non_blocking=True), lambda: back.copy_(other, non_blocking=True))
    add("host and device, both directions, pinned", "host", name, 2 * size / both / 1e9)
    nodes = _numa_nodes()
    for node, cpus in nodes if len(nodes) > 1 else ():
        with _on(cpus):
            host = torch.zeros(size, dtype=torch.uint8).pin_memory()
        add(
            "host to device, pinned, by NUMA node", f"NUMA {node}", name,
            size / _copy_s(device, host) / 1e9,
        )  # fmt: skip
    small, tiny = torch.zeros(4, dtype=torch.uint8, pin_memory=True), device[:4]
    add("host to device, 4 bytes", "host", name, _seconds(lambda: tiny.copy_(small, non_blocking=True)) * 1e6, "us")
    known = next((g for g in links.gpus if g.index == gpu), None)
    if known and known.pcie_gb_s:
        share = best / known.pcie_gb_s
        text = f"GPU{gpu}: PCIe gen {known.pcie_most_generation} x{known.pcie_width} gives {known.pcie_gb_s:.1f} GB/s, pinned "
        text += f"copies reach {share:.0%} of it"
        notes.append(
            text if share > 0.7 else f"{text}: LOW (expected 75 % or more; NUMA, power saving, a shared bridge?)"
        )


def _within(add: Callable[..., None], gpu: int, size: int) -> None:
    import torch

    a = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
    b = torch.empty_like(a)
    name = f"GPU{gpu}"
    add("copy within the device, copy engine", name, name, size / _seconds(lambda: b.copy_(a)) / 1e9)
    add("latency of a load, SM", name, name, _chase_ns(a, gpu), "ns")


# ---- devices


def _peers(add: Callable[..., None], a: int, b: int, size: int, links: topology.Topology, notes: list[str]) -> None:
    """From ``a`` to ``b``: a write is queued on ``a``, a read on ``b``."""
    import torch

    names = f"GPU{a}", f"GPU{b}"
    source = torch.empty(size, dtype=torch.uint8, device=f"cuda:{a}")
    target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{b}")
    rate = copy_gb_s(a, b, size)  # switches peer access on, where there is any
    peer = torch.cuda.can_device_access_peer(a, b)
    add("device to device, copy engine", *names, rate, peer_access=peer)
    if a < b:
        with torch.cuda.device(a):
            back = torch.empty_like(source)
            other = torch.empty_like(target)
            both = _both(
                lambda: target.copy_(source, non_blocking=True), lambda: back.copy_(other, non_blocking=True), b
            )
        add("devices, both directions, copy engine", *names, 2 * size / both / 1e9)
    if not peer:
        notes.append(f"GPU{a} and GPU{b}: copies go through the host, no peer access; SM copies are not measured")
        return
    with torch.cuda.device(b):
        copy_gb_s(b, a, 1 << 20)  # peer access from b
        add("device to device, read by SM", *names, size / _seconds(lambda: _sm_copy(target, source)) / 1e9)
    with torch.cuda.device(a):
        add("device to device, write by SM", *names, size / _seconds(lambda: _sm_copy(target, source)) / 1e9)
        add("latency of a load, SM", names[1], names[0], _chase_ns(target, a), "ns")
    pair = links.pair(a, b)
    if pair and pair.gb_s and a < b:
        share = rate / pair.gb_s
        text = f"GPU{a} - GPU{b}: {pair.kind} gives {pair.gb_s:.0f} GB/s, a copy reaches {share:.0%} of it"
        notes.append(text if share > 0.7 else f"{text}: LOW (expected 75 % or more)")


def _sm_copy(target: Any, source: Any) -> None:
    """A copy by the SMs of the current device, 16 bytes an access."""
    import torch

    from weft.hardware.link_kernels import copy

    a, b = source.view(torch.int32), target.view(torch.int32)
    block = 4096
    copy[(min(-(-a.numel() // block), 4 * 132),)](a, b, a.numel(), block, num_warps=8)


def _chase_ns(x: Any, gpu: int) -> float:
    """Nanoseconds of one of a chain of dependent loads by GPU ``gpu`` from ``x``, wherever it is: a stride of 4 KiB + 128,
    so that no cache line is met twice."""
    import torch

    from weft.hardware.link_kernels import chase

    ints = x.view(torch.int32)
    stride = (4096 + 128) // 4
    steps = min(CHASE, ints.numel() // stride - 1)
    ints[: (steps + 1) * stride : stride] = torch.arange(1, steps + 2, device=x.device, dtype=torch.int32) * stride
    torch.cuda.synchronize(x.device)
    with torch.cuda.device(gpu):
        out = torch.zeros(1, dtype=torch.int32, device=f"cuda:{gpu}")

        def run(n: int) -> float:
            return _seconds(lambda: chase[(1,)](ints, out, n, num_warps=1))

        return (run(steps) - run(steps // 2)) / (steps - steps // 2) * 1e9


# ---- managed memory


class _Pointer:
    """Memory that PyTorch does not know, as Triton takes it."""

    def __init__(self, address: int, dtype: Any):
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def _managed(add: Callable[..., None], gpu: int, size: int, notes: list[str]) -> None:
    """Managed memory: first touch by the GPU of pages that are on the host, and prefetches. Never more than half of what is
    free: beyond that the driver pages, which measures a disk-like regime and can stall the machine."""
    import torch

    try:
        from cuda.bindings import runtime
    except ImportError:
        notes.append("managed memory is not measured: pip install cuda-bindings")
        return
    from weft.hardware.link_kernels import touch

    size = min(size, torch.cuda.mem_get_info(gpu)[0] // 2)
    code, address = runtime.cudaMallocManaged(size, runtime.cudaMemAttachGlobal)
    if int(code):
        notes.append(f"managed memory is not measured: {code}")
        return
    try:
        import ctypes

        name, stream = f"GPU{gpu}", torch.cuda.current_stream()
        pointer = _Pointer(address, torch.int32)

        def prefetch(to_host: bool) -> None:
            device = runtime.cudaCpuDeviceId if to_host else gpu
            try:
                kinds = runtime.cudaMemLocationType
                place = runtime.cudaMemLocation()
                place.type = kinds.cudaMemLocationTypeHost if to_host else kinds.cudaMemLocationTypeDevice
                place.id = 0 if to_host else gpu
                (code,) = runtime.cudaMemPrefetchAsync(address, size, place, 0, stream.cuda_stream)
            except (TypeError, AttributeError):  # CUDA 12's signature
                (code,) = runtime.cudaMemPrefetchAsync(address, size, int(device), stream.cuda_stream)
            if int(code):
                raise RuntimeError(f"cudaMemPrefetchAsync: {code}")

        def once(call: Callable[[], Any], before: Callable[[], Any]) -> float:
            times = []
            for _ in range(3):
                before()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                call()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            return size / statistics.median(times) / 1e9

        def touch_all() -> None:
            touch[(min(size // 4 // 1024, 1 << 14),)](pointer, size // 4, 1024, num_warps=4)

        ctypes.memset(address, 1, size)
        touch_all()  # compiles
        add(
            "managed memory, first touch by the GPU",
            "host",
            name,
            once(touch_all, lambda: ctypes.memset(address, 1, size)),
        )
        add(
            "managed memory, prefetch",
            "host",
            name,
            once(lambda: prefetch(False), lambda: ctypes.memset(address, 1, size)),
        )
        add("managed memory, prefetch", name, "host", once(lambda: prefetch(True), touch_all))
    except RuntimeError as error:
        notes.append(f"managed memory is not measured: {error}")
    finally:
        torch.cuda.synchronize()
        runtime.cudaFree(address)

"""Active checks: does a GPU copy, multiply and remember what it should, and are its links as fast as they were?

Answers are known exactly, so that one wrong bit is found: matrices of small integers whose every partial sum is exact in
the dtype, memory patterns, copies. A product C = AB is verified on the host by C·r = A·(B·r) with random integers r
(Freivalds, 1977): an error in one element of a row always shows, several of one row cancel with a chance below 1 in
65,000. Repetitions must then equal it bit for bit.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.hardware.health.event import pci_address

FLOOR = 0.8  # of the median of the machine's own earlier records
RECORDS = (3, 20)  # needed for a floor; looked at
CHUNK = 1 << 25  # words of 8 bytes that are compared at once
PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)  # 0x00…, 0xff…, 0x55…, 0xaa…
Fault = Callable[[str, Any], None]  # plants a fault into a named tensor: for tests of the checks themselves


@dataclass(frozen=True)
class Level:
    """Args:
    matrix: side of the square matrices.
    seconds: of repeated products, for each dtype.
    memory_share: of free memory that is swept; ``sweeps`` times.
    links: whether links are measured.
    """

    matrix: int
    seconds: float
    memory_share: float
    sweeps: int
    links: bool


LEVELS = {
    "quick": Level(2048, 0.5, 0.02, 1, False),
    "medium": Level(8192, 8.0, 0.9, 8, True),
    "long": Level(8192, 120.0, 0.95, 200, True),
}
STAND_IN = Level(128, 0.0, 0.0, 1, True)  # without a GPU: shows that the checks run


@dataclass(frozen=True)
class Result:
    """``passed`` is None where the check cannot tell; ``found`` says why, or what is wrong."""

    check: str
    gpu: str
    passed: bool | None
    found: str
    seconds: float


def run(level: str, device: str, gpu: str, records: Path | None = None, fault: Fault | None = None) -> Iterator[Result]:
    """Runs the checks of a level on one device, each result as it comes.

    Args:
        level: of :data:`LEVELS`.
        device: ``cuda:0`` …, or ``cpu`` for a small stand-in.
        gpu: how results name it.
        records: where link rates are stored, from which floors are taken.

    Raises:
        ValueError: unknown level.
        ImportError: no PyTorch.
    """
    if level not in LEVELS:
        raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
    import_torch()
    size = LEVELS[level] if device != "cpu" else STAND_IN
    plant = fault or (lambda name, tensor: None)
    checks: list[tuple[str, Callable[[], tuple[bool | None, str]]]] = [("copy", lambda: copy(device, plant))]
    for dtype in ("fp16", "bf16", "int8"):
        checks.append((f"matmul-{dtype}", lambda dtype=dtype: matmul(device, dtype, size, plant)))  # type: ignore[misc]
    checks.append(("memory", lambda: memory(device, size, plant)))
    if size.links:
        checks.append(("links", lambda: links(device, gpu, records)))
    for name, check in checks:
        began = time.perf_counter()
        try:
            passed, found = check()
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            # Memory that others use, or an operation that this device has not, is no fault; a CUDA error is one.
            lacking = "out of memory" in text.lower() or "not implemented" in text.lower()
            passed, found = (None if lacking or device == "cpu" else False), text
        yield Result(name, gpu, passed, found, time.perf_counter() - began)


def import_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ImportError("active checks need PyTorch: pip install 'weft[gpu]'") from error
    return torch


def copy(device: str, plant: Fault) -> tuple[bool, str]:
    """Host to device, within it and back: all bits must return."""
    import torch

    generator = torch.Generator().manual_seed(int(time.time()))
    words = (64 << 20) // 8 if device != "cpu" else 1 << 16
    sent = torch.randint(-(2**62), 2**62, (words,), dtype=torch.int64, generator=generator)
    there = sent.to(device, copy=True)
    plant("copy", there)
    returned = there.clone().to("cpu")
    wrong = torch.nonzero(returned != sent).flatten()
    if wrong.numel():
        at = int(wrong[0])
        bits = int(returned[at]) ^ int(sent[at])
        return False, f"{wrong.numel()} of {words} words changed; word {at} by {bits & (2**64 - 1):#x}"
    return True, f"{words * 8 / 2**20:g} MiB to the device and back"


def matmul(device: str, dtype: str, size: Level, plant: Fault) -> tuple[bool, str]:
    """A product with a known answer, again and again.

    fp16 and bf16: A [n, n] has 256 elements of ±1 in a row, B [n, n] is of ±1. So every partial sum, in whatever order and
    precision it is added, is an integer of at most 256, which bf16 (8 bits of significand) still has. int8: sums are int32.
    """
    import torch

    n = size.matrix
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    if dtype == "int8":
        a = torch.randint(-127, 128, (n, n), dtype=torch.int8, generator=generator)
        b = torch.randint(-127, 128, (n, n), dtype=torch.int8, generator=generator)
        multiply = torch._int_mm
    else:
        kind = torch.float16 if dtype == "fp16" else torch.bfloat16
        step = max(1, n // 256)
        signs = torch.randint(0, 2, (2, n, n), dtype=torch.int8, generator=generator) * 2 - 1
        phase = torch.randint(0, step, (n, 1), generator=generator)
        used = (torch.arange(n) + phase) % step == 0
        a, b = (signs[0] * used).to(kind), signs[1].to(kind)
        multiply = torch.mm
    x, y = a.to(device), b.to(device)
    first = multiply(x, y)
    plant(f"matmul-{dtype}", first)
    if wrong := _verify(a, b, first.cpu()):
        return False, wrong
    until = time.perf_counter() + size.seconds
    repetitions, different = 0, torch.zeros((), dtype=torch.int64, device=device)
    while repetitions == 0 or time.perf_counter() < until:
        for _ in range(20 if device != "cpu" else 1):
            again = multiply(x, y)
            plant(f"matmul-{dtype}-again", again)
            different += (again != first).sum()
            repetitions += 1
        if device != "cpu":
            torch.cuda.synchronize(device)
    if count := int(different):
        return False, f"{count} elements differed within {repetitions} repetitions of one product: silent corruption"
    if wrong := _verify(a, b, multiply(x, y).cpu()):
        return False, wrong
    return True, f"{repetitions + 2} products of {n} x {n} are exact"


def _verify(a: Any, b: Any, c: Any) -> str:
    """What is wrong with a product, on the host: all numbers are integers below 2⁵³, so float64 is exact."""
    import torch

    n = a.shape[0]
    r = torch.randint(1, 256, (n, 2), dtype=torch.int64).double()
    expected = _times(a, _times(b, r))
    rows = torch.nonzero((_times(c, r) != expected).any(1)).flatten()
    if not rows.numel():
        return ""
    row = int(rows[0])
    right = (a[row : row + 1].double() @ b.double()).flatten()
    columns = torch.nonzero(c[row].double() != right).flatten()
    if not columns.numel():
        return f"{rows.numel()} rows of a product differ from the host's"
    column = int(columns[0])
    got, want = float(c[row, column]), float(right[column])
    return f"{rows.numel()} rows of a product are wrong; element ({row}, {column}) is {got:g}, right is {want:g}"


def _times(matrix: Any, vectors: Any) -> Any:
    import torch

    return torch.cat([part.double() @ vectors for part in matrix.split(1024)])


def memory(device: str, size: Level, plant: Fault) -> tuple[bool, str]:
    """Writes patterns into the memory that is free, and reads all of it after all was written: constants, then each word's own
    address (a fault of an address line writes elsewhere) and its complement."""
    import torch

    if device == "cpu":
        total = 16 << 20
    else:
        total = int(torch.cuda.mem_get_info(device)[0] * size.memory_share) - (1 << 30)  # temporaries of the comparison
        total = max(total, 256 << 20)
    words = torch.empty(total // 8, dtype=torch.int64, device=device)
    parts = words.split(CHUNK)

    def addresses(index: int, key: int) -> Any:
        begin = index * CHUNK
        return torch.arange(begin, begin + parts[index].numel(), dtype=torch.int64, device=device) ^ key

    for sweep in range(size.sweeps):
        keys = [sweep * 0x9E3779B97F4A7C15 % 2**63, ~(sweep * 0x9E3779B97F4A7C15 % 2**63)]
        for pattern in PATTERNS:
            words.fill_(pattern)
            plant("memory", words)
            for index, part in enumerate(parts):
                if wrong := _wrong(part, pattern, index):
                    return False, wrong
        for key in keys:
            for index, part in enumerate(parts):
                part.copy_(addresses(index, key))
            plant("memory-addresses", words)
            for index, part in enumerate(parts):
                if wrong := _wrong(part, addresses(index, key), index):
                    return False, wrong
    return True, f"{total / 2**30:.3g} GiB, {size.sweeps} sweeps of {len(PATTERNS) + 2} patterns"


def _wrong(part: Any, pattern: Any, index: int) -> str:
    import torch

    different = part != pattern
    count = int(different.sum())
    if not count:
        return ""
    at = int(torch.nonzero(different).flatten()[0])
    want = pattern if isinstance(pattern, int) else int(pattern[at])
    bits = (int(part[at]) ^ want) & (2**64 - 1)
    return f"{count} words are wrong; at offset {(index * CHUNK + at) * 8:#x} the bits {bits:#x}"


# ---- links


def links(device: str, gpu: str, records: Path | None) -> tuple[bool | None, str]:
    """Rates of the links, against 80 % of the median of this machine's own records. Stores them."""
    rates = _rates(device)
    earlier = _read(records, gpu)
    slow, unknown, said = [], 0, []
    for name, rate in rates.items():
        known = earlier.get(name, [])[-RECORDS[1] :]
        said.append(f"{name} {rate:.1f} GB/s")
        if len(known) < RECORDS[0]:
            unknown += 1
        elif rate < FLOOR * statistics.median(known):
            slow.append(f"{name} {rate:.1f} GB/s, usual are {statistics.median(known):.1f}")
    if slow:  # what is slow is no record of how fast the link is
        return False, "; ".join(slow)
    if records:
        records.parent.mkdir(parents=True, exist_ok=True)
        with records.open("a") as file:
            for name, rate in rates.items():
                file.write(json.dumps({"gpu": gpu, "link": name, "gb_s": rate, "time": time.time()}) + "\n")
    if unknown and records:
        return True, f"{', '.join(said)}; recorded, judged after {RECORDS[0]} records"
    return True, ", ".join(said)


def _rates(device: str) -> dict[str, float]:
    import torch

    size = 256 << 20
    if device == "cpu":
        source = torch.ones(16 << 20, dtype=torch.uint8)
        return {"host copy": _rate(lambda: source.clone(), source.numel(), None)}
    there = torch.empty(size, dtype=torch.uint8, device=device)
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    index = torch.device(device).index or 0
    found = {
        "host to device": _rate(lambda: there.copy_(host, non_blocking=True), size, device),
        "device to host": _rate(lambda: host.copy_(there, non_blocking=True), size, device),
        "within the device": _rate(lambda: there.clone(), size, device),
    }
    for peer in range(torch.cuda.device_count()):
        if peer != index:
            from weft.hardware.bandwidth import copy_gb_s

            found[f"to GPU {peer}"] = copy_gb_s(index, peer)
    return found


def _rate(call: Callable[[], Any], size: int, device: str | None) -> float:
    import torch

    def wait() -> None:
        if device:
            torch.cuda.synchronize(device)

    call()
    times = []
    for _ in range(7):
        wait()
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
    return size / statistics.median(times) / 1e9


def _read(records: Path | None, gpu: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    if records and records.exists():
        for line in records.read_text().splitlines():
            try:
                row = json.loads(line)
                if row["gpu"] == gpu:
                    found.setdefault(row["link"], []).append(float(row["gb_s"]))
            except (ValueError, KeyError, TypeError):  # a line that a crash cut
                continue
    return found


# ---- which GPUs


def devices(wanted: list[str]) -> dict[str, str]:
    """PyTorch's devices by the name that results have: PCI address → ``cuda:0``. Without a GPU ``cpu`` alone.

    Args:
        wanted: indices or PCI addresses; all when empty.

    Raises:
        ValueError: one of them is not here.
    """
    torch = import_torch()
    here: dict[str, str] = {}
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        here[f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}"] = f"cuda:{index}"
    if not here:
        return {} if wanted else {"cpu": "cpu"}
    if not wanted:
        return here
    found = {}
    for name in wanted:
        address = pci_address(name) or next((a for a, d in here.items() if d == f"cuda:{name}"), "")
        if address not in here:
            raise ValueError(f"GPU {name} is not among those that PyTorch sees: {', '.join(here)}")
        found[address] = here[address]
    return found


def as_dict(result: Result) -> dict[str, Any]:
    return asdict(result)

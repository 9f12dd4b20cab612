"""Chrome traces as ``torch.profiler`` (Kineto) writes them, plain or gzipped.

Times there are decimal microseconds since boot or 1970. As binary floats they lose nanoseconds, and short kernels then get
negative times, so they are read as decimals and kept as integer nanoseconds.
"""

import gzip
import json
import os
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

from weft.profiling.trace import MemoryEvent, Span, Trace

MOST_BYTES = 2 * 2**30  # of a trace, unpacked: reading one takes about six times as much memory
MOST_US = 10**16  # of a time; 1970 is 2e15 µs ago
KINDS = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "memset",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "cpu_op": "op",
    "user_annotation": "annotation",
    "python_function": "python",
}
ON_DEVICE = ("kernel", "copy", "memset")


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no Chrome trace, is cut short, is too large, or holds nothing that takes time.
    """
    path = Path(path)
    return parse(load(path), path.name)


def load(path: Path) -> dict[str, Any]:
    """The JSON object of a trace, with decimals as :class:`decimal.Decimal`."""
    try:
        with open(path, "rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if gzipped else open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is cut short or no gzip file ({error}); copy or record it again") from None
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"{path} is larger than {MOST_BYTES >> 30} GiB unpacked; record fewer steps, or without stacks"
        )
    try:
        found = json.loads(data, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        at = (
            f"cut short or damaged at byte {error.pos:,} of {len(data):,}"
            if isinstance(error, json.JSONDecodeError)
            else error
        )
        raise ValueError(f"{path} is not the JSON of a trace: {at}; record it again") from None
    found = {"traceEvents": found} if isinstance(found, list) else found
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ValueError(f"{path} has no list 'traceEvents'; expected a Chrome trace as torch.profiler exports it")
    return found


def parse(data: dict[str, Any], source: str) -> Trace:
    """A loaded trace as a :class:`Trace`."""
    trace = Trace(source)
    properties = data.get("deviceProperties")
    if isinstance(properties, list) and properties and isinstance(properties[0], dict):
        trace.gpu = str(properties[0].get("name", ""))
    info = data.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    rank = data.get("rank") if rank is None else rank  # weft's own, before a process group exists
    trace.rank = rank if isinstance(rank, int) else None
    for event in data["traceEvents"]:
        if not isinstance(event, dict):
            trace.dropped["no object"] += 1
        elif event.get("ph") == "X":
            _span(event, trace)
        elif event.get("ph") == "i" and event.get("name") == "[memory]":
            _memory(event, trace)
    return trace.finish()


def nanoseconds(value: Any) -> int | None:
    """``1.25`` µs → 1250; None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)) or not -MOST_US < value < MOST_US:
        return None  # NaN compares False
    return round(value * 1000)


def _span(event: dict[str, Any], trace: Trace) -> None:
    kind = KINDS.get(str(event.get("cat", "")).lower())
    if kind is None:
        return
    start, length = nanoseconds(event.get("ts")), nanoseconds(event.get("dur"))
    name = event.get("name")
    for why, wrong in (
        ("without a name", not isinstance(name, str) or not name),
        ("without a start", start is None),
        ("without a duration", length is None),
        ("with a negative duration", length is not None and length < 0),
    ):
        if wrong:
            trace.dropped[why] += 1
            return
    assert start is not None and length is not None  # checked above
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    if "Sequence number" in args:
        args["Sequence number"] = _hashable(args["Sequence number"])
    on_device = kind in ON_DEVICE
    thread = (
        (args.get("device", event.get("pid")), args.get("stream", event.get("tid"))) if on_device else event.get("tid")
    )
    span = Span(str(name), kind, start, start + length, _hashable(thread), _hashable(args.get("correlation")), args)
    (trace.device if on_device else trace.host).append(span)


def _memory(event: dict[str, Any], trace: Trace) -> None:
    args = event.get("args")
    time = nanoseconds(event.get("ts"))
    size = args.get("Bytes") if isinstance(args, dict) else None
    if time is None or not isinstance(args, dict) or not isinstance(size, int):
        trace.dropped["memory without a time or size"] += 1
        return
    total, index = args.get("Total Allocated"), args.get("Device Id")
    device = f"cuda:{index}" if args.get("Device Type") == 1 else "cpu"
    address = args.get("Addr")
    trace.memory.append(
        MemoryEvent(
            time,
            size,
            address if isinstance(address, int) else 0,
            total if isinstance(total, int) and total >= 0 else None,
            device,
            _hashable(event.get("tid")),
        )
    )


def _hashable(value: Any) -> Any:
    return (
        tuple(map(_hashable, value))
        if isinstance(value, (tuple, list))
        else value
        if not isinstance(value, dict)
        else None
    )

"""Traces kept small enough for a viewer: Perfetto and Chrome give up on those of a gigabyte."""

import gzip
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from weft.profiling.trace import STEP


def write(data: dict[str, Any], path: Path, most_bytes: int) -> list[str]:
    """Writes a loaded trace so that its JSON has at most ``most_bytes``, gzipped if the path ends in ``.gz``.

    What is left out until it fits, in this order: Python functions, memory events, shapes and other arguments of CPU operators,
    steps after the first one, CPU operators, everything but metadata and the longest kernels.

    Returns:
        What was left out, in words.
    """
    events = [e for e in data["traceEvents"] if isinstance(e, dict)]
    left_out: list[str] = []
    texts = [_text(e) for e in events]
    for what, keep in _reductions(events):
        if sum(map(len, texts)) + 2 * len(texts) <= most_bytes - 4096:
            break
        kept = [(e, t) for e, t in zip(events, texts, strict=True) if keep(e)]
        if what == "arguments of operators":
            events = [e if e.get("cat") != "cpu_op" else {k: v for k, v in e.items() if k != "args"} for e in events]
            texts = [_text(e) for e in events]
        else:
            events, texts = [e for e, _ in kept], [t for _, t in kept]
        left_out.append(what)
    if (size := sum(map(len, texts)) + 2 * len(texts)) > most_bytes - 4096 and size:
        longest = sorted(range(len(events)), key=lambda i: -float(events[i].get("dur") or 0))
        room, chosen = most_bytes - 4096, set()
        for i in longest:
            room -= len(texts[i]) + 2
            if room < 0:
                break
            chosen.add(i)
        texts = [t for i, t in enumerate(texts) if i in chosen]
        left_out.append("all but the longest events")
    head = _text({k: v for k, v in data.items() if k != "traceEvents"})[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = head + (", " if len(head) > 1 else "") + '"traceEvents": [\n' + ",\n".join(texts) + "\n]}\n"
    path.write_bytes(gzip.compress(text.encode(), 6) if path.suffix == ".gz" else text.encode())
    return left_out


def _reductions(events: list[dict[str, Any]]) -> Iterator[tuple[str, Callable[[dict[str, Any]], bool]]]:
    yield "Python functions", lambda e: e.get("cat") != "python_function"
    yield "memory events", lambda e: e.get("name") != "[memory]"
    yield "arguments of operators", lambda e: True
    steps = [e for e in events if e.get("ph") == "X" and STEP.match(str(e.get("name")))]
    ends = sorted(float(e["ts"]) + float(e["dur"]) for e in steps if "ts" in e and "dur" in e)
    if len(ends) > 1:
        yield "steps after the first", lambda e: e.get("ph") == "M" or float(e.get("ts") or 0) <= ends[0]
    yield "operators", lambda e: e.get("cat") not in ("cpu_op", "fwdbwd", "ac2g")


def _text(value: Any) -> str:
    return json.dumps(value, default=_number)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else str(value)

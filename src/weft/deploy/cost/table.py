"""The report in a terminal, and the options of ``weft cost``."""

import re
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from weft.cluster.files.text import text_of
from weft.console import out, print_line
from weft.words import seconds


def is_json(path: Path) -> bool:
    return text_of(path).read(100).lstrip().startswith("{")


def span(since: str, until: str) -> tuple[float, float]:
    """Seconds since 1970 of two dates; ``since`` may be a time before ``until``, such as ``30d``.

    Raises:
        ValueError: neither a date nor a span of time; the end is not after the begin.
    """
    end = _date(until) if until else time.time()
    begin = _date(since) if re.match(r"\d{4}-", since) else end - seconds(since)
    if begin >= end:
        raise ValueError(f"--since {since} is not before --until {until or 'now'}")
    return begin, end


def _date(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"'{text}' is no date; expected one such as 2026-11-01 or 2026-11-01T12:00") from None
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()


def show(found: dict[str, Any], by: str) -> None:
    total, money = found["total"], found["currency"]
    if found["capacity_hours"] is not None:
        share = f" ({found['allocation']:.1%})" if found["allocation"] is not None else ""
        print_line(f"{found['capacity_hours']:,.1f} GPU hours were there, {total['gpu_hours']:,.1f} allocated{share}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(by)
    for head in ("jobs", "GPU hours", "used", f"cost {money}".strip(), "goodput", "badput by reason, GPU hours"):
        table.add_column(head, justify="left" if head.startswith("badput") else "right")
    for name, row in [*list(found[f"by_{by}"].items())[:50], ("all", total)]:
        reasons = ", ".join(f"{why} {hours:,.1f}" for why, hours in row["badput_hours"].items())
        used = "–" if row["used_hours"] is None else f"{row['used_hours']:,.1f}"
        good = "–" if row["goodput"] is None else f"{row['goodput']:.0%}"
        table.add_row(name, str(row["jobs"]), f"{row['gpu_hours']:,.1f}", used, f"{row['cost']:,.2f}", good, reasons)
    out.print(table)
    for note in found["notes"]:
        print_line(note)

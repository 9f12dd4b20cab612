"""What ``weft top`` shows, as tables that fit 80 columns: GPUs with their MIG devices, and the processes on them."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from weft.hardware.telemetry.nvml import Gpu, Mig, Process, Snapshot
from weft.hardware.telemetry.processes import Owner, owners

UNKNOWN = "–"
BAR = 8  # characters of a bar of utilisation
REASONS = {  # shorter than nvidia-smi's names, for a narrow column
    "gpu_idle": "idle",
    "applications_clocks_setting": "set clocks",
    "sw_power_cap": "power cap",
    "hw_slowdown": "hardware",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "heat",
    "hw_thermal_slowdown": "HEAT",
    "hw_power_brake_slowdown": "POWER BRAKE",
    "display_clock_setting": "display",
}
ORDERS: dict[str, Callable[[tuple[Gpu, Process]], Any]] = {
    "memory": lambda row: (-(row[1].memory_bytes or 0), row[1].pid),
    "GPU": lambda row: (row[0].index, -(row[1].memory_bytes or 0), row[1].pid),
    "SM": lambda row: (-(row[1].sm_util_percent or 0), row[1].pid),
}


@dataclass
class View:
    """A snapshot with the owners of its processes."""

    snapshot: Snapshot
    owners: dict[int, Owner] = field(default_factory=dict)

    @staticmethod
    def of(snapshot: Snapshot, known: dict[int, tuple[float, Owner]] | None = None) -> "View":
        pids = {p.pid for gpu in snapshot.gpus for p in gpu.processes}
        return View(snapshot, owners(pids, {} if known is None else known, time.monotonic()))

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``: NVML's fields with their units in their names, None with a reason in ``missing``."""
        found = asdict(self.snapshot)
        for gpu, values in zip(self.snapshot.gpus, found["gpus"], strict=True):
            values["throttle_reasons"] = gpu.throttle_reasons if gpu.throttle_bits is not None else None
            for process in values["processes"]:
                process |= asdict(self.owners.get(process["pid"], Owner()))
        return found


def head(view: View) -> Text:
    """What the machine has, and what is wrong with all of it."""
    s = view.snapshot
    if s.problem:
        return Text(s.problem, style="bold red")
    kinds = Counter(gpu.name for gpu in s.gpus if not gpu.problem)
    what = ", ".join(f"{n} × {name}" if n > 1 else name for name, n in kinds.items()) or "no GPU"
    if lost := len(s.gpus) - sum(kinds.values()):
        what += f", {lost} lost"
    return Text(f"{clean(what)}   driver {s.driver or UNKNOWN}, CUDA {s.cuda or UNKNOWN}   {time.strftime('%H:%M:%S')}")


def gpu_table(view: View) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expand=False)
    for name, right in [
        ("GPU", 0),
        ("use", 0),
        ("tensor", 1),
        ("memory, GiB", 1),
        ("power, W", 1),
        ("°C", 1),
        ("MHz", 1),
    ]:
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("slowed by", overflow="fold", min_width=9)
    for gpu in view.snapshot.gpus:
        if gpu.problem:
            table.add_row(str(gpu.index), *[""] * 6, Text(str(clean(gpu.problem)), style="bold red"))
            continue
        table.add_row(
            str(gpu.index),
            _bar(gpu.gpu_util_percent),
            _share(gpu.tensor_active),
            _memory(gpu),
            f"{_number(gpu.power_w)}/{_number(gpu.power_limit_w)}",
            _temperature(gpu),
            _number(gpu.sm_clock_mhz),
            _reasons(gpu),
        )
        for mig in gpu.mig:
            where = f"{gpu.index}/{'?' if mig.gpu_instance is None else mig.gpu_instance}"
            table.add_row(
                where,
                clean(mig.profile or "MIG"),
                _share(mig.tensor_active),
                _memory(mig),
                "",
                "",
                "",
                "",
                style="cyan",
            )
    return table


def process_table(view: View, order: str = "memory", most: int = 200) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expand=False)
    for name, right in [
        ("GPU", 0),
        ("PID", 1),
        ("user", 0),
        ("container", 0),
        ("job", 0),
        ("GiB", 1),
        ("SM %", 1),
        ("command", 0),
    ]:
        table.add_column(name, justify="right" if right else "left", no_wrap=True, max_width=15)
    rows = sorted(((gpu, p) for gpu in view.snapshot.gpus for p in gpu.processes), key=ORDERS[order])
    for gpu, p in rows[:most]:
        who = view.owners.get(p.pid, Owner())
        place = f"{gpu.index}" if p.gpu_instance is None else f"{gpu.index}/{p.gpu_instance}"
        memory = UNKNOWN if p.memory_bytes is None else f"{p.memory_bytes / 2**30:.1f}"
        names = [clean(text or UNKNOWN) for text in (who.user, who.container, who.job)]
        table.add_row(place, str(p.pid), *names, memory, _number(p.sm_util_percent), clean(who.command or UNKNOWN))
    if len(rows) > most:
        table.caption = f"{len(rows) - most} more"
    return table


def clean(text: str) -> Text:
    """Without control characters, and no markup: users choose these names."""
    return Text("".join(c if c.isprintable() else "?" for c in text))


def _bar(percent: int | None) -> Text:
    if percent is None:
        return Text(UNKNOWN)
    full = round(max(0, min(percent, 100)) / 100 * BAR)
    return Text(
        "█" * full + "░" * (BAR - full) + f"{percent:4d} %",
        style="green" if percent >= 50 else "yellow" if percent else "dim",
    )


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.0f} %"


def _memory(target: Gpu | Mig) -> str:
    if target.memory_used_bytes is None or target.memory_total_bytes is None:
        return UNKNOWN
    return f"{target.memory_used_bytes / 2**30:.1f}/{target.memory_total_bytes / 2**30:.1f}"


def _temperature(gpu: Gpu) -> Text:
    limit = gpu.temperature_slowdown_c
    hot = gpu.temperature_c is not None and limit is not None and gpu.temperature_c >= limit - 3
    return Text(_number(gpu.temperature_c), style="bold red" if hot else "")


def _reasons(gpu: Gpu) -> Text:
    if gpu.throttle_bits is None:
        return Text(UNKNOWN)
    words = ", ".join(REASONS[name] for name in gpu.throttle_reasons)
    return Text(words, style="bold yellow" if gpu.slowed else "dim")


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"

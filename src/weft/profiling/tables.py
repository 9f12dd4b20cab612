"""The tables of a profile."""

from dataclasses import asdict, dataclass, field
from typing import Any

from weft.profiling import memory
from weft.profiling.attribution import Work
from weft.profiling.trace import Trace


@dataclass
class Row:
    """An operator in one phase. Rates are those of the calls whose shapes were recorded and whose work is known."""

    operator: str
    phase: str
    module: str
    kernels: list[str]
    calls: int
    time_us: float
    share: float  # of the time of all rows
    dtype: str = ""
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    share_of_ceiling: float | None = None
    limit_name: str = ""


@dataclass
class Step:
    name: str
    wall_us: float
    busy_us: float  # some kernel or copy runs; on a CPU some operator
    idle_us: float
    kernels: int
    launches: int
    copy_us: float
    data_loader_us: float
    peak_bytes: int | None


@dataclass
class Copies:
    """Copies of one kind. ``exposed_us`` is the part under which no kernel ran."""

    kind: str  # HtoD, DtoH, DtoD, …
    host_memory: str  # pageable, pinned, or "" where neither side is the host
    count: int
    bytes: int
    time_us: float
    exposed_us: float
    bytes_per_s: float | None


@dataclass
class Idle:
    cause: str
    time_us: float
    gaps: int
    what: list[tuple[str, float]]  # the largest parts by name, in microseconds


@dataclass
class Profile:
    """What a trace says. Times are microseconds over the whole window: ``len(steps)`` steps, or all of it without any."""

    source: str
    device: str  # cuda or cpu
    gpu: str
    rank: int | None
    window_us: float
    busy_us: float
    launches: int
    rows: list[Row]
    steps: list[Step]
    idle: list[Idle]
    copies: list[Copies]
    memory: memory.Memory | None
    dropped: dict[str, int]
    ceilings: str  # which record they are from; "" where this card has none
    advice: list[Any] = field(default_factory=list)
    work: list[Work] = field(default_factory=list, repr=False)  # what the advice looks at
    trace: Trace | None = field(default=None, repr=False)

    @property
    def repeats(self) -> int:
        """Steps in the window: what a time is divided by to get that of a step."""
        return max(1, len(self.steps))

    def to_dict(self) -> dict[str, Any]:
        left_out = {"work", "trace", "memory", "advice", "rows", "steps", "idle", "copies"}
        found = {k: v for k, v in vars(self).items() if k not in left_out}
        for name in ("rows", "steps", "idle", "copies", "advice"):
            found[name] = [asdict(item) for item in getattr(self, name)]
        found["memory"] = asdict(self.memory) if self.memory else None
        return found

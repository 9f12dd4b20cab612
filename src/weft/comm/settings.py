"""What a run of ``weft comm`` measures: collectives, sizes, dtype, operator, and how calls are made."""

from collections.abc import Sequence
from dataclasses import dataclass, field

BACKENDS = ("nccl", "gloo", "mpi")
OPERATORS = ("sum", "prod", "min", "max", "avg")
MODES = {
    "stream": "one call after another, as programs do: in stream order on GPUs",
    "blocking": "the host waits for each call",
    "async": "four calls in flight, each on its own buffers",
    "graph": "calls captured in one CUDA graph",
}
PLACES = ("default", "in", "out")
ITEM_BYTES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
ALIASES = {
    "double": "fp64", "float64": "fp64", "float": "fp32", "float32": "fp32", "half": "fp16", "float16": "fp16",
    "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "int": "int32",
}  # fmt: skip
# The largest integer below which a dtype has every integer: sums up to it are exact in any order.
EXACT = {
    "fp64": 2**53, "fp32": 2**24, "fp16": 2**11, "bf16": 2**8, "fp8_e4m3": 2**4, "fp8_e5m2": 2**3,
    "int64": 2**62, "int32": 2**31 - 1, "int8": 2**7 - 1, "uint8": 2**8 - 1,
}  # fmt: skip


def sizes(least: int, most: int, factor: float) -> list[int]:
    """Bytes from ``least`` to ``most``, each ``factor`` times the last.

    Raises:
        ValueError: the factor is not above 1, or ``most`` is below ``least``.
    """
    if not factor > 1:
        raise ValueError(f"factor is {factor}; expected more than 1 (2 doubles the size)")
    if most < least:
        raise ValueError(f"max is {most} bytes, below min, {least}; expected min <= max")
    found: list[int] = []
    size = float(least)
    while size <= most * (1 + 1e-9):
        if not found or int(size) > found[-1]:
            found.append(int(size))
        size *= factor
    return found


@dataclass
class Settings:
    """One run. ``bytes`` are nccl-tests' sizes (of all_gather, reduce_scatter, gather, scatter and all_to_all the whole of
    the larger side). ``iterations`` 0 means as many as 0.3 s hold, between 10 and 500. ``subgroups`` of so many consecutive
    ranks run at once; 0 is one group of all."""

    collectives: Sequence[str] = ("all_reduce",)
    bytes: Sequence[int] = field(default_factory=list)
    dtype: str = "fp32"
    op: str = "sum"
    root: int = 0
    place: str = "default"
    mode: str = "stream"
    iterations: int = 0
    subgroups: int = 0
    registered: bool = False
    checked: bool = True
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        self.dtype = ALIASES.get(self.dtype, self.dtype)
        for name, known in (("dtype", ITEM_BYTES), ("op", OPERATORS), ("place", PLACES), ("mode", MODES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is '{getattr(self, name)}'; expected one of {', '.join(known)}")
        for name, least in (("root", 0), ("iterations", 0), ("subgroups", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline is {self.deadline_s} s; expected more than 0")

    def check_ranks(self, ranks: int) -> None:
        """Whether so many ranks can run it.

        Raises:
            ValueError: fewer than two ranks, no such root, or subgroups that do not divide them.
        """
        if ranks < 2:
            raise ValueError(f"{ranks} rank has no other to communicate with; expected 2 or more: --ranks 2, --gpus 2")
        if self.subgroups and (self.subgroups < 2 or ranks % self.subgroups):
            raise ValueError(f"subgroups is {self.subgroups}; expected a divisor of the {ranks} ranks, 2 or more")
        members = self.subgroups or ranks
        if self.root >= members:
            raise ValueError(f"root is {self.root}; expected a rank from 0 to {members - 1}")

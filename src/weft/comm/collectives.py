"""The collectives that ``weft comm`` measures: one entry each.

To add one, assign a :class:`Collective` in a file and name the file on the command line (``weft comm mine.py``), or add
an entry here. Sizes and factors are nccl-tests' (PERFORMANCE.md of NVIDIA/nccl-tests): algbw = bytes / time, and
busbw = algbw x factor is comparable with the rate of one link whatever the number of ranks.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.comm.settings import Settings
from weft.definition import UnknownName


@dataclass
class Buffers:
    """The flat input and output of one call, and its settings. ``n`` is the number of ranks in the group, ``rank`` this
    one's number there, ``part`` the elements that go to one rank."""

    inp: Any
    out: Any
    n: int
    rank: int
    part: int
    settings: Settings


# elements: (count of the whole, ranks, rank) -> elements of the input and of the output
Elements = Callable[[int, int, int], tuple[int, int]]
# expected: (buffers, index of an output element) -> (source rank or REDUCED, index there); None: nothing to check here
Expected = Callable[[Buffers, Any], tuple[Any, Any] | None]


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        call: makes the call on a :class:`weft.comm.group.Group`; ``wait=False`` returns a handle at once.
        factor: busbw / algbw for a number of ranks.
        split: the size is the whole of which each rank has or gets a part, so it is rounded to a multiple of the ranks.
        elements: of input and output.
        alias: the input and output in one buffer of an in-place call: ``same``, ``input in output`` (at the rank's
            part), ``output in input``, or empty where there is none.
        only_root: ``input`` or ``output`` where only the root has one.
    """

    name: str
    call: Callable[..., Any]
    factor: Callable[[int], float]
    expected: Expected
    elements: Elements = lambda count, n, rank: (count, count)
    split: bool = False
    reduces: bool = False
    rooted: bool = False
    alias: str = ""
    only_root: str = ""


REDUCED = -1  # as in values, which imports PyTorch


def _ring(n: int) -> float:
    return (n - 1) / n


def uneven(part: int, n: int) -> list[list[int]]:
    """Elements from rank (row) to rank (column): a quarter less than ``part`` to itself, a quarter more to the next, and so
    on by pairs. Rows and columns add up to ``part * n``."""
    quarter = part // 4

    def more(k: int) -> int:
        return quarter if k % 2 else -quarter if k + 1 < n else 0

    return [[part + more((s - r) % n) for s in range(n)] for r in range(n)]


def _uneven_rows(part: int, n: int, rank: int) -> tuple[list[int], list[int]]:
    """What a rank sends to each rank, and what it receives from each."""
    table = uneven(part, n)
    return table[rank], [row[rank] for row in table]


def _uneven_expected(b: Buffers, j: Any) -> tuple[Any, Any]:
    import torch

    table = uneven(b.part, b.n)
    received = torch.tensor([row[b.rank] for row in table], device=j.device)
    ends = received.cumsum(0)
    source = torch.searchsorted(ends, j, right=True)
    starts = torch.tensor([sum(row[: b.rank]) for row in table], device=j.device)  # where my part begins at each source
    return source, starts[source] + j - (ends - received)[source]


def _pairs(b: Buffers, g: Any) -> tuple[list[tuple[Any, int]], list[tuple[Any, int]]]:
    """Sends and receives of even ranks to the next odd one."""
    if b.rank % 2:
        return [], [(b.out, b.rank - 1)]
    return ([(b.inp, b.rank + 1)], []) if b.rank + 1 < b.n else ([], [])


ENTRIES = (
    Collective(
        "all_reduce", lambda g, b, **how: g.all_reduce(b.out, b.inp, b.settings.op, **how),
        lambda n: 2 * (n - 1) / n, lambda b, j: (REDUCED, j), reduces=True, alias="same",
    ),
    Collective(
        "all_gather", lambda g, b, **how: g.all_gather(b.out, b.inp, **how),
        _ring, lambda b, j: (j // b.part, j % b.part), lambda c, n, r: (c // n, c), split=True, alias="input in output",
    ),
    Collective(
        "reduce_scatter", lambda g, b, **how: g.reduce_scatter(b.out, b.inp, b.settings.op, **how),
        _ring, lambda b, j: (REDUCED, b.rank * b.part + j), lambda c, n, r: (c, c // n), split=True, reduces=True,
        alias="output in input",
    ),
    Collective(
        "broadcast", lambda g, b, **how: g.broadcast(b.out, b.inp, b.settings.root, **how),
        lambda n: 1.0, lambda b, j: (b.settings.root, j), rooted=True, alias="same",
    ),
    Collective(
        "reduce", lambda g, b, **how: g.reduce(b.out, b.inp, b.settings.op, b.settings.root, **how),
        lambda n: 1.0, lambda b, j: (REDUCED, j) if b.rank == b.settings.root else None, reduces=True, rooted=True,
        alias="same",
    ),
    Collective(
        "gather", lambda g, b, **how: g.gather(b.out, b.inp, b.settings.root, **how),
        _ring, lambda b, j: (j // b.part, j % b.part) if b.rank == b.settings.root else None,
        lambda c, n, r: (c // n, c), split=True, rooted=True, only_root="output",
    ),
    Collective(
        "scatter", lambda g, b, **how: g.scatter(b.out, b.inp, b.settings.root, **how),
        _ring, lambda b, j: (b.settings.root, b.rank * b.part + j), lambda c, n, r: (c, c // n), split=True, rooted=True,
        only_root="input",
    ),
    Collective(
        "all_to_all", lambda g, b, **how: g.all_to_all(b.out, b.inp, **how),
        _ring, lambda b, j: (j // b.part, b.rank * b.part + j % b.part), split=True,
    ),
    Collective(
        "all_to_all_uneven",
        lambda g, b, **how: g.all_to_all(b.out, b.inp, *_uneven_rows(b.part, b.n, b.rank), **how),
        lambda n: (n - 0.75) / n, _uneven_expected,
        lambda c, n, r: tuple(map(sum, _uneven_rows(c // n, n, r))), split=True,  # type: ignore[arg-type,return-value]
    ),
    Collective(
        "send_recv", lambda g, b, **how: g.exchange(*_pairs(b, g), **how),
        lambda n: 1.0, lambda b, j: (b.rank - 1, j) if b.rank % 2 else None,
    ),
    Collective(
        "ring_shift",
        lambda g, b, **how: g.exchange([(b.inp, (b.rank + 1) % b.n)], [(b.out, (b.rank - 1) % b.n)], **how),
        lambda n: 1.0, lambda b, j: ((b.rank - 1) % b.n, j),
    ),
    Collective(
        "barrier", lambda g, b, **how: g.barrier(**how), lambda n: 0.0, lambda b, j: None, lambda c, n, r: (0, 0),
    ),
)  # fmt: skip
COLLECTIVES = {entry.name: entry for entry in ENTRIES}


def find(names: list[str]) -> list[Collective]:
    """The collectives of these names, and those that files (``mine.py``) assign; all where no name is given.

    Raises:
        UnknownName, FileNotFoundError, ValueError: no such name or file, or a file that assigns none.
    """
    found: list[Collective] = []
    for name in names or list(COLLECTIVES):
        if name.endswith(".py"):
            found += _of_file(Path(name))
        elif name in COLLECTIVES:
            found.append(COLLECTIVES[name])
        else:
            raise UnknownName("collective", name, list(COLLECTIVES))
    return found


def _of_file(path: Path) -> list[Collective]:
    if not path.is_file():
        raise FileNotFoundError(f"no file '{path}' with a Collective")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    found = [value for value in vars(module).values() if isinstance(value, Collective)]
    if not found:
        raise ValueError(f"{path} assigns no weft.comm.Collective")
    return found

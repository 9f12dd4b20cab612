"""What every loop works on: the cluster's state, and the jobs with their classes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine import allocate, index
from weft.cluster.engine import node as engine
from weft.cluster.engine import tree as trees
from weft.cluster.engine.compiled import address_of
from weft.cluster.engine.queues import COMPLETED, COMPLETION, JOB, PROGRESS
from weft.cluster.model import MOST_SHARED, WHOLE, Cluster, Jobs
from weft.cluster.placement import TIE_RULES, TIGHTEST, Placement, first_random_state
from weft.cluster.placements import PLACEMENTS
from weft.cluster.result import REASONS

__all__ = ["COMPLETED", "JOB", "Advance", "Tables", "state", "table_of", "unschedulable"]

PLAIN = "--plain runs it as it is, in plain Python (simulate(…, plain=True))"
Advance = Callable[[int], int]  # runs up to so many event times; says whether anything is left to happen


def state(
    jobs: Jobs,
    cluster: Cluster,
    pieces: NDArray[Any],
    classes: NDArray[Any],
    members: NDArray[np.int64],
    placing: Placement,
    ties: str,
    seed: int,
    detailed: bool,
) -> engine.State:
    """The engine's nodes, and their index, to be built when it is first asked (index.py); ``where`` and ``on`` hold one
    job."""
    count = len(cluster)
    nodes = np.zeros(count, engine.NODE)
    for name in ("gpus", "gpu_type", "gpu_memory", "cpu", "memory"):
        nodes[name] = getattr(cluster, name)
    for name in ("gpus", "cpu", "memory"):
        nodes[f"free_{name}"] = nodes[name]
    nodes["groups"] = members
    nodes["note"] = np.nan
    _number_racks(nodes, cluster)
    nodes["milli"] = np.where(np.arange(MOST_SHARED) < nodes["gpus"][:, None], WHOLE, 0)
    free = np.array(
        [nodes["gpus"][members >> g & 1 > 0].sum() * WHOLE for g in range(int(members.max(initial=0)).bit_length())]
    )
    levels, width = [0], count
    while True:
        padded = 1 if width == 1 and len(levels) > 1 else -(-width // trees.FAN) * trees.FAN
        levels.append(levels[-1] + padded)
        if padded == 1:
            break
        width = padded // trees.FAN
    meta = np.zeros(engine.META, np.int64)
    context = placing.context(jobs, cluster)
    meta[engine.PLACEMENT], meta[engine.GPU_CODE] = _codes(placing, context)
    meta[engine.TIES] = TIE_RULES.index(ties)
    meta[engine.RANDOM_STATE], meta[engine.DETAILED] = first_random_state(seed), detailed
    rules = {TIGHTEST: engine.BY_TIGHTNESS, "random": engine.BY_CHANCE}
    meta[engine.TOPOLOGY], meta[engine.RACKS] = placing.topology, len(np.unique(cluster.rack))
    meta[engine.GPU_RULE] = rules.get(placing.gpu, engine.BY_SCORE)
    log = np.zeros(1 << max(10, (count - 1).bit_length()), np.int32)
    simple = not detailed and not placing.topology and ties != "random"
    if simple and (found := index.bucket_order(placing.score, context, pieces, nodes)):
        ways, bucket_of, meta[engine.BUCKETS] = found
        best = index.empty_buckets(bucket_of, int(meta[engine.BUCKETS]), levels[-1], pieces)
        meta[engine.FEWEST], meta[engine.READ] = pieces["gpus"].min(), -1
    else:
        best = np.full((len(pieces), levels[-1]), trees.NEVER)
        ways = np.ones((len(pieces), levels[-1] if ties == "random" else 1), np.int32)
    where, on = np.zeros((2, int(classes["count"].max(initial=0)) + 1), np.int32)
    return engine.State(
        nodes,
        pieces,
        classes,
        best,
        ways,
        np.array(levels, np.int64),
        log,
        meta,
        context,
        free.astype(np.int64),
        where,
        on,
    )


def _codes(placing: Placement, context: NDArray[Any]) -> tuple[int, int]:
    """What the engine knows a placement's score by, and its choice of a GPU: its number, or a user's addresses."""
    if placing in PLACEMENTS.values():
        return (list(PLACEMENTS.values()).index(placing),) * 2
    of = engine.PIECE, engine.NODE, context
    try:
        if placing.gpu in (TIGHTEST, "random"):
            return (address_of(placing.score, "", *of, finite=True),) * 2
        return address_of(placing.score, "[0]", *of, finite=True), address_of(placing.score, "[1]", *of)
    except ValueError as error:
        raise ValueError(f"placement '{placing.name}': score: {error}; {PLAIN}") from error


def _number_racks(nodes: NDArray[Any], cluster: Cluster) -> None:
    """Racks by number, and their domains in that order."""
    order = np.lexsort((cluster.domain, cluster.rack))
    nodes["member"] = order
    for name, number in (("rack", cluster.rack[order]), ("domain", cluster.domain[order])):
        begins = np.flatnonzero(np.diff(number, prepend=-1))
        nodes[f"{name}_end"][: len(begins)] = np.append(begins[1:], len(nodes))
        nodes[name][order] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(nodes)))
        nodes[f"{name}_free"][: len(begins)] = np.bincount(nodes[name], cluster.gpus * WHOLE)


def unschedulable(s: engine.State) -> list[int]:
    """Classes that an empty cluster could not run."""
    random = s.meta[engine.RANDOM_STATE]
    found = []
    for c in range(len(s.classes)):
        if allocate.place(s, c, 0):
            allocate.give_back(s, c, 0)
        else:
            found.append(c)
    s.meta[engine.RANDOM_STATE] = random
    return found


@dataclass
class Tables:
    """What every loop works on.

    Args:
        state: of :func:`state`, with ``where`` and ``on`` for all jobs.
        jobs: the engine's jobs.
        of_rank: the job of each rank.
        running: the heap of completions.
        progress: counters.
        total, waits: seconds that each class, and each job, has waited for each of REASONS.
        until: seconds; nothing later happens.
    """

    state: engine.State
    jobs: NDArray[Any]
    of_rank: NDArray[np.int32]
    running: NDArray[Any]
    progress: NDArray[np.int64]
    total: NDArray[np.float64]
    waits: NDArray[np.float64]
    until: float

    @classmethod
    def of(
        cls,
        state: engine.State,
        jobs: NDArray[Any],
        of_rank: NDArray[np.int32],
        detailed: bool,
        until: float,
        spare: int,
    ) -> "Tables":
        """For the jobs of :func:`table_of`; ``spare``: so many entries of ``where`` more."""
        classes = state.classes
        pieces = int((classes["count"] + (classes["rest"] >= 0))[jobs["cls"]].sum())
        where, on = np.full(pieces + spare, -1, np.int32), np.zeros(pieces if detailed else 0, np.int32)
        total, waits = (np.zeros((count, len(REASONS))) for count in (len(classes), len(jobs)))
        running, progress = np.zeros(len(jobs), COMPLETION), np.zeros(PROGRESS, np.int64)
        return cls(state._replace(where=where, on=on), jobs, of_rank, running, progress, total, waits, until)


def table_of(
    jobs: Jobs, rows: NDArray[Any], cls: NDArray[Any], classes: NDArray[Any], ranks: NDArray[Any], row: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The engine's jobs, of dtype ``row``, and the job of each rank. Sets each class's part of the heap."""
    table = np.zeros(len(rows), row)
    for name in ("submit", "duration", "estimate"):
        table[name] = getattr(jobs, name)[rows]
    table["start"], table["begins"], table["cls"] = np.nan, np.nan, cls[rows]
    of_rank = np.argsort(ranks).astype(np.int32)
    table["rank"][of_rank] = np.arange(len(rows), dtype=np.int32)
    pieces = (classes["count"] + (classes["rest"] >= 0))[table["cls"]]
    table["slot"] = np.cumsum(pieces) - pieces
    classes["jobs"] = np.bincount(table["cls"], minlength=len(classes))
    classes["first"] = classes["begin"] = np.cumsum(classes["jobs"]) - classes["jobs"]
    return table, of_rank

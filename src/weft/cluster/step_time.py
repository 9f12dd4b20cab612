"""How long a step of data-parallel training takes on so many GPUs and nodes, by measured links (``weft comm --save``).

A collective that was measured on m ranks takes on n, by the ring's costs: each rank moves f(n) times the size, where f is
2 (n - 1)/n of an all-reduce and (n - 1)/n of an all-gather and a reduce-scatter, in s(n) rounds, one a rank but the own (of
an all-reduce two). So the curve is read at size x f(n)/f(m), and its latency is taken s(n)/s(m) times.

Over several nodes an all-reduce is a reduce-scatter in each node, an all-reduce of its part between nodes and an all-gather in
each node; the link between nodes is that of a GPU's own card. Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH".
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.alpha_beta import LEAST_POINTS, AlphaBeta, fit
from weft.cluster.files.text import TraceError, text_of

BUCKET = 25 << 20  # bytes of gradients that are sent together: PyTorch's DDP
BACKWARD = 2 / 3  # of a step's computation, behind which communication hides
NEEDED = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Link:
    """The collectives that were measured on ``ranks`` ranks, by name."""

    ranks: int
    models: dict[str, AlphaBeta]

    @classmethod
    def read(cls, path: Path) -> "Link":
        """From a file of ``weft comm --save`` (comm.jsonl: each collective's newest run with the most ranks) or ``--json``.

        Raises:
            TraceError: no records, or not of all of :data:`NEEDED` at three sizes or more on the same number of ranks.
        """
        points: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
        for record in _records(path):
            try:
                size, ranks, time_us = int(record["bytes"]), int(record["ranks"]), float(record["p50_us"])
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise TraceError(f"{path}: a record without {error}; expected what weft comm writes") from None
            if size > 0 and ranks > 1 and record.get("mode", "stream") == "stream" and not record.get("subgroups"):
                points[ranks, str(record.get("collective"))][size] = time_us  # later lines are newer
        whole = [n for n, _ in points if all(len(points.get((n, name), ())) >= LEAST_POINTS for name in NEEDED)]
        if not whole:
            raise TraceError(
                f"{path}: no records of {', '.join(NEEDED)} at {LEAST_POINTS} sizes or more on one number of ranks; "
                "expected what 'weft comm --save' or '--json' writes"
            )
        n = max(whole)
        try:
            return cls(n, {name: fit(list(points[n, name]), list(points[n, name].values())) for name in NEEDED})
        except ValueError as error:
            raise TraceError(f"{path}: {error}") from None

    def time_us(self, collective: str, size: float, ranks: int) -> float:
        """Microseconds of a collective of so many bytes (all_gather and reduce_scatter: of the whole)."""
        if ranks < 2 or size <= 0:
            return 0.0
        model, twice = self.models[collective], 2 if collective == "all_reduce" else 1

        def share(n: int) -> float:
            return twice * (n - 1) / n

        more_rounds = (ranks - 1) / (self.ranks - 1) - 1
        return model.predict(size * share(ranks) / share(self.ranks)) + model.alpha_us * more_rounds


def _records(path: Path) -> list[dict[str, Any]]:
    text = text_of(path).read()
    try:
        found = [json.loads(text)]
    except ValueError:  # a record a line
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}: no JSON: {error}; expected what weft comm writes") from None
    if len(found) == 1 and isinstance(found[0], dict) and isinstance(found[0].get("records"), list):
        found = found[0]["records"]
    return [record for record in found if isinstance(record, dict) and "about" not in record]


def all_reduce_us(size: float, gpus: int, node_gpus: int, within: Link, between: Link | None) -> float:
    """Microseconds of an all-reduce of so many bytes over GPUs that fill nodes of ``node_gpus``.

    Raises:
        ValueError: several nodes, and no link between them.
    """
    nodes = -(-gpus // node_gpus)
    if nodes == 1:
        return within.time_us("all_reduce", size, gpus)
    if between is None:
        raise ValueError(
            f"{gpus} GPUs are {nodes} nodes of {node_gpus}; expected a record of the link between nodes too"
        )
    in_node = min(node_gpus, -(-gpus // nodes))
    parts = sum(within.time_us(name, size, in_node) for name in ("reduce_scatter", "all_gather"))
    return parts + between.time_us("all_reduce", size / in_node, nodes)


def step_ms(
    compute_ms: float, gradient_bytes: float, gpus: int, node_gpus: int, within: Link, between: Link | None = None
) -> float:
    """Milliseconds of a step: what is computed, and of the buckets' all-reduces what backward does not hide, the last
    bucket's always among it."""
    buckets = gradient_bytes / BUCKET
    last = all_reduce_us(min(gradient_bytes, BUCKET), gpus, node_gpus, within, between) / 1e3
    before = max(buckets - 1, 0.0) * last
    return compute_ms + max(before - BACKWARD * compute_ms, 0.0) + last

"""``weft bench --random``: public functions at random shapes, dtypes and layouts, against the best peer.

Every operator has the same weight. Its options are those of one of its bench workloads; its sizes are drawn:

- rows x columns: columns log-uniform from 128 to 60,000, half of them multiples of 8; as many rows as give about 0.25 GiB;
- products: M, N and K log-uniform from 64 to 9,000, half of the products with all three multiples of 8;
- other axes above 256: log-uniform from an eighth of the bench workload's size up to that size.

A quarter of the points has views that are no contiguous aligned memory, where the operator knows such layouts.
"""

import contextlib
import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from weft import registry
from weft.definition import PUBLIC, Operator, Workload
from weft.records import RANDOM, Measurement

PEERS = ("torch", "torch.compile")
LEVEL = 0.97  # from this ratio to the best peer on a point counts as level or ahead; below, it is timed twice more
WIDTHS, SIZES = (128, 60_000), (64, 9_000)
BYTES, FLOPS = 2**28, 2e12  # that a point moves or computes, about
VIEWS = ("unaligned", "sliced", "strided", "transposed")
TRIES = 50

Point = tuple[Operator, Workload, str]


def takes_part(op: Operator) -> bool:
    """Whether an operator has a public function and peers; patterns whose time a model predicts measure the machine."""
    return op.public is not None and op.predicted is None and any(name in op.implementations for name in PEERS)


def draw(
    operators: Iterable[Operator], count: int, seed: int, dtypes: Sequence[str] = (), directions: Sequence[str] = ()
) -> list[Point]:
    """Random points, the same for the same seed and operators.

    Args:
        operators: of which those that take part are drawn from.
        count: how many points.
        dtypes, directions: drawn from these; all when empty.

    Raises:
        ValueError: no operator takes part, or none of the dtypes or directions fits.
    """
    g = random.Random(seed)
    able = [op for op in operators if takes_part(op)]
    able = [op for op in able if set(dtypes or op.dtypes) & set(op.dtypes)]
    able = [op for op in able if set(directions or op.directions) & set(op.directions)]
    if not able:
        raise ValueError("no operator with a public function and a peer is among those named")
    points: list[Point] = []
    while len(points) < count:
        g.shuffle(able)
        for op in able[: count - len(points)]:
            dtype = g.choice([d for d in op.dtypes if not dtypes or d in dtypes])
            direction = g.choice([d for d in op.directions if not directions or d in directions])
            points.append((op, point_of(op, dtype, g), direction))
    return points


def point_of(op: Operator, dtype: str, g: random.Random) -> Workload:
    """A random workload that the operator's inputs can be made for.

    Raises:
        ValueError: none of many draws can be.
    """
    templates = [w for w in op.workloads["bench"] if w.dtype in ("", dtype)] or list(op.workloads["bench"])
    refused = ""
    for step, bare in (
        (1, False),
        (128, False),
        (1, True),
    ):  # a format of blocks; options of which one may fix the sizes
        for _ in range(TRIES):
            try:
                template = g.choice(templates)
                w = drawn(op, dataclasses.replace(template, options={}) if bare else template, dtype, g, step)
                op.inputs(w, None, "meta")
            except (ValueError, RuntimeError, IndexError) as error:  # sizes that do not go together
                refused = str(error)
                continue
            return w
    raise ValueError(f"{op.name} takes none of {3 * TRIES} random workloads: {refused}")


def drawn(op: Operator, template: Workload, dtype: str, g: random.Random, step: int) -> Workload:
    """A workload with the template's options and random sizes and layout; sizes are multiples of ``step``."""
    options = {name: value for name, value in template.options.items() if name not in ("rows", "layout")}
    views = [v for v in VIEWS if v in op.options.get("layout", ())]
    if views and g.random() < 0.25:
        options["layout"] = g.choice(views)
    elif "layout" in template.options:
        options["layout"] = template.options["layout"]

    def sized(axes: dict[str, int], **more: Any) -> Workload:
        return Workload(axes, dtype, options | more)

    names = set(template.axes)
    step = max(step, 8 if g.random() < 0.5 else 1)
    if {"M", "N", "K"} <= names:
        axes = dict(template.axes) | {axis: log_uniform(g, *SIZES, step) for axis in "MNK"}
        return fitted(
            op, lambda first: sized(axes | first), "B" if "B" in axes else "M", axes, 1 if "B" in axes else step
        )
    width = log_uniform(g, *WIDTHS, step)
    if names == {"M", "N"}:
        axes = {"M": 2**30, "N": width}
        return fitted(op, lambda first: sized(axes | first), "M", axes)
    if names == {"N"} and "rows" in op.options:
        return fitted(op, lambda rows: sized({"N": rows["N"] * width}, rows=rows["N"]), "N", {"N": 2**30 // width})
    axes = {a: n if n <= 256 else log_uniform(g, max(n // 8, 1), n, step) for a, n in template.axes.items()}
    first = max(axes, key=lambda a: axes[a])
    return fitted(op, lambda changed: sized(axes | changed), first, axes, step)


def log_uniform(g: random.Random, least: int, most: int, step: int) -> int:
    """A size that ``step`` divides, where such a one is within the range."""
    n = round(math.exp(g.uniform(math.log(least), math.log(most))))
    return max(n // step * step, min(step, most))


def fitted(
    op: Operator, make: Callable[[dict[str, int]], Workload], axis: str, axes: dict[str, int], step: int = 1
) -> Workload:
    """The workload whose ``axis``, a multiple of ``step``, is as large as the bytes and operations of a point allow, at most
    what ``axes`` has."""
    step = min(step, axes[axis])
    low, high = 1, axes[axis] // step
    while low < high:
        middle = (low + high + 1) // 2
        cost = op.cost(make({axis: middle * step}), "forward")
        if cost.bytes_moved <= BYTES and cost.flops <= FLOPS:
            low = middle
        else:
            high = middle - 1
    return make({axis: low * step})


# ---- measuring -------------------------------------------------------------------------------------------------------


def chosen(operators: Iterable[Operator]) -> dict[str, list[Any]]:
    """The public function and the peers of each operator, by its name."""
    return {
        op.name: [op.find(name) for name in (PUBLIC, *PEERS) if name == PUBLIC or name in op.implementations]
        for op in operators
        if takes_part(op)
    }


def medians(timed: Sequence[Measurement], seed: int, count: int) -> Measurement:
    """Of several measurements of one point the one with the median ratio, as a record of a random point."""
    ordered = sorted(timed, key=lambda m: m.ratio_to_best_peer or 0.0)
    m = ordered[len(ordered) // 2]
    return dataclasses.replace(
        m, metric=RANDOM, details={**m.details, "seed": seed, "count": count, "times": len(ordered)}
    )


def measure(points: Sequence[Point], seed: int, time: Callable[[Sequence[Point]], Iterator[Any]]) -> list[Measurement]:
    """The record of the public function at each point; a point below ``LEVEL`` is timed twice more. Ctrl-C keeps what was
    measured.

    Args:
        time: measures points and yields the records of each, in any order.
    """
    found: dict[tuple[str, str, str, str], list[Measurement]] = {}
    with contextlib.suppress(KeyboardInterrupt):
        for again in range(3):
            some = [p for p in points if again == 0 or _behind(found.get(key_of(p), []))]
            for rows in time(some) if some else ():
                for m in rows:
                    if m.implementation == PUBLIC and m.ratio_to_best_peer is not None:
                        found.setdefault((m.operator, m.workload, m.dtype, m.direction), []).append(m)
    return [medians(timed, seed, len(points)) for timed in found.values()]


def key_of(point: Point) -> tuple[str, str, str, str]:
    op, w, direction = point
    return op.name, str(w), w.dtype, direction


def _behind(timed: Sequence[Measurement]) -> bool:
    return bool(timed) and (timed[0].ratio_to_best_peer or 0.0) < LEVEL


# ---- what it says ----------------------------------------------------------------------------------------------------


def distribution(measured: Sequence[Measurement]) -> dict[str, Any]:
    """Points, the share that is level or ahead, geometric mean, median and least of the ratios to the best peer."""
    ratios = [m.ratio_to_best_peer for m in measured if m.ratio_to_best_peer]
    return {
        "points": len(ratios),
        "level_or_ahead": sum(r >= LEVEL for r in ratios) / len(ratios),
        "geometric_mean": statistics.geometric_mean(ratios),
        "median": statistics.median(ratios),
        "least": min(ratios),
        "host_us": statistics.median(m.host_us or 0.0 for m in measured),
    }


def by_family(measured: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    families: dict[str, list[Measurement]] = {}
    for m in sorted(measured, key=lambda m: registry.family(m.operator)):
        families.setdefault(registry.family(m.operator), []).append(m)
    return families


def worst(measured: Iterable[Measurement], count: int = 10) -> list[Measurement]:
    return sorted(measured, key=lambda m: m.ratio_to_best_peer or 0.0)[:count]

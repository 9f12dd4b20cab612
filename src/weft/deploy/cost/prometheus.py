"""What the exporter has measured, from Prometheus: an address, or a saved answer of ``/api/v1/query_range``.

Each sample of ``DCGM_FI_DEV_GPU_UTIL`` stands for one step of one GPU: held where it names a pod or a job of Slurm, used for
the share that it says, otherwise idle. A GPU that several hold counts for each of them in equal parts.
"""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.cluster.files.text import TraceError, text_of
from weft.cluster.specification import Specification
from weft.deploy.cost.usage import Period, Usage

QUERY = "DCGM_FI_DEV_GPU_UTIL"
MOST_POINTS = 10_000  # of a series in one answer; Prometheus gives at most 11,000
TIMEOUT_S = 60
OWN = ("", "weft-system")  # namespaces whose pods hold no GPU for anyone


def fetch(address: str, begin: float, end: float, step_s: float = 0.0) -> dict[str, Any]:
    """An answer over the whole time, fetched in as many parts as it takes: the mean utilisation within each step. A plain
    selector would show a series for five minutes after its last sample, and a job as held for so long.

    Args:
        step_s: by default a minute, or what makes MOST_POINTS of the time.

    Raises:
        ConnectionError: no answer, or an error; with what Prometheus says.
    """
    whole: dict[tuple[tuple[str, str], ...], list[Any]] = defaultdict(list)
    step_s = step_s or max(60.0, math.ceil((end - begin) / MOST_POINTS))
    if step_s < 1:
        raise ValueError(f"step is {step_s:g} s; expected 1 or more")
    span, at = step_s * MOST_POINTS, begin
    # A millisecond less than the step: before Prometheus 3 a range has both of its ends.
    selected = f"avg_over_time({QUERY}[{round(step_s * 1000) - 1}ms])"
    while at < end:
        until = min(at + span, end)
        query = urllib.parse.urlencode({"query": selected, "start": at + step_s, "end": until, "step": step_s})
        try:
            with urllib.request.urlopen(
                f"{address.rstrip('/')}/api/v1/query_range?{query}", timeout=TIMEOUT_S
            ) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ConnectionError(f"{address}: {error.code}: {error.read().decode(errors='replace')[:500]}") from None
        except (OSError, ValueError) as error:
            raise ConnectionError(f"{address} does not answer as Prometheus does: {error}") from None
        for series in found["data"]["result"]:
            whole[tuple(sorted(series["metric"].items()))] += series["values"]
        at = until
    result = [{"metric": dict(labels), "values": values} for labels, values in whole.items()]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def load(path: Path, made: Specification | None = None, price: float = 0.0) -> Period:
    """A saved answer.

    Raises:
        TraceError: something else.
    """
    try:
        answer = json.loads(text_of(path).read())
        return usage(answer, made, price, path.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{path}: {type(error).__name__}: {error}; expected what /api/v1/query_range answers"
        ) from None


def usage(answer: dict[str, Any], made: Specification | None = None, price: float = 0.0, source: str = "") -> Period:
    """Of an answer whose samples are a step apart: the smallest time between two of a series."""
    series = [(each["metric"], [(float(t), float(v)) for t, v in each["values"]]) for each in answer["data"]["result"]]
    times = sorted({t for _, values in series for t, _ in values})
    step = min((b[0] - a[0] for _, values in series for a, b in pairwise(values)), default=60.0)
    # GPU and moment → who holds it; a slice of MIG is a device of its own.
    holders: dict[tuple[str, ...], int] = defaultdict(int)
    for labels, values in series:
        for t, _ in values if _held(labels) else ():
            holders[(*_device(labels), str(t))] += 1
    hours: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    idle, sizes = 0.0, _sizes(series)
    seen: set[tuple[str, ...]] = set()
    for labels, values in series:
        size = sizes[_device(labels)]
        for t, value in values:
            at = (*_device(labels), str(t))
            part = step / 3600 * size / max(holders[at], 1)
            if _held(labels):
                of = hours[_team(labels), _user(labels), _job(labels), labels.get("pool", "")]
                of[0] += part
                of[1] += part * (min(max(value, 0.0), 100.0) / 100 if math.isfinite(value) else 0.0)
            elif not holders[at] and at not in seen:
                seen.add(at)
                idle += part
    prices = {pool.name: pool.price for pool in made.pools} if made else {}
    usages = [
        Usage(
            team,
            user,
            job,
            pool,
            held,
            used,
            {"held idle": held - used} if held > used else {},
            0.0,
            prices.get(pool) or price,
        )
        for (team, user, job, pool), (held, used) in hours.items()
    ]
    begin, end = (times[0] - step, times[-1]) if times else (0.0, 0.0)
    capacity = sum(each.gpu_hours for each in usages) + idle
    mean = _mean_price(made) or price
    notes = [f"a sample stands for {step:g} s; a time without samples counts for nothing"]
    cost = sum(each.gpu_hours * each.price for each in usages) + idle * mean
    return Period(usages, begin, end, capacity, cost, made.currency if made else "", f"Prometheus: {source}", notes)


def _device(labels: dict[str, str]) -> tuple[str, ...]:
    gpu = labels.get("UUID") or f"{labels.get('Hostname', '')}/{labels.get('gpu', '')}"
    return gpu, labels.get("GPU_I_ID", "")


def _sizes(series: list[tuple[dict[str, str], Any]]) -> dict[tuple[str, ...], float]:
    """What part of a GPU each device is: a GPU that is cut is shared by its slices, in the sizes of their profiles."""
    slices: dict[str, dict[str, float]] = defaultdict(dict)
    for labels, _ in series:
        gpu, instance = _device(labels)
        if instance:
            profile = labels.get("GPU_I_PROFILE", "1g").partition("g")[0]
            slices[gpu][instance] = float(profile) if profile.isdecimal() else 1.0
    found: dict[tuple[str, ...], float] = {}
    for labels, _ in series:
        gpu, instance = _device(labels)
        # A cut GPU's own series would count it again.
        found[gpu, instance] = (
            slices[gpu][instance] / max(7.0, sum(slices[gpu].values())) if instance else 0.0 if slices.get(gpu) else 1.0
        )
    return found


def _held(labels: dict[str, str]) -> bool:
    return bool(labels.get("hpc_job") or (labels.get("pod") and labels.get("namespace", "") not in OWN))


def _team(labels: dict[str, str]) -> str:
    return labels.get("account") or ("(slurm)" if labels.get("hpc_job") else labels.get("namespace", "")) or "(none)"


def _user(labels: dict[str, str]) -> str:
    return labels.get("user") or "(unknown)"


def _job(labels: dict[str, str]) -> str:
    return labels.get("hpc_job") or f"{labels.get('namespace', '')}/{labels.get('pod', '')}"


def _mean_price(made: Specification | None) -> float:
    gpus = sum(pool.gpus for pool in made.pools) if made else 0
    return sum(pool.gpus * pool.price for pool in made.pools) / gpus if made and gpus else 0.0

"""A run of the simulator: ``weft simulate --save FOLDER``.

What a preemption lost is badput, and so is the time of restarts."""

import json
from pathlib import Path

from weft.cluster.files.text import TraceError
from weft.cluster.specification import Specification
from weft.deploy.cost.usage import Period, Usage


def load(folder: Path, made: Specification | None = None, price: float = 0.0) -> Period:
    """The jobs that ran.

    Args:
        made: the cluster file, for price and currency: of the pool whose type a job names, else the mean of all GPUs.

    Raises:
        TraceError: no saved run.
        ImportError: PyArrow is missing.
    """
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError("a saved run needs PyArrow: pip install 'weft[parquet]'", name="pyarrow") from None
    summary_file, jobs_file = folder / "summary.json", folder / "jobs.parquet"
    if not summary_file.exists() or not jobs_file.exists():
        raise TraceError(f"{folder}: no saved run; expected a folder that weft simulate --save has written")
    summary = json.loads(summary_file.read_text(encoding="utf-8"))
    columns = ["id", "tenant", "types", "start", "end", "gpus", "milli", "stops", "lost"]
    schema = parquet.read_schema(jobs_file)
    table = parquet.read_table(jobs_file, columns=[name for name in columns if name in schema.names]).to_pylist()
    restart_s = float(summary.get("restart_s") or 0)
    first = min((row["start"] for row in table if row["start"] is not None), default=0.0)
    last = max((row["end"] for row in table if row["end"] is not None), default=0.0)
    held = _held(folder, table)
    usages = []
    for k, row in enumerate(table):
        if row["start"] is None or not row["gpus"]:
            continue
        gpus = row["gpus"] * (row.get("milli") or 1000) / 1000
        restarts = min(row["stops"] * restart_s, row["lost"])  # what was lost has them
        seconds = {"restarts": restarts, "work lost at a preemption": row["lost"] - restarts}
        bad = {reason: of * gpus / 3600 for reason, of in seconds.items() if of}
        usages.append(
            Usage(
                team=row["tenant"] or "(none)",
                user=row["tenant"] or "(none)",
                job=str(row["id"]),
                pool="",
                gpu_hours=gpus * held[k] / 3600,
                bad_hours=bad,
                price=_price(made, row.get("types") or "", price),
            )
        )
    capacity = summary["gpus"] * (last - first) / 3600
    return Period(
        usages, first, last, capacity, capacity * _price(made, "", price), made.currency if made else "",
        f"simulation: {folder.name}", ["users are not known to the simulator: the tenant stands for them"],
    )  # fmt: skip


def _held(folder: Path, table: list[dict]) -> list[float]:
    """Seconds for which each job held its GPUs: from its start to its end, without the time between stretches."""
    stretches = folder / "stretches.parquet"
    if not stretches.exists():
        return [(row["end"] - row["start"]) if row["start"] is not None else 0.0 for row in table]
    from pyarrow import parquet

    found = [0.0] * len(table)
    for each in parquet.read_table(stretches, columns=["row", "begin", "end"]).to_pylist():
        found[each["row"]] += each["end"] - each["begin"]
    return found


def _price(made: Specification | None, types: str, price: float) -> float:
    if made is None:
        return price
    named = {pool.nodes.gpu_type.casefold(): pool.price for pool in made.pools if pool.gpus}
    if types.casefold() in named:
        return named[types.casefold()] or price
    gpus = sum(pool.gpus for pool in made.pools)
    return sum(pool.gpus * pool.price for pool in made.pools) / gpus if gpus else price

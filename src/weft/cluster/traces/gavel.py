"""Gavel (Narayanan et al. 2020): tab-separated traces of steps to do, and a table of steps per second by GPU type."""

from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files.columns import read
from weft.cluster.files.text import TraceError, beside, json_of, text_of
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, jobs_of, or_zero
from weft.definition import UnknownName

# The three layouts have no line of names; the number of columns tells them apart.
PHYSICAL = (
    "job_type", "command", "working_directory", "num_steps_arg", "needs_data_dir", "total_steps", "scale_factor",
    "priority_weight", "SLO", "arrival_time",
)  # fmt: skip
MSR = ("job_type", "command", "num_steps_arg", "needs_data_dir", "total_steps", "arrival_time", "scale_factor")
LAYOUTS = {10: PHYSICAL, 9: tuple(name for name in PHYSICAL if name != "working_directory"), 7: MSR}


def load(path: Path, throughputs: str | Path | None = None, gpu: str = "v100") -> Jobs:
    """A trace has no durations. One is ``total_steps`` divided by the steps per second of that model on so many GPUs.

    The speed is that of a job alone on consolidated GPUs of one type; jobs accept any type all the same. Left out and counted
    are jobs whose model the table does not have on so many GPUs, or with a speed of 0 (it did not fit that type).

    Args:
        throughputs: the table; by default ``simulation_throughputs.json`` in the trace's folder or up to three above.
        gpu: the type whose speed counts: ``v100``, ``p100``, ``k80`` …
    """
    columns = text_of(path).readline().count("\t") + 1
    if columns not in LAYOUTS:
        raise TraceError(f"{path}:1: {columns} tab-separated columns; expected {', '.join(map(str, LAYOUTS))}")
    place = Path(throughputs) if throughputs else beside(path, "simulation_throughputs.json")
    speeds = json_of(place)
    if not isinstance(speeds, dict):
        raise TraceError(f"{place}: a JSON {type(speeds).__name__}; expected an object of GPU types")
    if gpu not in speeds:
        raise UnknownName(f"GPU type of {place}", gpu, speeds)
    numbers = ("total_steps", "scale_factor", "arrival_time", "priority_weight")
    table = read(path, numbers, ("job_type",), optional=numbers[3:], header=LAYOUTS[columns], delimiter="\t")
    gpus = table.whole("scale_factor")
    speed = np.array(
        [_alone(place, speeds[gpu], model, f"{k:g}") for model, k in zip(table.words["job_type"], gpus, strict=True)]
    )
    more = {"priority": or_zero(table.numbers["priority_weight"])} if "priority_weight" in table.numbers else {}
    return jobs_of(
        table, table.numbers["arrival_time"], table.numbers["total_steps"] / np.where(speed > 0, speed, np.nan), gpus,
        {f"no speed on so many {gpu}": np.isnan(speed), f"cannot run on {gpu}": speed == 0}, **more,
    )  # fmt: skip


def _alone(place: Path, speeds: Any, model: str, gpus: str) -> float:
    """Steps per second of a model alone on so many GPUs; NaN where it was not measured."""
    try:
        return float(speeds.get(f"('{model}', {gpus})", {"null": np.nan})["null"])
    except (AttributeError, KeyError, TypeError, ValueError):
        what = f"{place}: there is no speed of '{model}' on {gpus} GPUs"
        raise TraceError(f"{what}; expected an object of objects with steps per second under 'null'") from None


FORMAT = Format("gavel", load, "Gavel's tab-separated traces and its table of speeds", options=("throughputs", "gpu"))

"""Slurm: ``sacct --json`` (data_parser v0.0.40 to v0.0.44), ``--allusers`` and a start time as you like."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files.columns import LARGEST, Columns
from weft.cluster.files.slurm import number
from weft.cluster.files.text import TraceError, list_of
from weft.cluster.model import LATEST, Jobs
from weft.cluster.trace import Format
from weft.cluster.traces import sacct

TIMES = {"Submit": "submission", "Eligible": "eligible", "Start": "start", "End": "end"}
READ = ("cpu", "mem", "gres")  # kinds of TRES


def load(path: Path) -> Jobs:
    """The meaning is that of ``sacct``: the same jobs written both ways are the same trace. Tasks of arrays are ``12_3``, parts
    of heterogeneous jobs ``12+1``. ``time`` is in seconds, its ``limit`` in minutes, memory in MiB; numbers are plain, or
    objects of ``set``, ``infinite`` and ``number``. Steps are skipped.
    """
    entries = list_of(path, "jobs", "sacct")
    words: dict[str, list[str]] = {name: [] for name in ("JobID", "User", "Account", "Reservation")}
    numbers: dict[str, list[float]] = {name: [] for name in ("NNodes", "Priority", *TIMES, "Elapsed", "Timelimit")}
    tres: dict[str, list[dict[str, str]]] = {"allocated": [], "requested": []}
    for k, job in enumerate(entries, 1):
        known = job.get("job_id", "no job_id") if isinstance(job, dict) else "no object"
        try:
            _add(job, words, numbers, tres)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise TraceError(
                f"{path}: job {k} ({str(known)[:40]}): {what}; expected what 'sacct --json' writes"
            ) from None
    columns = {name: np.array(column, float) for name, column in numbers.items()}
    times = {name: columns.pop(name) for name in (*TIMES, "Elapsed", "Timelimit")}
    table = Columns(path, columns, words, np.arange(1, len(entries) + 1))
    return sacct.jobs_from(table, times, tres["allocated"], tres["requested"])


def _add(job: Any, words: Any, numbers: Any, tres: Any) -> None:
    """Adds a job to the columns."""
    if not isinstance(job, dict):
        raise TypeError(f"{job!r:.40}")
    about, time = job.get("association") or {}, job["time"]
    words["JobID"].append(_id(job))
    words["User"].append(_word(job.get("user") or about.get("user")))
    words["Account"].append(_word(job.get("account") or about.get("account")))
    words["Reservation"].append(_word((job.get("reservation") or {}).get("name")))
    for name, key in TIMES.items():
        numbers[name].append(number(time[key] if name != "Eligible" else time.get(key), f"time.{key}") or math.nan)
    numbers["Elapsed"].append(number(time["elapsed"], "time.elapsed"))
    minutes = number(time.get("limit", 0), "time.limit")  # 0 is none; not set is that of the partition
    unlimited = math.isinf(minutes) or ("limit" in time and math.isnan(minutes))
    numbers["Timelimit"].append(LATEST if unlimited else 60 * minutes or math.nan)
    for name, key in (("NNodes", "allocation_nodes"), ("Priority", "priority")):
        value = number(job.get(key), key)
        numbers[name].append(math.nan if math.isinf(value) else value)
    for name, column in tres.items():
        column.append(_tres(job["tres"].get(name) or [], f"tres.{name}"))


def _id(job: dict[str, Any]) -> str:
    """``12``, ``12_3``, ``12_[4-9]``, ``12+1``."""
    array, het = job.get("array") or {}, job.get("het") or {}
    task, offset = (number(of.get(key), key) for of, key in ((array, "task_id"), (het, "job_offset")))
    if parent := _whole(array.get("job_id") or 0, "array.job_id"):
        if not math.isnan(task):
            return f"{parent}_{task:.0f}"
        if array.get("task"):
            return f"{parent}_[{_word(array['task'])}]"
    if (parent := _whole(het.get("job_id") or 0, "het.job_id")) and not math.isnan(offset):
        return f"{parent}+{offset:.0f}"
    return str(_whole(job["job_id"], "job_id"))


def _tres(entries: Any, what: str) -> dict[str, str]:
    """A list of ``type``, ``name`` and ``count`` as sacct's text has it: ``gres/gpu:h100`` → ``8``."""
    if not isinstance(entries, list):
        raise TypeError(f"{what} is {entries!r:.60}; expected a list")
    found: dict[str, str] = {}
    for entry in entries:
        kind, name = _word(entry["type"]), _word(entry.get("name"))
        if kind not in READ:
            continue
        full = f"{kind}/{name}" if name else kind
        amount = _whole(entry["count"], f"{what}: {full}")
        if full in found:
            raise ValueError(f"{what}: {full} is there twice; expected it once")
        found[full] = f"{amount}M" if kind == "mem" else str(amount)
    return found


def _whole(value: Any, what: str) -> int:
    amount = number(value, what)
    if not (0 <= amount < LARGEST) or amount != int(amount):
        raise ValueError(f"{what} is {value!r:.60}; expected a whole number of 0 or more")
    return int(amount)


def _word(value: Any) -> str:
    if value is not None and not isinstance(value, str | int):
        raise TypeError(f"{value!r:.60}; expected a word")
    return "" if value is None else str(value).strip()


FORMAT = Format("sacct-json", load, "Slurm: sacct --json, with the meaning of sacct")

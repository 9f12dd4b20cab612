"""Alibaba PAI (Weng et al. 2022): ``pai_task_table``, with or without a line of names, and ``pai_job_table`` for users."""

from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files import shares
from weft.cluster.files.columns import read
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, accepted, jobs_of, names, or_zero

TASK = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
JOB = ("job_name", "inst_id", "user", "status", "start_time", "end_time")


def load(path: Path, jobs: str | Path | None = None) -> Jobs:
    """A task is a job of ``inst_num`` equal pods, named JOB/TASK; it runs from its ``start_time`` to its ``end_time``.

    ``plan_gpu`` is percent of a GPU for each instance: 50 is half of one, 200 is two. ``plan_cpu`` is percent of a core,
    ``plan_mem`` is taken for GiB. ``gpu_type`` is the type that the task ran on; since its duration is of that type, it is
    taken for the one that it accepts.

    Left out and counted: tasks without a GPU, that did not end, without a number of instances, whose ``plan_gpu`` is neither a
    share of one GPU nor whole GPUs, and whose job is not in ``jobs``.

    Args:
        jobs: ``pai_job_table``, which has when a job was submitted, and its user, who becomes the tenant. Without it a task
            counts as submitted when it started.
    """
    words = ("job_name", "task_name", "gpu_type")
    table = read(path, ("inst_num", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu"), words, header=TASK)
    count = table.whole("inst_num", least=1)
    percent, start = table.numbers["plan_gpu"], table.numbers["start_time"]
    gpus, milli, neither = shares.of_instances(percent / 100, count)
    types, type_sets = accepted(table.words["gpu_type"])
    leave_out = {
        "no GPU": ~(percent > 0),
        "no number of instances": np.isnan(count),
        shares.NEITHER: neither,
    }
    more: dict[str, Any] = {}
    submit = start
    if jobs is not None:
        submit, users = _of_jobs(Path(jobs), table.words["job_name"])
        leave_out["not in the job table"] = np.array([user is None for user in users], bool)
        more["tenant"], more["tenants"] = names(user or "" for user in users)

    def whole_job(column: str, unit: float) -> Any:
        return or_zero(np.rint(table.numbers[column] * unit) * count)

    return jobs_of(
        table, submit, table.numbers["end_time"] - start, gpus, leave_out,
        id=[f"{job}/{task}" for job, task in zip(table.words["job_name"], table.words["task_name"], strict=True)],
        pods=count, milli=milli,
        cpu=whole_job("plan_cpu", 10), memory=whole_job("plan_mem", 1024), types=types, type_sets=type_sets, **more,
    )  # fmt: skip


def _of_jobs(path: Path, wanted: list[str]) -> tuple[Any, list[str | None]]:
    """When each job was submitted and by whom; NaN and None of those that the table does not have."""
    table = read(path, ("start_time",), ("job_name", "user"), header=JOB)
    row = {name: k for k, name in enumerate(table.words["job_name"])}
    rows = [row.get(name) for name in wanted]
    submit = [np.nan if k is None else table.numbers["start_time"][k] for k in rows]
    return np.array(submit), [None if k is None else table.words["user"][k] for k in rows]


FORMAT = Format("pai", load, "Alibaba PAI 2020's pai_task_table (percent of a GPU, seconds)", options=("jobs",))

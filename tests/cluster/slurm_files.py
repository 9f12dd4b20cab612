"""What Slurm's commands write, from known jobs and nodes."""

import json

import numpy as np

STYLES = ("object", "plain")  # how data_parser writes numbers that may be unknown


def stamp(seconds: int | None) -> str:
    return "Unknown" if seconds is None else str(np.datetime64("2024-02-01T00:00:00") + np.timedelta64(seconds, "s"))


def unix(seconds: int | None) -> int:
    return 0 if seconds is None else 1_706_745_600 + seconds


def clock(seconds: int) -> str:
    return f"{seconds // 86400}-{seconds % 86400 // 3600:02}:{seconds % 3600 // 60:02}:{seconds % 60:02}"


def piped(jobs: list[dict]) -> str:
    """``sacct --parsable2``. A job has id, account, user, submit, eligible, start, end, elapsed, limit (minutes, None for that of
    the partition, inf), tres (text → count), nodes, priority and reservation."""
    lines = [
        "JobID|User|Account|Submit|Eligible|Start|End|Elapsed|Timelimit|AllocTRES|ReqTRES|NNodes|Priority|Reservation"
    ]
    for job in jobs:
        limit = {None: "Partition_Limit", np.inf: "UNLIMITED"}.get(job["limit"]) or clock(60 * job["limit"])
        tres = ",".join(f"{name}={n}{'M' if name == 'mem' else ''}" for name, n in job["tres"].items())
        times = [stamp(job[name]) for name in ("submit", "eligible", "start", "end")]
        cells = [job["id"], job["user"], job["account"], *times, clock(job["elapsed"]), limit, tres, tres]
        lines.append("|".join(map(str, [*cells, job["nodes"], job["priority"], job["reservation"]])))
    return "\n".join(lines)


def number(value, style: str):
    if style == "plain":
        return "Infinity" if value == np.inf else value
    known = value is not None and value != np.inf
    return {"set": known, "infinite": value == np.inf, "number": value if known else 0}


def as_json(jobs: list[dict], style: str) -> str:
    """``sacct --json`` of the same jobs."""
    found = []
    for job in jobs:
        begin, _, rest = job["id"].partition("_")
        het, _, offset = job["id"].partition("+")
        tres = [
            {"type": name.partition("/")[0], "name": name.partition("/")[2], "id": k, "count": n}
            for k, (name, n) in enumerate(job["tres"].items())
        ]
        tres.append({"type": "energy", "name": "", "id": 3, "count": -2})
        found.append({
            "job_id": 900 + len(found) if rest or offset else int(job["id"]), "user": job["user"], "account": job["account"],
            "array": {"job_id": int(begin) if rest else 0, "task_id": number(int(rest) if rest else None, style), "task": ""},
            "het": {"job_id": int(het) if offset else 0, "job_offset": number(int(offset) if offset else None, style)},
            "time": {
                "submission": unix(job["submit"]), "eligible": unix(job["eligible"]), "start": unix(job["start"]),
                "end": unix(job["end"]), "elapsed": job["elapsed"], "limit": number(job["limit"], style),
            },
            "tres": {"allocated": tres, "requested": tres}, "allocation_nodes": job["nodes"],
            "priority": number(job["priority"], style), "reservation": {"id": 0, "name": job["reservation"]}, "steps": [{}],
            "name": 'a "name" | with\nall',
        })  # fmt: skip
    return json.dumps({"meta": {}, "jobs": found, "errors": [], "warnings": []})

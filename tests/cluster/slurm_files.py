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
    """``sacct --parsable2``. A job has id, account, user, submit, eligible, start, end, elapsed, limit (minutes, None for that
    of the partition, inf), tres (text → count), nodes, priority and reservation."""
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


def scontrol(nodes: list[dict], style: str = "text") -> str:
    """``scontrol show node`` (text, oneliner, json) of nodes with name, gres, state, cpus, memory, and a free text."""
    if style == "json":
        return json.dumps({"nodes": [
            {"name": n["name"], "gres": n["gres"], "state": n["state"].split("+"), "cpus": n["cpus"] + 2,
             "effective_cpus": n["cpus"], "real_memory": n["memory"] + 64, "specialized_memory": 64, "reason": n["text"]}
            for n in nodes], "last_update": {"set": True, "infinite": False, "number": 1}, "meta": {}})  # fmt: skip
    lines = [
        [f"NodeName={n['name']} Arch=x86_64 CoresPerSocket=32 ", f"CPUAlloc=0 CPUEfctv={n['cpus']} CPUTot={n['cpus'] + 2}",
         "AvailableFeatures=a=b,gpu", f"Gres={n['gres'] or '(null)'}", "OS=Linux 5.4 #1 SMP x86_64 2025",
         f"RealMemory={n['memory'] + 64} AllocMem=7 FreeMem=8 MemSpecLimit=64", f"State={n['state']} ThreadsPerCore=2 Weight=1",
         "Partitions=a,b", f"CfgTRES=cpu={n['cpus']},mem=1G,gres/gpu=77", f"Reason={n['text']} [root@2025-01-01T00:00:00]"]
        for n in nodes
    ]  # fmt: skip
    return (
        "\n".join(("\n   " if style == "text" else " ").join(part) + "\n" * (style == "text") for part in lines) + "\n"
    )


def sinfo(nodes: list[dict], style: str = "text") -> str:
    """``sinfo -N`` with %N %G %c %m %t (text, bars, json), each node in two partitions."""
    if style == "json":
        return json.dumps({"sinfo": [
            {"node": {"state": n["state"].split("+")}, "nodes": {"total": 1, "nodes": [n["name"]]}, "partition": {"name": part},
             "cpus": {"minimum": n["cpus"], "maximum": n["cpus"]}, "memory": {"minimum": n["memory"], "maximum": n["memory"]},
             "gres": {"total": n["gres"], "used": ""}} for part in "ab" for n in nodes], "meta": {}})  # fmt: skip
    mark = "|" if style == "bars" else " "
    rows = [
        [n["name"], n["gres"] or "(null)", str(n["cpus"]), str(n["memory"]), n["state"]] for n in nodes for _ in "ab"
    ]
    return "\n".join(mark.join(row) for row in [["NODELIST", "GRES", "CPUS", "MEMORY", "STATE"], *rows]) + "\n"

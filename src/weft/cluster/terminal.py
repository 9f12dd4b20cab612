"""What ``weft simulate`` and ``weft simulate compare`` print, in 80 columns: of long names the middle is left out, and
of an order's file the folder; ``--json`` has them in full."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cluster.check import LISTED, NO_ESTIMATES, QUANTILES
from weft.cluster.comparison import SAME_SECOND, SEEDS, TIES, Compared
from weft.cluster.pictures import time_axis
from weft.cluster.policy import without_folders
from weft.words import count, period

MOST_LISTED = 3  # jobs that can never run, by name
TENANTS_LISTED = 5
NAME_COLUMNS = 32  # of a name
GENERATED = "the trace is generated: no users submitted these jobs"
BY_ESTIMATE = ("sjf", "srsf", "srtf")  # orders
NONE_RAN = "no job could run on this cluster"
NEAR = {"one_domain": "in one NVLink domain", "one_rack": "in one rack", "several_racks": "over several racks"}
LABELS = {"jct": "job completion time", "queueing": "queueing delay", "slowdown": "slowdown (times)"}


def show(out: Console, found: dict[str, Any]) -> None:
    """Prints :func:`weft.cluster.metrics.summary`."""
    table = _table(
        f"{_shown(found['order'])}, {_shown(found['placement'])} (ties: {found['ties']})",
        "",
        "mean",
        "p50",
        "p95",
        "p99",
    )
    for name, label in LABELS.items():
        write = _number if name == "slowdown" else _time
        table.add_row(label, *(write(found[name][k]) for k in ("mean", "p50", "p95", "p99")))
    out.print(table)
    _say(out, _warm_up(found))
    if found["generated"]:
        _say(out, GENERATED)
    for warning in found["warnings"]:
        _say(out, warning)
    _say(out, _foreseen(found))
    _say(out, _unvalidated([found]))
    share = _share(found["utilisation"])
    waited = sum(found["wait_reasons"].values())
    if waited:
        shares = sorted(((s / waited, name) for name, s in found["wait_reasons"].items() if s), reverse=True)
        _say(out, "waited for: " + ", ".join(f"{name} {share:.1%}" for share, name in shares))
    _say(
        out,
        f"{found['completed']:,} of {count(found['jobs'], 'job')} ran on {count(found['nodes'], 'node')}, "
        f"{count(found['gpus'], 'GPU')}; "
        f"makespan {period(found['makespan'])}; utilisation {share}; {found['cpu_s']:.3g} CPU s",
    )
    if found["preemptions"]:
        lost = found["lost_gpu_s"] / (found["lost_gpu_s"] + found["gpu_s"])
        _say(
            out,
            f"jobs were preempted {count(found['preemptions'], 'time')}; that cost {lost:.2%} of all GPU seconds",
        )
    if found["allocation"]["mean"] is not None:
        held = {name: _share(value) for name, value in found["allocation"].items()}
        _say(
            out,
            f"until the last start {held['mean']} of the GPUs were allocated, {held['p5']} to {held['p95']} for nine tenths "
            "of that time",
        )
    near = found["locality"]
    if near["gangs"]:
        parts = [f"{_share(near[name])} {where}" for name, where in NEAR.items() if near[name]]
        gangs = count(near["gangs"], "start") + " of gangs" if found["preemptions"] else count(near["gangs"], "gang")
        _say(out, f"{gangs} over several nodes: {', '.join(parts)}")
    if len(found["by_size"]) > 1:
        _groups(out, "by size", found["by_size"])
    if len(found["by_tenant"]) > 1:
        first = dict(list(found["by_tenant"].items())[:TENANTS_LISTED])
        _groups(out, "by tenant", first)
        more = found["fairness"]["tenants"] - len(first)
        _say(
            out,
            f"Jain's index over the mean slowdowns of {found['fairness']['tenants']:,} tenants: "
            f"{found['fairness']['jain']:.3f}" + (f" ({more:,} of them not shown)" if more > 0 else ""),
        )
    if found["by_type"]:
        _groups(out, "by type of GPU", found["by_type"])
        of_each = (
            f"{_shown(name)} {_share(of['allocation'])} of {of['gpus']:,}" for name, of in found["by_type"].items()
        )
        _say(out, f"GPUs held, of the makespan: {', '.join(of_each)}")
    late = found["fairness"]["finish_time"]
    if late["above_1"]:
        _say(
            out,
            f"{late['above_1']:.1%} of the jobs took longer than with an equal share of the cluster; p99 "
            f"{_number(late['p99'])} times as long",
        )
    for why, rows in found["dropped"].items():
        _say(out, f"of the trace {count(rows, 'row')} {'was' if rows == 1 else 'were'} left out: {why}")
    for why, nodes in found["nodes_dropped"].items():
        _say(out, f"of the cluster {count(nodes, 'node')} {'was' if nodes == 1 else 'were'} left out: {why}")
    never = found["unschedulable"]
    for entry in never[:MOST_LISTED]:
        _say(out, f"{_job(entry['job'])} can never run: {entry['reason']}")
    if len(never) > MOST_LISTED:
        _say(out, f"… and {len(never) - MOST_LISTED:,} more")
    if not found["completed"] and found["complete"]:
        _say(out, NONE_RAN)
    if not found["complete"]:
        _say(out, "interrupted: these are the jobs that had started by then")


def show_compared(out: Console, compared: Sequence[Compared], metric: str) -> None:
    """Prints what :func:`weft.cluster.compare` ranked; what was tried has a column that says how much it
    matters."""
    ran = [each for each in compared if each.runs]
    tried = [kind for kind in (SEEDS, TIES, SAME_SECOND) if any(e.matters(metric, kind) is not None for e in ran)]
    runs = sum(len(each.runs) for each in ran)
    if ran:
        varied = any(len(each.runs) > 1 for each in ran)
        write = _exact_time if metric.partition(".")[0] in ("jct", "queueing", "makespan") else _short
        named = "policy" if len(ran) == 1 else "policies"
        _say(out, f"{len(ran):,} {named} by {metric}, {count(runs, 'run')}")
        table = _table(
            "",
            "policy",
            "own",
            *(["least", "most"] if varied else []),
            "× best",
            *(kind.removeprefix("same ") for kind in tried),
        )
        best, shown = ran[0].value(metric), _distinct(str(each.policy) for each in ran)
        for each in ran:
            value, band = each.value(metric), each.band(metric)
            cells = [write(value)]
            if varied:
                cells += [write(end) for end in band or (None, None)]
            cells.append("–" if value is None or not best else f"{value / best:.3f}")
            cells += [_matter(each.matters(metric, kind)) for kind in tried]
            table.add_row(_plain(shown[str(each.policy)]), *cells)
        out.print(table)
        _say(out, _warm_up(ran[0].runs[0].found))
        _costs(out, ran, shown)
        if tried:
            _say(
                out,
                f"least and most of all runs; {', '.join(tried)}: the range of values, as a share of the policy's own",
            )
        never = {str(each.policy): len(each.runs[0].found["unschedulable"]) for each in ran}
        if len(set(never.values())) > 1:
            numbers = ", ".join(f"{shown[name]} {number:,}" for name, number in never.items())
            _say(out, f"not the same jobs: those that can never run, and are left out, are {numbers}")
        elif any(never.values()):
            number = max(never.values())
            _say(out, f"{count(number, 'job')} can never run, and {'is' if number == 1 else 'are'} left out")
        if not any(run.found["completed"] for each in ran for run in each.runs):
            _say(out, NONE_RAN)
        if ran[0].runs[0].found["generated"]:
            _say(out, GENERATED)
        for warning in ran[0].runs[0].found["warnings"]:
            _say(out, warning)
        _say(out, _unvalidated([each.runs[0].found for each in ran]))
    for each in compared:
        for why in each.failed:
            _say(out, f"FAILED {_shown(str(each.policy))}: {why}")


def _costs(out: Console, ran: Sequence[Compared], shown: dict[str, str]) -> None:
    """What each policy costs: a low mean may be bought with stopped jobs, or with an unfair share."""
    table = _table("", "at what cost", "utilisation", "makespan", "stops", "lost", "late")
    for each in ran:
        found = each.runs[0].found
        lost = found["lost_gpu_s"] / max(found["lost_gpu_s"] + found["gpu_s"], 1e-9)
        table.add_row(
            _plain(shown[str(each.policy)]), _share(found["utilisation"]), period(found["makespan"]),
            f"{found['preemptions']:,}", f"{lost:.2%}", _share(found["fairness"]["finish_time"]["above_1"]),
        )  # fmt: skip
    out.print(table)
    _say(out, "stops: of running jobs; lost: GPU time that they cost; late: jobs later than with an equal share")
    if any(found["preemptions"] and not found["restart_s"] for found in (each.runs[0].found for each in ran)):
        _say(out, "stops cost nothing here: --restart-cost says how many seconds one does")
    _say(out, next(filter(None, (_foreseen(each.runs[0].found) for each in ran)), ""))


def show_check(out: Console, found: dict[str, Any]) -> None:
    """Prints :func:`weft.cluster.check.check`."""
    _say(out, f"{count(found['jobs'], 'job')}, submitted over {period(found['submitted_over_s'])}; "
              f"{found['gpu_hours']:,.1f} GPU hours")  # fmt: skip
    table = _table("", "", *QUANTILES)
    table.add_row("duration", *(period(found["duration_s"][name]) for name in QUANTILES))
    table.add_row("GPUs", *(f"{found['gpus'][name]:,.0f}" for name in QUANTILES))
    out.print(table)
    numbers = {
        "with a share of a GPU": found["jobs_with_shares"], "without a GPU": found["jobs_without_gpu"],
        "with pods": found["jobs_with_pods"],
    }  # fmt: skip
    _say(out, ", ".join(f"{number:,} {what}" for what, number in numbers.items() if number))
    for what, names in (("tenant", [f"{t} {n:,}" for t, n in found["tenants"].items() if t]), ("type", found["types"])):
        if names and names != ["any"]:
            more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
            _say(out, f"{count(len(names), what)}: " + ", ".join(map(_printable, names[:LISTED])) + more)
    if found["generated"]:
        _say(out, GENERATED)
    for why, rows in found["dropped"].items():
        _say(out, f"dropped: {count(rows, 'row')}, {why}")
    if not found["dropped"]:
        _say(out, "dropped: nothing")
    for warning in found["warnings"]:
        _say(out, f"doubtful: {warning}")
    for text in found["assumed"]:
        _say(out, f"assumed: {text}")
    if "cluster" in found:
        of = found["cluster"]
        gpus = ", ".join(f"{n:,} {_printable(kind)}" for kind, n in of["gpus"].items())
        _say(out, f"cluster: {count(of['nodes'], 'node')}, GPUs: {gpus or 'none'}")
        for why, nodes in of["dropped"].items():
            _say(out, f"cluster, left out: {count(nodes, 'node')}, {why}")
        for warning in of["warnings"]:
            _say(out, f"cluster, doubtful: {warning}")
        for text in of["assumed"]:
            _say(out, f"cluster, assumed: {text}")
    if "never_run" in found:
        _say(out, f"{count(len(found['never_run']), 'job')} can never run on this cluster")
        for entry in found["never_run"][:MOST_LISTED]:
            _say(out, f"{_job(entry['job'])}: {entry['reason']}")


def as_json(compared: Sequence[Compared], metric: str) -> dict[str, Any]:
    """The object of ``weft simulate compare --json``."""
    policies = []
    for rank, each in enumerate(compared, 1):
        band = each.band(metric)
        policies.append(
            {
                "policy": str(each.policy),
                "rank": rank if each.runs else None,
                "order": each.policy.order,
                "placement": each.policy.placement,
                "ties": each.policy.ties,
                "validated": each.runs[0].found["validated"] if each.runs else None,
                "value": each.value(metric),
                "least": band and band[0],
                "most": band and band[1],
                "matters": {kind: each.matters(metric, kind) for kind in (SEEDS, TIES, SAME_SECOND)},
                "failed": each.failed,
                "summary": each.runs[0].found if each.runs else None,
                "runs": [
                    {
                        "changed": run.kind,
                        "ties": run.ties,
                        "seed": run.seed,
                        "shuffle": run.shuffle,
                        **{name: run.found[name] for name in (*LABELS, "makespan", "utilisation")},
                    }
                    for run in each.runs
                ],
            }
        )
    return {"metric": metric, "policies": policies}


def _groups(out: Console, title: str, groups: dict[str, dict[str, Any]]) -> None:
    table = _table("", title, "jobs", "mean JCT", "p99", "mean wait", "p99", "slowdown")
    shown = _distinct(groups)
    for name, of in groups.items():
        numbers = [of["jct"]["mean"], of["jct"]["p99"], of["queueing"]["mean"], of["queueing"]["p99"]]
        slowdown = _number(of["slowdown"]["mean"])
        table.add_row(_plain(shown[name] or "(no name)"), f"{of['jobs']:,}", *map(_time, numbers), slowdown)
    out.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=_plain(title) if title else None, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold", no_wrap=i > 0)
    return table


def _plain(name: str) -> Text:
    """A name as it is: no markup, and nothing that moves a terminal's cursor."""
    return Text(_printable(name))


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in name)


def _shown(name: str) -> str:
    """A name without what is too long of it, and a file's without its folders."""
    name = _printable(without_folders(name))
    if cell_len(name) <= NAME_COLUMNS:
        return name
    begin = end = ""
    while cell_len(begin + end) < NAME_COLUMNS - 2:
        begin, end = begin + name[len(begin)], name[-len(end) - 1] + end
    return f"{begin}…{end}"


def _job(id: Any) -> str:
    """A job by its name, or by its number where the trace names none."""
    return f"job {id}" if isinstance(id, int) else f"job '{_shown(str(id))}'"


def _distinct(names: Iterable[str]) -> dict[str, str]:
    """Name → what is shown of it; all of it where two would look alike."""
    shown = {name: _shown(name) for name in names}
    alike = Counter(shown.values())
    return {name: of if alike[of] == 1 else _printable(name) for name, of in shown.items()}


def _unvalidated(every: Sequence[dict[str, Any]]) -> str:
    """Which orders and placements were not held against published figures; nothing where all were."""
    names: dict[str, dict[str, None]] = {}
    for found in every:
        for what, figures in found["validated"].items():
            if not figures:
                names.setdefault(what, {})[_shown(found[what])] = None
    listed = "; ".join(f"{what} {', '.join(of)}" for what, of in sorted(names.items()))
    return f"unvalidated: {listed} (no published figures were reproduced)" if listed else ""


def _foreseen(found: dict[str, Any]) -> str:
    """That a policy used the true durations, where it did."""
    uses = found["order"].endswith(("-easy", "-conservative")) or found["order"].startswith(BY_ESTIMATE)
    return NO_ESTIMATES if uses and NO_ESTIMATES in found["assumed"] else ""


def _say(out: Console, text: str) -> None:
    if text:
        out.print(text)


def _matter(share: float | None) -> str:
    return "–" if share is None else f"{share:.{2 if share < 0.01 else 1 if share < 0.1 else 0}%}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _warm_up(found: dict[str, Any]) -> str:
    of = found["warm_up"]
    if not of["seconds"]:
        return ""
    return f"warm-up: {count(of['jobs'], 'job')} of the first {period(of['seconds'])} ran and count in no time, wait or share"


def _time(value: float | None) -> str:
    return time_axis.text(value, space=" ")


def _exact_time(value: float | None) -> str:
    """With digits enough to tell policies apart."""
    return time_axis.text(value, 4, " ")


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _short(value: float | None) -> str:
    return _number(value, 0 if value is not None and abs(value) >= 1000 else 2)

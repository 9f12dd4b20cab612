"""The page: chooses from the records what each section shows, and says why where a section has nothing to show."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft import records, registry
from weft.drawing import quantities
from weft.drawing.embedding import embed, embed_all, template
from weft.drawing.quantities import distinct, implementation_key, known, point_key
from weft.records import Measurement

HERE = Path(__file__).parent
OPEN_AT_MOST = 4  # so many operators are all unfolded when the page opens; of more the first alone, as an example


@dataclass
class Contents:
    """All that a page shows. Every part may be empty; the section then says so.

    Args:
        machine: what was measured on: ``gpu`` or ``cpu`` (names), ``device`` ("cuda" or "cpu"), ``driver``,
            ``versions`` and whatever else is known; each entry becomes a row.
        ceilings: measurements of the operator "ceiling"; ``implementation`` says which ("copy 1:1", "bf16 matrix") and
            ``details`` has ``value`` and ``unit`` ("B/s" or "FLOP/s").
        verification: the object of ``weft verify --json``.
        measurements: of the operators.
        compiled: one entry a kernel and architecture, from ``weft compile-check``.
        training: a training run as a dictionary.
        findings: of ``weft doctor``: ``name``, ``status``, ``found``, ``fix``, ``group``.
        communication: lines of ``comm.jsonl``, of :mod:`weft.comm`; without them no section.
        serving: lines of ``serving.jsonl``, of ``weft bench-llm``; without them no section.
        scheduling: of the cluster simulator, as :func:`weft.report.scheduling.section` takes it; without it no section.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    ceilings: list[Measurement] = field(default_factory=list)
    verification: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    compiled: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, Any] | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    scheduling: dict[str, Any] | None = None
    communication: list[dict[str, Any]] = field(default_factory=list)
    serving: list[dict[str, Any]] = field(default_factory=list)

    @property
    def device(self) -> str:
        """``"cuda"`` where this machine measured a GPU, else ``"cpu"``."""
        if "device" in self.machine:
            return "cuda" if str(self.machine["device"]).startswith("cuda") else "cpu"
        gpu_measured = any(m.device == "cuda" for m in (*self.measurements, *self.ceilings))
        return "cuda" if self.machine.get("gpu") or gpu_measured else "cpu"

    @property
    def name(self) -> str:
        """What the machine is called: its GPU, or without one its CPU."""
        of_machine = self.machine.get("gpu" if self.device == "cuda" else "cpu") or self.machine.get("gpu")
        named = next((m.gpu for m in (*self.ceilings, *self.measurements) if m.gpu and m.device == self.device), "")
        return str(of_machine or named or "this machine")

    @property
    def processor(self) -> str:
        """The CPU's name, with which records of what runs on the CPU are kept; empty where it is not known."""
        return str(self.machine.get("processor") or self.machine.get("cpu") or "")


def render(contents: Contents, path: str | Path) -> Path:
    """Writes the page as one file that needs nothing else, and returns its path. Folders on the way are made."""
    text = template(HERE).render(_view(contents))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write_whole(path, text)
    return path


def _view(contents: Contents) -> dict[str, Any]:
    """All that the template shows."""
    from weft.report import charts, collectives, roofline, scheduling, serving, verdict

    measured = sorted(
        records.latest(m for m in contents.measurements if not quantities.is_ceiling(m)),
        key=lambda m: (m.operator, m.direction != "forward", point_key(m), implementation_key(m)),
    )
    ceilings = [m for m in records.latest(contents.ceilings) if known(m.details.get("value"))]
    own_ceilings = [m for m in ceilings if m.device == contents.device] or ceilings
    training = contents.training or {}
    stamps = sorted(m.time for m in (*measured, *ceilings) if m.time)
    commits = distinct(m.commit for m in (*measured, *ceilings))
    return {
        "contents": contents,
        "name": contents.name,
        "on_gpu": contents.device == "cuda",
        "machine": _machine(contents.machine),
        "tiles": verdict.tiles(own_ceilings, contents.verification, measured),
        "next_steps": verdict.next_steps(contents.findings, measured, contents.device == "cuda"),
        "ceilings": ceilings,
        "ceiling_charts": embed_all(*(charts.ceiling_bars(own_ceilings, unit) for unit in ("B/s", "FLOP/s"))),
        "verification": _verification(contents.verification),
        "roofline": embed(roofline.roofline(measured, own_ceilings, contents.device)),
        "operators": _operators(measured),
        "open_at_most": OPEN_AT_MOST,
        "measured": measured,
        "training": training,
        "training_charts": embed_all(charts.loss_curves(training), charts.accuracy_curve(training)),
        "communication": [
            {"run": run, "table": collectives.rows(run), "verdicts": collectives.verdicts(run)}
            for run in collectives.runs(contents.communication)
        ],
        "serving": serving.section(contents.serving),
        "scheduling": scheduling.section(contents.scheduling or {}, contents.processor),
        "compiled": _compiled(contents.compiled),
        "not_compiled": [k for k in contents.compiled if not k.get("ok")],
        "findings": [f for f in contents.findings if f.get("status") != "pass"],
        "provenance": {"from": stamps[:1], "to": stamps[-1:], "commits": commits, "rendered": records.now()},
    }


def _machine(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the machine's table; nested entries in one line each."""

    def written(value: Any) -> str:
        if isinstance(value, Mapping):
            return " · ".join(f"{key} {written(inner)}" for key, inner in value.items() if inner not in (None, ""))
        if isinstance(value, (list, tuple)):
            return ", ".join(map(written, value))
        return f"{value:,.6g}" if isinstance(value, float) else str(value)

    names = {"gpu": "GPU", "cpu": "CPU", "os": "OS", "l2": "L2", "cuda": "CUDA", "sms": "SMs", "sm": "architecture"}
    units = {"gib": "GiB", "mib": "MiB", "mb": "MB", "mhz": "MHz", "w": "W", "c": "°C"}

    def titled(key: str) -> str:
        *words, last = key.split("_")
        unit = f" ({units[last]})" if words and last in units else ""
        words = words if unit else [*words, last]
        return " ".join(names.get(w, w) for w in words) + unit

    return [(titled(k), written(v)) for k, v in machine.items() if v not in (None, "", [], {})]


def _verification(verification: dict[str, Any]) -> dict[str, Any]:
    """Counts by status for each family, and in it for each operator, direction and implementation; failures in full; the
    reasons for what is open."""
    results = verification.get("results") or []
    families: dict[str, dict[str, Any]] = {}
    for r in results:
        key = tuple(str(r.get(k) or "") for k in ("operator", "direction", "implementation"))
        family = registry.family(key[0]) if key[0] in registry.modules() else key[0]
        of_family = families.setdefault(family, {**_counted(family), "rows": {}})
        for row in (of_family, of_family["rows"].setdefault(key, _counted(key))):
            row["counts"][r.get("status")] += 1
            if known(r.get("error")) and r.get("status") in ("pass", "fail"):
                row["worst"] = max(row["worst"] or 0, r["error"])

    def reasons(status: str) -> list[tuple[str, int]]:
        return Counter(
            str(r.get("reason") or "no reason given") for r in results if r.get("status") == status
        ).most_common(12)

    for of_family in families.values():
        rows = of_family["rows"].values()
        of_family["operators"] = distinct(row["name"][0] for row in rows)
        of_family["rows"] = sorted(rows, key=lambda row: (row["name"][0], row["name"][1] != "forward", row["name"][2]))
    mutants, survived = verification.get("mutants") or 0, verification.get("mutants_survived") or 0
    return {
        "families": sorted(families.values(), key=lambda f: (not f["counts"]["fail"], f["name"])),
        "failed": [r for r in results if r.get("status") == "fail"],
        "unverifiable": reasons("unverifiable"),
        "declined": reasons("declined"),
        "not_reached": verification.get("not_reached") or 0,
        "totals": Counter(r.get("status") for r in results),
        "mutants": mutants,
        "untried": verification.get("mutants_not_reached") or 0,
        "survived": survived,
    }


def _counted(name: Any) -> dict[str, Any]:
    return {"name": name, "counts": Counter(), "worst": None}


def _operators(measured: Iterable[Measurement]) -> list[dict[str, Any]]:
    """One entry an operator and direction: a line that sums it up, and its charts where there is something to draw."""
    from weft.report import charts

    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in measured:
        groups.setdefault((m.operator, m.direction), []).append(m)
    entries = []
    for (operator, direction), group in groups.items():
        name = operator if direction == "forward" else f"{operator} {direction}"
        ours = [m for m in group if m.ours and not quantities.is_rung(m)]
        shares = [m.share_of_ceiling for m in ours or group if known(m.share_of_ceiling)]
        ratios = [m.ratio_to_best_peer for m in ours if known(m.ratio_to_best_peer)]
        entries.append(
            {
                "name": f"{operator} {direction}",
                "points": len({(m.workload, m.dtype, m.cache, m.device) for m in group}),
                "implementations": distinct(m.implementation for m in sorted(group, key=implementation_key)),
                "ours": bool(ours),
                "share": _range(shares, quantities.percent),
                "ratio": _range(ratios, quantities.ratio),
                "devices": distinct(m.device for m in group),
                "share_chart": embed(charts.share_bars(group, name)),
                "ratio_chart": embed(charts.ratio_bars(group, name)),
            }
        )
    return entries


def _range(values: list[Any], write: Callable[[Any], str]) -> str:
    """``83.3 % to 99.9 %``; one number where both are written alike; nothing without values."""
    return " to ".join(distinct(write(pick(values)) for pick in (min, max))) if values else ""


def _compiled(compiled: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an implementation: how many kernels for which architectures, and the most that any of them takes."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for kernel in compiled:
        rows.setdefault((str(kernel.get("operator")), str(kernel.get("implementation"))), []).append(kernel)

    def most(kernels: list[dict[str, Any]], key: str) -> Any:
        return max((k[key] for k in kernels if known(k.get(key))), default=None)

    def fullest(kernels: list[dict[str, Any]]) -> float | None:
        shares = (
            k["shared_bytes"] / k["shared_limit"]
            for k in kernels
            if known(k.get("shared_bytes")) and k.get("shared_limit")
        )
        return max(shares, default=None)

    return [
        {
            "name": name,
            "kernels": len(kernels),
            "architectures": sorted({str(k.get("arch")) for k in kernels}, key=lambda arch: (len(arch), arch)),
            "registers": most(kernels, "registers"),
            "shared_bytes": most(kernels, "shared_bytes"),
            "shared_share": fullest(kernels),
            "spilling": sum(bool(k.get("spills")) for k in kernels),
            "failed": sum(not k.get("ok") for k in kernels),
        }
        for name, kernels in sorted(rows.items())
    ]

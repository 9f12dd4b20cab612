"""A cost report as CSV and as one page of HTML."""

import csv
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from weft.deploy.cost.usage import Period, report

COLUMNS = ("team", "user", "job", "pool", "gpu_hours", "used_hours", "cost", "goodput_hours", "badput_hours", "reasons")


def write_csv(path: Path, period: Period) -> None:
    """A row for each job, in the order of the report. Text that a spreadsheet would take for a formula is quoted."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for each in sorted(period.usages, key=lambda u: (-u.gpu_hours * u.price, -u.gpu_hours, u.job)):
            bad = sum(each.bad_hours.values())
            reasons = "; ".join(f"{why} {hours:.4g}" for why, hours in sorted(each.bad_hours.items()))
            used = "" if each.used_hours is None else f"{each.used_hours:.6g}"
            good = each.gpu_hours - bad - each.open_hours
            numbers = [f"{each.gpu_hours:.6g}", used, f"{each.gpu_hours * each.price:.2f}", f"{good:.6g}", f"{bad:.6g}"]
            rows.writerow([*map(_plain, (each.team, each.user, each.job, each.pool)), *numbers, reasons])


def _plain(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def write_html(path: Path, period: Period) -> None:
    """A self-contained page."""
    import jinja2

    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined
    )
    found = report(period)
    css = (folder.parents[1] / "drawing/page.css").read_text(encoding="utf-8")
    page = environment.get_template("page.html.j2").render(found=found, css=css, span=_span(found), most=_most(found))
    path.write_text(page, encoding="utf-8")


def _most(found: dict[str, Any]) -> float:
    return max((each["gpu_hours"] for each in found["by_team"].values()), default=0.0) or 1.0


def _span(found: dict[str, Any]) -> str:
    if found["end"] < 1e8:  # seconds of a trace, no date
        return f"{(found['end'] - found['begin']) / 3600:,.1f} hours"
    first, last = (datetime.fromtimestamp(found[key], timezone.utc) for key in ("begin", "end"))
    return f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"

"""Standard Workload Format (Feitelson): 18 columns of numbers, ``;`` before comments, -1 where nothing is known."""

from pathlib import Path

import numpy as np

from weft.cluster.files.columns import Columns
from weft.cluster.files.text import TraceError, text_of
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, jobs_of, names

COLUMNS = 18


def load(path: Path) -> Jobs:
    """Processors are taken for GPUs; where none were requested, the allocated ones count."""
    lines, rows, words = [], [], []
    for number, line in enumerate(text_of(path), 1):
        cells = line.split()
        if not cells or cells[0].startswith(";"):
            continue
        if len(cells) < COLUMNS:
            raise TraceError(f"{path}:{number}: {len(cells)} columns; expected {COLUMNS}")
        try:
            rows.append([float(cell) for cell in cells[:COLUMNS]])
        except ValueError:
            raise TraceError(f"{path}:{number}: '{line.strip()[:60]}'; expected {COLUMNS} numbers") from None
        lines.append(number)
        words.append([_integer(cells[0]), _integer(cells[11])])
    table = np.array(rows).reshape(-1, COLUMNS)
    table[table == -1] = np.nan
    submit, duration, allocated, requested, estimate = (table[:, k] for k in (1, 3, 4, 7, 8))
    tenant, tenants = names(f"user {user}" if user != "-1" else "unknown user" for _, user in words)
    return jobs_of(
        Columns(path, {}, {}, np.array(lines, np.int64)),
        submit,
        duration,
        np.where(np.isnan(requested), allocated, requested),
        estimate=np.where(np.isnan(estimate), duration, estimate),
        id=[job for job, _ in words],
        tenant=tenant,
        tenants=tenants,
    )


def _integer(text: str) -> str:
    """A whole number, whatever its length, as ``12`` rather than ``12.0`` or ``012``."""
    return str(int(text)) if text.lstrip("+-").isdigit() else f"{float(text):.15g}"


FORMAT = Format("swf", load, "Standard Workload Format; processors are taken for GPUs")

"""Jobs as a trace file in weft's own columns, which ``weft simulate FILE --format csv`` (or ``parquet``) reads back."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files.atomic import written
from weft.cluster.files.columns import GENERATED
from weft.cluster.model import DEFAULTS, Jobs

SUFFIXES = (".csv", ".parquet")


def check(path: str | Path) -> None:
    """Raises what :func:`write` would say of the name, before there are jobs.

    Raises:
        ValueError: a name that ends otherwise.
        ImportError: a Parquet file without PyArrow.
    """
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"a trace '{Path(path).name}'; expected a name that ends in {' or '.join(SUFFIXES)}")
    if Path(path).suffix == ".parquet":
        _pyarrow()


def write(path: str | Path, jobs: Jobs, origin: str = "") -> None:
    """Writes the columns with values other than the default. Numbers are read back as they were, to the bit.

    Where the jobs are generated the file says so: a csv in a first line that begins with ``#``, which the reader passes over;
    Parquet in its metadata, under ``weft``.

    Args:
        origin: what made the jobs, for readers of the file.

    Raises:
        ValueError, ImportError: as :func:`check`.
        OSError: it already exists or cannot be written.
    """
    check(path)
    columns = _columns(jobs)
    with written(path) as file:
        if file.suffix == ".csv":
            with open(file, "w", encoding="utf-8", newline="") as text:
                if jobs.generated:
                    text.write(f"{GENERATED}: " + " ".join(origin.replace('"', "'").split()) + "\n")
                rows = csv.writer(text, lineterminator="\n")
                rows.writerow(columns)
                rows.writerows(zip(*columns.values(), strict=True))
        else:
            from pyarrow import parquet

            parquet.write_table(_pyarrow().table(columns, metadata=about(jobs, origin)), file, compression="zstd")


def about(jobs: Jobs, origin: str = "") -> dict[str, str]:
    """A Parquet file's metadata: whether the jobs are generated."""
    return {"weft": json.dumps({"generated": jobs.generated, "origin": origin})}


def _columns(jobs: Jobs) -> dict[str, Any]:
    columns: dict[str, Any] = {name: getattr(jobs, name).tolist() for name in ("submit", "duration", "gpus")}
    if (jobs.estimate != jobs.duration).any():
        columns["estimate"] = jobs.estimate.tolist()
    for name, default in DEFAULTS.items():
        if name not in ("types", "tenant") and (getattr(jobs, name) != default).any():
            columns[name] = getattr(jobs, name).tolist()
    kinds = np.array(["|".join(kinds) for kinds in jobs.type_sets], object)
    for name, words in (("types", kinds), ("tenant", np.array(jobs.tenants, object))):
        if any(words[np.unique(getattr(jobs, name))]):
            columns[name] = words[getattr(jobs, name)].tolist()
    if not isinstance(jobs.id, range):  # not the first column, where a name with a '#' would pass for a comment
        columns["id"] = [str(name) for name in jobs.id]
    return columns


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"Parquet needs PyArrow: pip install 'weft[parquet]' ({error})", name="pyarrow") from None
    return pyarrow

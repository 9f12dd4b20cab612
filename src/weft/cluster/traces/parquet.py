"""Parquet: the columns of ``csv``, read with PyArrow."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files.columns import Columns, chosen, known_as, present
from weft.cluster.files.text import TraceError, bytes_of
from weft.cluster.model import Jobs
from weft.cluster.trace import Format
from weft.cluster.traces import csv


def load(path: Path, columns: Mapping[str, str] | None = None) -> Jobs:
    """As ``csv``; an empty value is null, and errors name the row, counted from 1.

    Args:
        columns: weft's name → the file's: ``{"gpus": "gpu_num"}``.

    Raises:
        ImportError: PyArrow is missing.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"Parquet needs PyArrow: pip install 'weft[parquet]' ({error})", name="pyarrow") from None

    given = csv.known(columns)
    try:
        file = parquet.ParquetFile(io.BytesIO(bytes_of(path)))
    except pyarrow.ArrowException as error:
        raise TraceError(f"{path}: no Parquet file: {error}") from None
    called = known_as(path, file.schema_arrow.names, csv.synonyms(given), given)
    wanted = chosen(file.schema_arrow.names, csv.NUMBERS, csv.ALTERNATIVES, called)
    positions = present(path, file.schema_arrow.names, (*wanted, *csv.WORDS), csv.OPTIONAL, called)
    weft_s = (file.schema_arrow.metadata or {}).get(b"weft", b"")  # what weft writes it knows
    table = file.read(columns=[there for _, there in positions])
    numbers, words, dates = {}, {}, list[str]()
    for name, there in positions:
        column: Any = table.column(there)
        if name in csv.DATED and pyarrow.types.is_timestamp(column.type):
            dates.append(name)
            column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False).cast(pyarrow.int64())
        kind = pyarrow.string() if name in csv.WORDS else pyarrow.float64()
        try:
            column = column.cast(kind)
        except pyarrow.ArrowException:
            raise TraceError(f"{path}: column {there} is of type {column.type}; expected {kind}") from None
        if name in csv.WORDS:
            words[name] = [word or "" for word in column.to_pylist()]
        else:
            numbers[name] = np.asarray(column.to_numpy(), np.float64) / (1e6 if name in dates else 1)
    lines, generated = np.arange(1, table.num_rows + 1), b'"generated": true' in weft_s
    columns_of = Columns(path, numbers, words, lines, tuple(file.schema_arrow.names), generated, dates, called=called)
    return csv.jobs_from(columns_of, [] if weft_s else csv.doubts(columns_of, given))


FORMAT = Format("parquet", load, "csv's columns in a Parquet file", options=("columns",))

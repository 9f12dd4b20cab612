"""Exports of Nsight Systems: ``nsys export --type sqlite report.nsys-rep``.

Tables of CUPTI's activities (kernels, copies, API calls) and of NVTX ranges; names are indices into ``StringIds``. PyTorch's
``torch.autograd.profiler.emit_nvtx`` puts operators into NVTX, and ranges named ``step 3`` count as steps.
"""

import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.profiling.trace import STEP, Span, Trace

KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}  # CUpti_ActivityMemcpyKind
MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 4: "Managed"}  # ENUM_CUDA_MEM_KIND
PROCESS = 24  # bits of a global thread id below the process


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads an export.

    Raises:
        ValueError: it is no such export, is damaged, or holds no CUDA activity.
    """
    path = Path(path)
    trace = Trace(path.name)
    try:
        with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as file:
            file.row_factory = sqlite3.Row
            tables = {row[0] for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables & {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"}:
                raise ValueError(
                    f"{path} holds no CUDA activity; record with nsys profile --trace cuda,nvtx, then export again"
                )
            names = dict(file.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
            for span in _spans(file, tables, names):
                _add(trace, span)
            if "TARGET_INFO_GPU" in tables:
                trace.gpu = next((row["name"] for row in file.execute("SELECT name FROM TARGET_INFO_GPU")), "")
    except (sqlite3.DatabaseError, IndexError) as error:  # IndexError: a column that another version does not have
        raise ValueError(f"{path} is not an export of Nsight Systems, or is damaged: {error}") from None
    finally:
        if "file" in locals():
            file.close()
    return trace.finish()


def _add(trace: Trace, span: Span) -> None:
    if not isinstance(span.start, int) or not isinstance(span.end, int):
        trace.dropped["without a start or an end"] += 1
    elif span.end < span.start:
        trace.dropped["with a negative duration"] += 1
    else:
        (trace.device if span.kind in ("kernel", "copy", "memset") else trace.host).append(span)


def _spans(file: sqlite3.Connection, tables: set[str], names: dict[int, str]) -> Iterator[Span]:
    for r in _rows(file, tables, "CUPTI_ACTIVITY_KIND_KERNEL"):
        name = names.get(_get(r, "demangledName"), names.get(_get(r, "shortName"), "kernel"))
        yield Span(name, "kernel", r["start"], r["end"], (r["deviceId"], r["streamId"]), _correlation(r))
    for r in _rows(file, tables, "CUPTI_ACTIVITY_KIND_MEMCPY"):
        ends = (MEMORY.get(_get(r, "srcKind"), "?"), MEMORY.get(_get(r, "dstKind"), "?"))
        name = f"Memcpy {KINDS.get(r['copyKind'], 'copy')} ({ends[0]} -> {ends[1]})"
        yield Span(
            name, "copy", r["start"], r["end"], (r["deviceId"], r["streamId"]), _correlation(r), {"bytes": r["bytes"]}
        )
    for r in _rows(file, tables, "CUPTI_ACTIVITY_KIND_MEMSET"):
        yield Span("Memset", "memset", r["start"], r["end"], (r["deviceId"], r["streamId"]), _correlation(r))
    for r in _rows(file, tables, "CUPTI_ACTIVITY_KIND_RUNTIME"):
        name = re.sub(r"_v\d+$", "", names.get(r["nameId"], "call"))
        yield Span(name, "call", r["start"], r["end"], r["globalTid"], _correlation(r))
    for r in _rows(file, tables, "NVTX_EVENTS"):
        text = _get(r, "text") or names.get(_get(r, "textId"), "")
        if text and _get(r, "end") is not None:  # ranges; marks have no end
            text = re.sub(r", (?:seq|op_id|sizes|input_op_ids) .*|, (?:seq|op_id|sizes|input_op_ids) ?=.*", "", text)
            yield Span(text, "annotation" if STEP.match(text) else "op", r["start"], r["end"], r["globalTid"])


def _rows(file: sqlite3.Connection, tables: set[str], table: str) -> Iterator[sqlite3.Row]:
    return iter(file.execute(f"SELECT * FROM {table}") if table in tables else ())


def _get(row: sqlite3.Row, column: str) -> Any:
    return row[column] if column in row.keys() else None  # noqa: SIM118, a Row has no `in`


def _correlation(row: sqlite3.Row) -> tuple[int, int]:
    """Correlation ids count within a process."""
    process = _get(row, "globalPid") or _get(row, "globalTid") or 0
    return process >> PROCESS, row["correlationId"]

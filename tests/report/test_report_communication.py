"""Collectives in the report and in documents."""

import json

import pytest

from weft.records import Store
from weft.report import collectives, documents, page


def line(run, size, us, **more):
    point = {
        "collective": "all_reduce", "bytes": size, "dtype": "fp32", "backend": "nccl", "ranks": 2, "mode": "stream",
        "op": "sum", "p50_us": us, "busbw": size / us / 1e3, "registered": False,
    }  # fmt: skip
    return {"run": run, **point, **more}


def head(run, **more):
    about = {"gpus": ["Made Up 9000"] * 2, "nccl": "2.28.9", "torch": "2.11", "peak": {"gb_s": 400.0, "what": "copy"}}
    return {"run": run, "about": about, "backend": "nccl", "ranks": 2, "commit": "abc", **more}


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path / "results")
    sizes = [1 << k for k in range(12, 27, 2)]
    old = [head("2026-01-01"), *(line("2026-01-01", s, 99.0) for s in sizes)]
    new = [head("2026-02-01"), *(line("2026-02-01", s, 10 + s / 3e5) for s in sizes)]
    barrier = line("2026-02-01", 0, 12.0, collective="barrier", busbw=0.0)
    for each in (*old, *new, barrier, line("no head", 4096, 1.0)):
        found.append("Made Up 9000", collectives.FILE, each)
    return found


def test_newest_run_with_its_model_and_verdict(store):
    (run,) = collectives.runs(store.lines(name=collectives.FILE))
    head, rows = collectives.rows(run)
    assert head == ["size", "all_reduce", "barrier"] and rows[0] == ["no data", "–", "12.0"]
    assert rows[-1] == ["64 MiB", "234 (287)", "–"] and run.title == "nccl on 2 x Made Up 9000, fp32, mode stream"
    (text,) = collectives.verdicts(run)
    assert "latency 10.0" in text and "300 GB/s algbw" in text and "72% of the 400 GB/s of a copy: normal" in text


def test_marker_and_page(store, tmp_path):
    file = tmp_path / "page.md"
    file.write_text("<!-- weft:comm gpu=made-up-9000 backend=nccl -->\n<!-- weft:end -->\n")
    text = documents.refresh(file, store)
    assert "| 4 KiB | 10.0 (0.409) | – |" in text and "nccl 2.28.9 · torch 2.11 · commit abc · 2026-02-01" in text
    shown = page.render(page.Contents(communication=list(store.lines(name=collectives.FILE))), tmp_path / "index.html")
    assert "Communication between ranks" in shown.read_text() and "234 (287)" in shown.read_text()
    assert "Communication between ranks" not in page.render(page.Contents(), tmp_path / "other.html").read_text()
    json.dumps(list(store.lines()))

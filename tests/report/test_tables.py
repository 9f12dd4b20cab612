"""The measured tables, and the markers that they are generated between."""

import re
import subprocess
import sys

import pytest
from report_samples import GPU, ceilings, measurement, row_operator

from weft.drawing.quantities import figures, si, workload_key
from weft.records import Store
from weft.report import kernels
from weft.report.documents import refresh
from weft.report.summary import summary_table
from weft.report.tables import headlines_table, points_table


def test_charts_are_not_loaded_for_the_tables():
    code = "import sys, weft.report.tables; sys.exit('bokeh' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_quantities():
    assert [figures(x) for x in (0.01234, 4.26, 96.11, 1234.5, 0)] == ["0.0123", "4.26", "96.1", "1,234", "0"]
    assert [figures(x) for x in (None, float("nan"), "text")] == ["–"] * 3
    assert si(4.26e12, "B/s") == "4.26\u202fTB/s" and si(999.9e9, "B/s") == "1.00\u202fTB/s"
    assert workload_key("M=8,N=4096") < workload_key("M=8,N=32768") < workload_key("M=16,N=1")


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "results")
    for m in row_operator("softmax", "forward", 2):
        made.append(GPU, "softmax", m)
    made.append(GPU, "softmax", measurement("ladder-1-naive", 900.0, 250.0, ours=True))
    for m in ceilings():
        made.append(GPU, m.operator, m)
    return made


def document(tmp_path, *lines):
    path = tmp_path / "README.md"
    path.write_text("\n".join(["# Softmax", "", *lines, "", "After."]) + "\n", encoding="utf-8")
    return path


MARKER = "<!-- weft:table operator=softmax direction=forward gpu=synthetic-gpu-9000 -->"
END = "<!-- weft:end -->"


def test_table_is_made_between_its_markers_and_stays(store, tmp_path):
    path = document(tmp_path, MARKER, "OUTDATED", END)
    text = refresh(path, store)
    assert text.startswith(
        "# Softmax\n\n"
        + MARKER
        + "\n\n| workload | dtype | cuda (µs) | triton (µs) | torch (µs) | torch.compile (µs) |"
    )
    assert text.endswith(END + "\n\nAfter.\n") and "OUTDATED" not in text and "ladder" not in text
    path.write_text(text, encoding="utf-8")
    assert refresh(path, store) == text


def test_table_rows_are_sorted_and_complete(store, tmp_path):
    text = refresh(document(tmp_path, MARKER, END), store)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("| `")]
    assert [row[1] for row in rows] == ["bf16"] * 6 + ["fp32"] * 6
    assert [row[0] for row in rows[:2]] == ["`M=2048,N=131072`", "`M=8192,N=32768`"]
    head = [cell.strip() for cell in next(x for x in text.splitlines() if x.startswith("| workload")).split("|")[1:-1]]
    first, second = (dict(zip(head, row, strict=True)) for row in rows[:2])
    assert first["cuda: share of ceiling"] == "95.7\u202f%"
    assert second["cuda (µs)"] == "–" == second["cuda: share of ceiling"]
    assert re.fullmatch(r"\d\.\d\d× \(\d\.\d\d–\d\.\d\d\)", second["triton: ratio to best peer (p20–p80)"])
    assert all(sum(cell.startswith("**") for cell in row) == 1 for row in rows), "one time of each row is the fastest"
    assert (
        "<sub>Synthetic GPU 9000 · driver 580.65.06 · torch 2.13.0, triton 3.7.1, cuda 13.0 · commit 0123456789ab · "
        "2026-11-20 · cold cache, medians</sub>" in text
    )


def test_tables_of_ceilings_rungs_and_nothing(store, tmp_path):
    path = document(
        tmp_path,
        "<!-- weft:ceilings gpu=synthetic-gpu-9000 -->", END,
        "<!-- weft:table operator=softmax gpu=synthetic-gpu-9000 rungs=only -->", END,
        "<!-- weft:table operator=softmax gpu=synthetic-gpu-9000 direction=backward -->", END,
        "<!-- weft:table operator=softmax gpu=synthetic-gpu-9000 dtype=fp32 -->", END,
    )  # fmt: skip
    ceiling, rungs, nothing, narrow = refresh(path, store).split(END)[:4]
    assert "| copy 1:1 | bandwidth | 4.26\u202fTB/s |" in ceiling
    assert ceiling.index("4:3") < ceiling.index("bf16 matrix")
    assert "| ladder-1-naive |" in rungs and "triton (µs)" not in rungs
    assert "*No measurements yet.*" in nothing and "fp32" in narrow and "bf16" not in narrow


def test_a_time_of_an_earlier_run_is_marked():
    """A ratio is within a run: a peer that looks faster beside it may have been timed on another day."""
    today = {"run": "b", "time": "2026-11-23T10:00:00Z"}
    rows = [measurement("triton", 100.0, 90.0, ("torch", 102.0), **today), measurement("torch", 102.0, 90.0, **today)]
    rows.append(measurement("liger", 98.0, 90.0, run="a", time="2026-11-22T10:00:00Z"))
    table = points_table(rows)
    assert "| 100 | 102 | **98.0**‡ |" in table and "‡ timed in an earlier run" in table
    assert "‡" not in points_table(rows[:2])


def test_headlines_show_the_chosen_points_beside_their_peers(store, tmp_path):
    rows = [
        measurement("triton", 100.0, 90.0, ("liger", 110.0), workload="M=8,N=8", run="b"),
        measurement("cuda", 95.0, 90.0, ("liger", 110.0), workload="M=8,N=8", run="b"),
        measurement("torch", 200.0, 90.0, workload="M=8,N=8", run="b"),
        measurement("torch.compile", 120.0, 90.0, workload="M=8,N=8", run="a"),
        measurement("triton", 50.0, 45.0, ("torch", 40.0), workload="M=8,N=8", direction="backward", run="b"),
    ]
    table = headlines_table(rows, ["softmax:bf16:M=8,N=8:backward", "softmax:bf16:M=8,N=8"])
    assert "| softmax backward | `M=8,N=8` | bf16 | triton | 50.0 | 90.0\u202f% | – | – | 0.80× " in table
    assert "| softmax | `M=8,N=8` | bf16 | cuda | 95.0 | 94.7\u202f% | 200 | – | 1.16× " in table
    with pytest.raises(ValueError, match="did you mean 'softmax:bf16:M=8,N=8'"):
        headlines_table(rows, ["softmax:bf16:M=8,N=9"])
    marker = "<!-- weft:headlines gpu=synthetic-gpu-9000 points=softmax:bf16:M=65536,N=4096 -->"
    assert "| softmax | `M=65536,N=4096` | bf16 |" in refresh(document(tmp_path, marker, END), store)


DISPATCH = """
from weft.operators.dispatch import EMPTY, Dispatch, Route

LONG = 16384
WHY = "read once"
OTHERWISE = Route("torch", lambda c: True, "a copy would be needed")
SHARED = (EMPTY, OTHERWISE)
FORWARD = Dispatch(
    Call, Route("cuda", lambda c: c.n >= LONG or c.a | c.b, WHY, launch, sm=90, unsupported=cluster_unsupported),
    Route("triton", is_long, "rows"), *SHARED,
)
SMALL_BACKWARD = Dispatch(Call, EMPTY, OTHERWISE)


def rows(limit, why="rows"):
    reason = f"{why}, {WHY}"
    return (Route("triton", lambda c: c.n < limit, reason, unsupported=lambda c: c.n % 8),)


def made(kind, limit=LONG):
    return Dispatch(kind, *rows(limit), Route("torch", lambda c: True, "longer"))


LEFT, RIGHT = made(Left), made(kind=Right)
"""


def test_table_of_kernels_is_read_from_the_dispatch_tables(tmp_path, write):
    write(tmp_path / "dispatch.py", DISPATCH)
    write(tmp_path / "add.py", "TABLE = Dispatch(Call, NONE)\nNONE = Route('torch', lambda c: c.empty, 'nothing')")
    rows = kernels.table(tmp_path).splitlines()
    assert rows[0] == "| direction | kernel | when | why |" and rows[2:] == [
        "| forward | cuda | sm_90 or newer, `c.n >= 16384 or c.a \\| c.b`, unless `cluster_unsupported` | read once |",
        "|  | triton | `is_long` | rows |", "|  | torch | otherwise | a copy would be needed |",
        "| small backward | torch | otherwise | a copy would be needed |",
        "| left, right | triton | `c.n < 16384`, unless `c.n % 8` | rows, read once |",
        "|  | torch | otherwise | longer |", "| add: table | torch | `c.empty` | nothing |",
    ]  # fmt: skip
    write(tmp_path / "more.py", "FORWARD = Dispatch(Call, *routes(3))")
    with pytest.raises(ValueError, match=r"more.py:1: .*routes\(3\).* should be written as Route"):
        kernels.table(tmp_path)
    with pytest.raises(ValueError, match="assigns a Dispatch"):
        kernels.table(tmp_path / "none")


def test_where_all_are_wrong_nothing_is_the_fastest():
    wrong = {"workload": "M=8,N=8", "details": {"wrong": "zeros"}}
    rows = [measurement(name, us, 8.0, **wrong) for name, us in (("triton", 9.0), ("cuda", 7.0))]
    rows.append(measurement("torch", 8.0, 8.0))
    (row,) = (line for line in points_table(rows).splitlines() if "N=8`" in line)
    assert "9.00† | " in row and "| – |" in row and "**" not in row


def test_summary_takes_the_fastest_of_ours_and_says_where_it_is_least():
    def of(n, name, time, **fields):
        return measurement(name, time, 100.0, ("quack", 110.0), workload=f"M=8,N={n}", **fields)

    records = [
        of(256, "triton", 105.0), of(256, "torch", 50.0), of(512, "triton", 200.0), of(512, "cuda", 125.0),
        of(512, "triton", 80.0, cache="warm"), of(512, "ladder-1-naive", 70.0, ours=True), of(1024, "triton", 100.0),
        of(2048, "triton", 60.0, details={"wrong": True}), of(256, "cuda", 105.0, direction="backward"),
    ]  # fmt: skip
    forward, backward = (line.split(" | ") for line in summary_table(records, {"softmax": "norm"}).splitlines()[2:])
    assert forward == [
        "| [softmax](norm.md#softmax)", "forward", "bf16", "3", "95.2\u202f%", "80.0\u202f% `M=8,N=512`", "1.05×",
        "0.88× quack `M=8,N=512` |",
    ]  # fmt: skip
    assert backward[:4] == ["| [softmax](norm.md#softmax)", "backward", "bf16", "1"]
    records += [of(8, "torch", 9.0, operator="relu")]
    records += [of(512, "triton", 9.0, operator="gone")]
    table, never = summary_table(records, {"softmax": "norm", "relu": "elementwise"}).split("\n\n")
    assert "gone" not in table and never == "Not timed beside peers yet: `relu`."


OF = {"softmax": "softmax"}


def test_a_peer_that_was_faster_in_an_earlier_run_is_no_win_in_the_summary():
    at = {"run": "b", "workload": "M=8,N=8"}
    ours = [measurement("triton", 100.0, 90.0, ("torch", 150.0), **at), measurement("torch", 150.0, 90.0, **at)]
    alone = summary_table(ours, OF)
    assert "1.50× | 1.50× torch `M=8,N=8`" in alone and "‡" not in alone
    assert summary_table([*ours, measurement("liger", 160.0, 90.0, run="a", workload="M=8,N=8")], OF) == alone
    wrong = measurement("liger", 90.0, 90.0, run="a", workload="M=8,N=8", details={"wrong": True})
    assert summary_table([*ours, wrong], OF) == alone
    faster = measurement("liger", 96.0, 90.0, run="a", workload="M=8,N=8")
    table, note = summary_table([*ours, faster], OF).split("\n\n")
    assert "0.96× | 0.96× liger‡ `M=8,N=8`" in table and note.startswith("‡ timed in an earlier run")


def test_table_of_host_times(store, tmp_path):
    for operator, us in (("add", 13.0), ("mul", 12.0)):
        for way, ratio in (("bare Triton launch", 1.0), ("weft.ops", us / 10)):
            made = measurement(way, us, 5.0, operator=operator, metric="host time")
            made.details["ratio_to_bare_launch"] = ratio
            store.append("host-gpu", operator, made)
    text = refresh(document(tmp_path, "<!-- weft:host gpu=host-gpu -->", END), store)
    assert "| operator | weft.ops (µs) | bare Triton launch (µs) | weft.ops to the bare launch |" in text
    assert "| add | 13.0 | 13.0 | 1.30× |" in text and "| mul | 12.0 |" in text


def test_markers_in_code_and_prose_are_left_alone(store, tmp_path):
    path = document(tmp_path, "```", MARKER, "shown", "```", "", f"Write `{MARKER}`.", "", END)
    assert refresh(path, store) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("lines", "message"), [
    ([MARKER], r"README.md:3: this table has no end"), ([MARKER, MARKER, END], r"README.md:4: a table opens before"),
    (["<!-- weft:tabel operator=softmax gpu=x -->", END], "did you mean 'table'"),
    (["<!-- weft:table operator=softmax gpus=x -->", END], "did you mean 'gpu'"),
    (["<!-- weft:table gpu=x -->", END], "lacks operator=…"),
    (["<!-- weft:table operator softmax -->", END], "should read"),
    (["<!-- weft:table operator=softmax gpu=another -->", END], r"unknown gpu .*\(there are: synthetic-gpu-9000\)"),
    ([MARKER.replace("direction=forward", "direction=sideways"), END], "unknown direction"),
    (["<!--weft:tabel gpu=x-->", END], "did you mean 'table'"), (["```", "never closed", MARKER, END], "code fence"),
])  # fmt: skip
def test_wrong_markers_are_refused_with_their_line(store, tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        refresh(document(tmp_path, *lines), store)


def test_cells_cannot_break_the_table():
    table = points_table([measurement("a|b", 10.0, 5.0, versions={"x": "<b>"})])
    assert "a\\|b (µs)" in table and "&lt;b>" in table

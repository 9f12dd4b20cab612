"""The page and the tables show what the records say, all of it, and need nothing but themselves."""

import dataclasses
import logging
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from report_samples import GPU, ceilings, cpu_contents, gpu_contents, measurement, row_operator, verification

from weft.drawing.quantities import figures, si, workload_key
from weft.records import Store
from weft.report import kernels
from weft.report.documents import refresh
from weft.report.page import Contents, render
from weft.report.summary import summary_table
from weft.report.tables import headlines_table, points_table
from weft.report.verdict import tiles


class Outside(HTMLParser):
    """Collects the addresses that a page would fetch, and its ids."""

    def __init__(self):
        super().__init__()
        self.addresses, self.ids = [], []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data", "poster", "action") and not value.startswith(("#", "data:")):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)


def page(contents, folder):
    """The page's text, and the same without its scripts."""
    text = render(contents, folder / "deep" / "index.html").read_text(encoding="utf-8")
    return text, re.sub(r"<script.*?</script>", "", text, flags=re.S)


@pytest.mark.parametrize("contents", [gpu_contents, cpu_contents, Contents], ids=["gpu", "cpu", "empty"])
def test_page_is_whole_and_alone(contents, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        text, prose = page(contents(), tmp_path)
    assert not caplog.records, "Bokeh found something wrong with a chart"
    outside = Outside()
    outside.feed(text)
    assert outside.addresses == []
    assert len(outside.ids) == len(set(outside.ids))
    assert "@import" not in prose and "url(" not in prose
    assert 'charset="utf-8"' in text and text.count("Bokeh.embed.embed_item(") == 1
    assert len(text.encode()) < 3_000_000
    assert prose.count('role="img"') == prose.count("What this means") - prose.count(
        '<p class="meaning"'
    ) + prose.count("<figure")
    assert "None" not in prose and "nan" not in re.findall(r"\b\w+\b", prose)


@pytest.fixture(scope="module")
def gpu_page(tmp_path_factory):
    return page(gpu_contents(), tmp_path_factory.mktemp("gpu"))


def test_page_says_what_the_records_say(gpu_page):
    _, prose = gpu_page
    assert GPU in prose
    assert "3 of 4" in prose and "rms_norm is not: 1 check failed" in prose
    assert "weft verify rms_norm --workload M=8,N=682 --dtype bf16" in prose
    assert "Of 24 kernels made wrong on purpose (mutants), 24 were rejected" in prose
    assert "24 were rejected, 7 not tried in that time." in prose
    assert "move the caches" in prose and "580.65.06" in prose and "NVIDIA driver" not in prose
    assert "128\u202fKiB of shared memory, 99\u202fKiB allowed" in prose
    assert "99.4\u202f%" in prose
    assert "No GPU was measured" not in prose


def test_every_measurement_is_in_the_table(gpu_page):
    contents, (_, prose) = gpu_contents(), gpu_page
    rows = re.findall(
        r"<tr( class=\"ours\")?><th scope=\"row\">.*?</tr>",
        prose.split('class="sortable"')[1].split("</table>")[0],
        re.S,
    )
    assert len(rows) == len(contents.measurements)
    assert sum(map(bool, rows)) == sum(m.ours for m in contents.measurements)


def test_losing_bars_are_drawn_like_winning_ones(gpu_page):
    text, _ = gpu_page
    behind = [m for m in gpu_contents().measurements if m.ours and m.ratio_to_best_peer and m.ratio_to_best_peer < 0.9]
    assert behind
    for m in behind:
        assert f"{m.ratio_to_best_peer:.2f}× vs {m.best_peer}" in text


def test_page_of_a_cpu_says_so(tmp_path):
    _, prose = page(cpu_contents(), tmp_path)
    assert "No GPU was measured." in prose and "interpreter" in prose
    assert "These are the CPU's roofs" in prose
    assert "No kernel of weft's was timed beside a peer here." in prose.replace("&#39;", "'")
    assert "108 not verifiable here" in prose and "bf16 cannot be trusted in the interpreter" in prose


def test_empty_page_gives_a_reason_in_every_section(tmp_path):
    _, prose = page(Contents(), tmp_path)
    sections = re.findall(r'<section id="\w+">.*?</section>', prose, re.S)
    assert len(sections) == 8 and "<figure" not in prose
    assert all('class="empty"' in section for section in sections)


@pytest.mark.parametrize("part", [f.name for f in dataclasses.fields(Contents)])
def test_any_part_may_be_missing(part, tmp_path):
    empty = {"machine": {}, "training": None, "verification": {}}.get(part, [])
    render(dataclasses.replace(gpu_contents(), **{part: empty}), tmp_path / "index.html")


def test_bare_records_do_not_break_the_page(tmp_path):
    plain = measurement("triton", 10.0, 8.0)
    missing = dict.fromkeys(("limit_us", "share_of_ceiling", "error", "host_us", "time_p20_us"))
    bare = dataclasses.replace(plain, **missing)
    nothing = {"time_us": 0.0, "share_of_ceiling": 0.0, "ratio_to_best_peer": 0.0, "flops": 0.0, "bytes_moved": 0}
    zero = dataclasses.replace(plain, implementation="cuda", **nothing)
    training = {"device": "cpu", "train_loss": [1.0], "test_loss": [], "test_accuracy": []}
    contents = Contents(
        measurements=[bare, zero], verification={"results": [{"status": "fail"}]}, compiled=[{}], training=training
    )
    _, prose = page(contents, tmp_path)
    assert "0 of 1" in prose


def test_what_comes_from_records_is_escaped(tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    contents = gpu_contents()
    contents.machine = {"gpu": hostile, hostile: {hostile: hostile}}
    contents.measurements = [
        dataclasses.replace(
            m, operator=hostile, implementation=m.implementation + hostile, workload=hostile, best_peer=hostile
        )
        for m in row_operator("softmax", "forward", 2)
    ]
    contents.ceilings = [dataclasses.replace(m, implementation=hostile, commit=hostile) for m in ceilings()]
    contents.verification["results"] = [
        {k: hostile for k in r} | {"status": "fail", "error": 2.0} for r in verification()["results"][:3]
    ]
    contents.compiled = [{k: hostile for k in ("operator", "implementation", "kernel", "arch", "reason")}]
    contents.findings = [{k: hostile for k in ("name", "status", "found", "fix", "group")}]
    contents.training = (contents.training or {}) | {"job": hostile, "hardware": hostile}
    text, _ = page(contents, tmp_path)
    assert "<script>alert" not in text and "<img" not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text and "\\u003cscript\\u003ealert(1)" in text


def test_surviving_mutant_is_bad_news(tmp_path):
    contents = gpu_contents(failures=False)
    contents.verification["mutants_survived"] = 1
    _, prose = page(contents, tmp_path)
    assert "1 got through: this verification cannot be trusted" in prose and '<div class="bad"><dt>Right' in prose


def test_hundreds_of_measurements_stay_below_three_megabytes(tmp_path):
    contents = gpu_contents()
    contents.measurements = [
        m
        for i in range(7)
        for m in row_operator(f"operator_{i}", "forward", 2) + row_operator(f"operator_{i}", "backward", 3)
    ]
    assert len(contents.measurements) > 800
    assert render(contents, tmp_path / "index.html").stat().st_size < 3_000_000


def test_newest_of_two_measurements_counts(tmp_path):
    old, new = measurement("triton", 111.0, 50.0), measurement("triton", 222.0, 50.0)
    _, prose = page(Contents(measurements=[old, new]), tmp_path)
    assert "222" in prose and ">111<" not in prose


def test_charts_are_not_loaded_for_the_tables():
    code = "import sys, weft.report.tables; sys.exit('bokeh' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_quantities():
    assert [figures(x) for x in (0.01234, 4.26, 96.11, 1234.5, 0)] == ["0.0123", "4.26", "96.1", "1,234", "0"]
    assert [figures(x) for x in (None, float("nan"), "text")] == ["–"] * 3
    assert si(4.26e12, "B/s") == "4.26\u202fTB/s" and si(999.9e9, "B/s") == "1.00\u202fTB/s"
    assert workload_key("M=8,N=4096") < workload_key("M=8,N=32768") < workload_key("M=16,N=1")


# The tables of the docs


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
    assert (
        first["cuda: share of ceiling"] == "95.7\u202f%"
        and second["cuda (µs)"] == "–" == second["cuda: share of ceiling"]
    )
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
    text = refresh(path, store)
    ceiling, rungs, nothing, narrow = text.split(END)[:4]
    assert "| copy 1:1 | bandwidth | 4.26\u202fTB/s |" in ceiling and ceiling.index("4:3") < ceiling.index(
        "bf16 matrix"
    )
    assert "| ladder-1-naive |" in rungs and "triton (µs)" not in rungs
    assert "*No measurements yet.*" in nothing
    assert "fp32" in narrow and "bf16" not in narrow


def test_a_time_of_an_earlier_run_is_marked():
    """A ratio is within a run: a peer that looks faster beside it may have been timed on another day."""
    rows = [
        measurement("triton", 100.0, 90.0, ("torch", 102.0), run="b", time="2026-11-23T10:00:00Z"),
        measurement("torch", 102.0, 90.0, run="b", time="2026-11-23T10:00:00Z"),
        measurement("liger", 98.0, 90.0, run="a", time="2026-11-22T10:00:00Z"),
    ]
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
SMALL_BACKWARD = Dispatch(Call, EMPTY)
"""


def test_table_of_kernels_is_read_from_the_dispatch_tables(tmp_path, write):
    write(tmp_path / "dispatch.py", DISPATCH)
    write(tmp_path / "add.py", "TABLE = Dispatch(Call, EMPTY)\nEMPTY = Route('torch', lambda c: c.empty, 'nothing')")
    rows = kernels.table(tmp_path).splitlines()
    assert rows[0] == "| direction | kernel | when | why |" and rows[2:] == [
        "| forward | cuda | sm_90 or newer, `c.n >= 16384 or c.a \\| c.b`, unless `cluster_unsupported` | read once |",
        "|  | triton | `is_long` | rows |",
        "|  | torch | `c.empty` | an empty tensor: nothing to launch |",
        "|  | torch | otherwise | a copy would be needed |",
        "| small backward | torch | `c.empty` | an empty tensor: nothing to launch |",
        "| add: table | torch | `c.empty` | nothing |",
    ]
    write(tmp_path / "more.py", "FORWARD = Dispatch(Call, *routes(3))")
    with pytest.raises(ValueError, match=r"more.py:1: .*routes\(3\).* should be written as Route"):
        kernels.table(tmp_path)
    with pytest.raises(ValueError, match="assigns a Dispatch"):
        kernels.table(tmp_path / "none")


def test_where_all_are_wrong_nothing_is_the_fastest():
    wrong = {"workload": "M=8,N=8", "details": {"wrong": "zeros"}}
    rows = [
        measurement("triton", 9.0, 8.0, **wrong),
        measurement("cuda", 7.0, 8.0, **wrong),
        measurement("torch", 8.0, 8.0),
    ]
    (row,) = (line for line in points_table(rows).splitlines() if "N=8`" in line)
    assert "9.00† | " in row and "| – |" in row and "**" not in row


def test_summary_takes_the_fastest_of_ours_and_says_where_it_is_least():
    def of(n, name, time, **fields):
        return measurement(name, time, 100.0, ("quack", 110.0), workload=f"M=8,N={n}", **fields)

    records = [
        of(256, "triton", 105.0), of(256, "torch", 50.0),
        of(512, "triton", 200.0), of(512, "cuda", 125.0),
        of(512, "triton", 80.0, cache="warm"),
        of(512, "ladder-1-naive", 70.0, ours=True), of(1024, "triton", 100.0),
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
    assert "gone" not in table
    assert never == "Not timed beside peers yet: `relu`."


OF = {"softmax": "softmax"}


def test_a_peer_that_was_faster_in_an_earlier_run_is_no_win_in_the_summary():
    ours = [
        measurement("triton", 100.0, 90.0, ("torch", 150.0), run="b", workload="M=8,N=8"),
        measurement("torch", 150.0, 90.0, run="b", workload="M=8,N=8"),
    ]
    alone = summary_table(ours, OF)
    assert "1.50× | 1.50× torch `M=8,N=8`" in alone and "‡" not in alone
    slower = measurement("liger", 160.0, 90.0, run="a", workload="M=8,N=8")
    assert summary_table([*ours, slower], OF) == alone
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
    text = refresh(
        document(tmp_path, "<!-- weft:host gpu=host-gpu -->", END),
        store,
    )
    assert "| operator | weft.ops (µs) | bare Triton launch (µs) | weft.ops to the bare launch |" in text
    assert "| add | 13.0 | 13.0 | 1.30× |" in text and "| mul | 12.0 |" in text


def test_markers_in_code_and_prose_are_left_alone(store, tmp_path):
    path = document(tmp_path, "```", MARKER, "shown", "```", "", f"Write `{MARKER}`.", "", END)
    assert refresh(path, store) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([MARKER], r"README.md:3: this table has no end"),
        ([MARKER, MARKER, END], r"README.md:4: a table opens before"),
        (["<!-- weft:tabel operator=softmax gpu=x -->", END], "did you mean 'table'"),
        (["<!-- weft:table operator=softmax gpus=x -->", END], "did you mean 'gpu'"),
        (["<!-- weft:table gpu=x -->", END], "lacks operator=…"),
        (["<!-- weft:table operator softmax -->", END], "should read"),
        (["<!-- weft:table operator=softmax gpu=another -->", END], r"unknown gpu .*\(there are: synthetic-gpu-9000\)"),
        ([MARKER.replace("direction=forward", "direction=sideways"), END], "unknown direction"),
        (["<!--weft:tabel gpu=x-->", END], "did you mean 'table'"),
        (["```", "never closed", MARKER, END], "code fence"),
    ],
)
def test_wrong_markers_are_refused_with_their_line(store, tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        refresh(document(tmp_path, *lines), store)


def test_cells_cannot_break_the_table():
    odd = measurement("a|b", 10.0, 5.0, versions={"x": "<b>"})
    table = points_table([odd])
    assert "a\\|b (µs)" in table and "&lt;b>" in table


def test_what_was_not_reached_is_not_said_in_green():
    nothing = verification(failures=False)
    for r in nothing["results"]:
        r["status"] = "unverifiable"
    tones = [tiles([], found, [])[1].tone for found in (verification(failures=False), nothing, verification())]
    assert tones == ["good", "plain", "bad"]


def test_more_than_the_limit_is_no_success():
    shares = [measurement("triton", 100.0, limit) for limit in (90.0, 160.0)]
    assert "measure again" not in tiles([], {}, shares[:1])[2].text
    assert tiles([], {}, shares)[2].tone == "bad" and "measure again" in tiles([], {}, shares)[2].text

"""The page shows what the records say, all of it, and needs nothing but itself."""

import dataclasses
import itertools
import logging
import re
from html.parser import HTMLParser

import pytest
from report_samples import ceilings, cpu_contents, gpu_contents, measurement, row_operator, vector_add, verification

from weft.report.page import Contents, render
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
    assert outside.addresses == [] and len(outside.ids) == len(set(outside.ids))
    assert "@import" not in prose and "url(" not in prose
    assert 'charset="utf-8"' in text and text.count("Bokeh.embed.embed_item(") == 1
    assert len(text.encode()) < 3_000_000
    charts = prose.count("What this means") - prose.count('<p class="meaning"') + prose.count("<figure")
    assert prose.count('role="img"') == charts
    assert "None" not in prose and "nan" not in re.findall(r"\b\w+\b", prose)


@pytest.fixture(scope="module")
def gpu_page(tmp_path_factory):
    return page(gpu_contents(), tmp_path_factory.mktemp("gpu"))


def test_page_says_what_the_records_say(gpu_page):
    _, prose = gpu_page
    assert "Synthetic GPU 9000" in prose and "3 of 4" in prose and "rms_norm is not: 1 check failed" in prose
    assert "weft verify rms_norm --workload M=8,N=682 --dtype bf16" in prose
    assert "Of 24 kernels made wrong on purpose (mutants), 24 were rejected" in prose
    assert "24 were rejected, 7 not tried in the time budget." in prose
    assert "move the caches" in prose and "580.65.06" in prose and "NVIDIA driver" not in prose
    assert "128\u202fKiB of shared memory, 99\u202fKiB allowed" in prose and "99.4\u202f%" in prose
    assert "No GPU was measured" not in prose


def test_every_measurement_is_in_the_table(gpu_page):
    contents, (_, prose) = gpu_contents(), gpu_page
    table = prose.split('class="sortable"')[1].split("</table>")[0]
    rows = re.findall(r"<tr( class=\"ours\")?><th scope=\"row\">.*?</tr>", table, re.S)
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
    assert "Roofs and points are the CPU's" in prose
    assert "weft's kernels were not timed beside a peer here." in prose.replace("&#39;", "'")
    assert "108 not verifiable here" in prose and "bf16 cannot be trusted in the interpreter" in prose


def test_empty_page_gives_a_reason_in_every_section(tmp_path):
    _, prose = page(Contents(), tmp_path)
    sections = re.findall(r'<section id="\w+">.*?</section>', prose, re.S)
    assert len(sections) == 8 and "<figure" not in prose
    assert all('class="empty"' in section for section in sections)


@pytest.mark.share(3)
@pytest.mark.parametrize("part", [f.name for f in dataclasses.fields(Contents)])
def test_any_part_may_be_missing(part, tmp_path):
    empty = {"machine": {}, "training": None, "verification": {}}.get(part, [])
    contents = dataclasses.replace(gpu_contents(), measurements=vector_add())
    render(dataclasses.replace(contents, **{part: empty}), tmp_path / "index.html")


def test_bare_records_do_not_break_the_page(tmp_path):
    plain = measurement("triton", 10.0, 8.0)
    missing = dict.fromkeys(("limit_us", "share_of_ceiling", "error", "host_us", "time_p20_us"))
    bare = dataclasses.replace(plain, **missing)
    nothing = {"time_us": 0.0, "share_of_ceiling": 0.0, "ratio_to_best_peer": 0.0, "flops": 0.0, "bytes_moved": 0}
    zero = dataclasses.replace(plain, implementation="cuda", **nothing)
    training = {"device": "cpu", "train_loss": [1.0], "test_loss": [], "test_accuracy": []}
    contents = Contents(measurements=[bare, zero], compiled=[{}], training=training)
    contents.verification = {"results": [{"status": "fail"}]}
    _, prose = page(contents, tmp_path)
    assert "0 of 1" in prose


def test_what_comes_from_records_is_escaped(tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    contents = gpu_contents()
    contents.machine = {"gpu": hostile, hostile: {hostile: hostile}}
    names = {"operator": hostile, "workload": hostile, "best_peer": hostile}
    rows = row_operator("softmax", "forward", 2)
    contents.measurements = [dataclasses.replace(m, implementation=m.implementation + hostile, **names) for m in rows]
    contents.ceilings = [dataclasses.replace(m, implementation=hostile, commit=hostile) for m in ceilings()]
    wrong = {"status": "fail", "error": 2.0}
    contents.verification["results"] = [dict.fromkeys(r, hostile) | wrong for r in verification()["results"][:3]]
    contents.compiled = [{k: hostile for k in ("operator", "implementation", "kernel", "arch", "reason")}]
    contents.findings = [{k: hostile for k in ("name", "status", "found", "fix", "group")}]
    contents.training = (contents.training or {}) | {"job": hostile, "hardware": hostile}
    text, _ = page(contents, tmp_path)
    assert "<script>alert" not in text and "<img" not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text and "\\u003cscript\\u003ealert(1)" in text


def test_surviving_mutant_is_bad_news(tmp_path):
    found = verification(failures=False) | {"mutants_survived": 1}
    _, prose = page(Contents(verification=found), tmp_path)
    assert "1 passed: this verification cannot be trusted" in prose and '<div class="bad"><dt>Right' in prose


@pytest.mark.share(2)
def test_hundreds_of_measurements_stay_below_three_megabytes(tmp_path):
    contents = gpu_contents()
    contents.measurements = []
    for i, (direction, passes) in itertools.product(range(7), (("forward", 2), ("backward", 3))):
        contents.measurements += row_operator(f"operator_{i}", direction, passes)
    assert len(contents.measurements) > 800
    assert render(contents, tmp_path / "index.html").stat().st_size < 3_000_000


def test_newest_of_two_measurements_counts(tmp_path):
    old, new = measurement("triton", 111.0, 50.0), measurement("triton", 222.0, 50.0)
    _, prose = page(Contents(measurements=[old, new]), tmp_path)
    assert "222" in prose and ">111<" not in prose


def test_what_was_not_reached_is_not_said_in_green():
    nothing = verification(failures=False)
    for r in nothing["results"]:
        r["status"] = "unverifiable"
    tones = [tiles([], found, [])[1].tone for found in (verification(failures=False), nothing, verification())]
    assert tones == ["good", "plain", "bad"]


def test_more_than_the_limit_is_no_success():
    shares = [measurement("triton", 100.0, limit) for limit in (90.0, 160.0)]
    assert tiles([], {}, shares[:1])[2].number.startswith("90.0")
    noisy = tiles([], {}, shares)[2]
    assert noisy.number == "–" and "Too noisy to judge: 1 point of 2" in noisy.text

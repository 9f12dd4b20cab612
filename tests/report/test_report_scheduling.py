"""The report's part on scheduling: the simulator's records as tables and charts, and a comparison that runs beside the
rest."""

import dataclasses
import json
import math
import re
import sys
import time

import pytest
from report_samples import CPU, cpu_contents
from where import ROOT

from weft.records import Store
from weft.report import comparison, growth, simulator
from weft.report.documents import refresh
from weft.report.page import render

END = "<!-- weft:end -->"


def line(order, jobs, nodes, cpu_s, load=0.7, **more):
    return {
        "benchmark": "simulate", "order": order, "placement": "best", "jobs": jobs, "nodes": nodes, "load": load,
        "asks": "GPUs", "cpu_s": cpu_s, "peak_memory_mib": 600.0, "machine": CPU, "commit": "0123456789ab",
        "time": "2026-11-20T10:00:00Z",
    } | more  # fmt: skip


def lines():
    """Two orders: fifo linear in jobs and flat in nodes, srtf with the power 1.5 of jobs."""
    made = [line("fifo", 10**p, n, 1e-6 * 10**p) for n in (10, 1000, 10_000) for p in (3, 4, 5, 6)]
    made += [line("srtf", 10**p, 10_000, 1e-8 * 10 ** (1.5 * p), peak_memory_mib=900.0) for p in (3, 4, 5, 6)]
    made += [line("fifo", 10**6, 10_000, 2.5, load=1.1), line("srtf", 10**5, 1000, 7.5, load=1.1)]
    return [*made, line("fifo", 10**6, 10_000, 30.0, asks="GPUs, cores", load=1.1)]


def run(order, mean_wait_h, stops=0, **waits):
    total = sum(waits.values())
    jobs, wait = 100, mean_wait_h * 3600
    return {
        "order": order, "placement": "best", "jobs": jobs, "completed": jobs, "nodes": 20, "gpus": 160,
        "generated": True, "jct": {"mean": wait + 3600.0, "p99": wait + 36000.0}, "queueing": {"mean": wait, "p99": 5 * wait},
        "wait_reasons": {name: jobs * wait * share / total for name, share in waits.items()}, "preemptions": stops,
        "cpu_s": 0.01,
    }  # fmt: skip


def scheduling():
    fifo = run("fifo", 8, priority=90, quota=0, capacity=9.9, gang=0.1)
    runs = [fifo, run("srtf", 0.5, 513, priority=0, quota=0, capacity=75, gang=25)]
    return {"records": lines(), "comparison": {"cluster": "20x8", "load": 0.9, "seed": 0, "runs": runs}}


def prose(contents, folder):
    text = render(contents, folder / "index.html").read_text(encoding="utf-8")
    text = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    return text.partition('<section id="scheduling">')[2].split("</section>")[0]


def with_scheduling(found):
    contents = cpu_contents()
    contents.scheduling = found
    return contents


# Records


def test_newest_record_of_a_point_counts_and_others_are_passed_over():
    old, new = line("fifo", 1000, 10, 1.0), line("fifo", 1000, 10, 2.0, asks=None)
    wrong = old | {"cpu_s": "fast"}, old | {"cpu_s": None}, old | {"jobs": 0}
    broken = [{}, *wrong, {"benchmark": "other"} | old, old | {"benchmark": "x"}]
    found = simulator.read([*broken[:4], broken[5], old, new])
    assert [t.cpu_s for t in found] == [2.0]
    assert simulator.read([line("fifo", 1000, 10, 1.0, peak_memory_mib=None)])[0].peak_memory_mib is None


def test_records_of_this_machine_come_before_those_measured_later():
    here, there = line("fifo", 1000, 10, 1.0), line("fifo", 1000, 10, 2.0, machine="other", time="2027-01-01T00:00:00Z")
    timed = simulator.read([there, here])
    assert len(timed) == 2 and [t.cpu_s for t in simulator.of_one_machine(timed, CPU)] == [1.0]
    assert [t.cpu_s for t in simulator.of_one_machine(timed, "a third")] == [2.0]
    assert simulator.of_one_machine([]) == []


def test_slopes_are_those_that_the_records_were_made_with():
    timed = simulator.read(lines())
    jobs, nodes = (simulator.growth(timed, along) for along in ("jobs", "nodes"))
    assert [(g.order, g.fixed) for g in jobs] == [("fifo", 10_000), ("fifo", 1000), ("fifo", 10), ("srtf", 10_000)]
    assert [round(g.slope, 9) for g in jobs] == [1, 1, 1, 1.5]
    assert {g.order for g in nodes} == {"fifo"} and all(math.isclose(g.slope, 0, abs_tol=1e-9) for g in nodes)
    assert simulator.growth(timed[:2], "jobs") == [] == simulator.growth([], "nodes")


# Tables of the docs


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "results")
    for each in lines():
        made.append(CPU, simulator.FILE, each)
    return made


def table(store, tmp_path, marker):
    path = tmp_path / "doc.md"
    path.write_text(f"{marker}\nOUTDATED\n{END}\n", encoding="utf-8")
    return refresh(path, store)


def test_speed_table_shows_the_largest_run_of_each_policy(store, tmp_path):
    text = table(store, tmp_path, "<!-- weft:simulator cpu=synthetic-cpu-2-cores of=speed -->")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
    head = ["1,000,000 jobs × 10,000 nodes", "CPU s at 70\u202f% load", "CPU s at 110\u202f% load"]
    assert rows[0] == [*head, "peak memory, MiB"]
    srtf = ["srtf", "10.0", "7.50 (100,000 jobs × 1,000 nodes)", "900"]
    assert rows[2:] == [["fifo", "1.00", "2.50", "600"], srtf, ["fifo, jobs ask GPUs, cores", "–", "30.0", "600"]]
    assert f"<sub>{CPU} · commit 0123456789ab · 2026-11-20 · CPU seconds" in text and "OUTDATED" not in text


def test_growth_table_has_a_column_an_order_and_says_the_slopes(store, tmp_path):
    text = table(store, tmp_path, "<!-- weft:simulator cpu=synthetic-cpu-2-cores of=growth -->")
    assert "| 10,000 | 10,000 | 0.0100 | 0.0100 |" in text and "| 1,000 | 10 | 0.00100 | – |" in text
    assert "1.50 (srtf, 10,000 nodes)" in text and "At 70\u202f% load" in text
    assert "30.0" not in text and "2.50" not in text


@pytest.mark.parametrize(("words", "message"), [
    ("cpu=nowhere of=speed", "unknown cpu"), ("cpu=synthetic-cpu-2-cores of=sped", "did you mean 'speed'"),
    ("of=speed", "lacks cpu=…"),
])  # fmt: skip
def test_wrong_markers_are_refused(store, tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        table(store, tmp_path, f"<!-- weft:simulator {words} -->")


def test_a_machine_without_such_records_has_no_table(store, tmp_path):
    store.append("bare", "softmax", {"operator": "softmax"})
    for of in ("speed", "growth"):
        assert "*No measurements yet.*" in table(store, tmp_path, f"<!-- weft:simulator cpu=bare of={of} -->")


# The picture


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_is_drawn_and_is_the_same_each_time(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    timed = simulator.read(lines())
    first, second = (growth.picture(tmp_path / f"{n}{suffix}", timed).read_bytes() for n in (1, 2))
    assert first == second and len(first) > 5000
    assert first.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_picture_of_nothing_or_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg"):
        growth.picture(tmp_path / "x.pdf", simulator.read(lines()))
    with pytest.raises(ValueError, match="no growth to draw"):
        growth.picture(tmp_path / "x.svg", simulator.read(lines()[:2]))
    assert list(tmp_path.iterdir()) == []


def test_guide_of_linear_growth_passes_through_the_middle_of_a_line():
    g = simulator.Growth("fifo", "jobs", 10, 0.7, ((10, 1.0), (1000, 100.0)))
    assert growth.linear(g, 1, 10_000) == ([1, 10_000], pytest.approx([0.1, 1000]))


# The section


def test_section_says_what_the_runs_and_the_records_say(tmp_path):
    text = prose(with_scheduling(scheduling()), tmp_path)
    assert "100 generated jobs" in text and "90\u202f% of the GPUs" in text and "20 nodes with 160 GPUs" in text
    rows = re.findall(r'<tr><th scope="row">(.*?)</tr>', text)
    assert re.findall(r">([^<]+)<", rows[0])[:5] == ["9.00", "18.0", "8.00", "40.0", "–"]
    assert "priority 90\u202f%, capacity 10\u202f%" in rows[0]
    assert "gang" not in rows[0], "less than half a per cent is not told"
    assert ">513<" in rows[1] and "capacity 75\u202f%, gang 25\u202f%" in rows[1]
    assert text.count("<figure") == 4 and "the lowest mean here has srtf" in text
    assert "--pictures page.html" in text and "another machine" not in text
    assert "slope 1.50" in text and "7.50 (100,000 jobs × 1,000 nodes)" in text


def test_records_of_another_machine_are_called_so(tmp_path):
    found = {"records": [line("fifo", 1000, 10, 1.0, machine="Elsewhere")]}
    text = prose(with_scheduling(found), tmp_path)
    assert "From records of another machine: Elsewhere" in text and "<figure" not in text
    assert "No comparison of policies" in text
    here = with_scheduling(found)
    here.machine = {"processor": "Elsewhere"}  # as weft.hardware.query names it
    assert "another machine" not in prose(here, tmp_path)


@pytest.mark.parametrize(("found", "told"), [
    ({"lacking": "numba: pip install 'weft[cluster]'"}, "the simulator needs numba: pip install 'weft[cluster]'"),
    ({"failed": "it was <late>"}, "No comparison of policies: it was &lt;late&gt;"),
    ({"comparison": {"runs": []}}, "python -m weft.cluster.demonstration"),
])  # fmt: skip
def test_section_says_why_it_is_empty(tmp_path, found, told):
    text = prose(with_scheduling({"records": []} | found), tmp_path)
    assert told in text.replace("&#39;", "'") and "No records of the simulator's speed" in text.replace("&#39;", "'")


def test_without_anything_there_is_no_section(tmp_path):
    text = render(cpu_contents(), tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Scheduling a cluster" not in text and "#scheduling" not in text


def test_nobody_waited_and_unknown_reasons(tmp_path):
    idle, odd = run("fifo", 0, capacity=1), run("las", 1, weather=1)
    comparison = {"load": 0.5, "seed": 1, "runs": [idle]}
    assert "No job waited under any policy" in prose(with_scheduling({"comparison": comparison}), tmp_path)
    assert "weather 100\u202f%" in prose(with_scheduling({"comparison": comparison | {"runs": [odd]}}), tmp_path)


def test_what_comes_from_records_is_escaped(tmp_path):
    hostile = "</script><script>alert(1)</script><img src=x>"
    found = scheduling()
    found["records"] = [each | {"order": hostile, "machine": hostile, "commit": hostile} for each in found["records"]]
    for each in found["comparison"]["runs"]:
        each["order"] = hostile
        each["wait_reasons"] = {hostile: 5.0}
    text = render(with_scheduling(found), tmp_path / "index.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text and "<img" not in text


# The comparison


@pytest.fixture
def answers(write, monkeypatch):
    """Writes the module that is run in place of the comparison."""
    return lambda code: monkeypatch.setenv("PYTHONPATH", str(write("answers.py", code).parent))


def test_the_comparison_runs_beside_and_gives_what_the_page_shows(answers, store):
    answer = json.dumps(scheduling()["comparison"])
    answers(f"import time\ntime.sleep(0.5)\nprint({answer!r})\n")
    with comparison.beside(store, "answers") as found:
        begin = time.perf_counter()
        got = found()
    assert time.perf_counter() - begin > 0.1, "it was begun, and waited for"
    assert got == scheduling()


@pytest.mark.parametrize(("code", "why"), [
    ("raise ValueError('no cluster')", "ValueError: no cluster"), ("import os; os.abort()", "status -6"),
    ("print('half an obj')", "status 0"),
])  # fmt: skip
def test_a_comparison_that_fails_costs_no_report(answers, store, code, why):
    answers(code)
    with comparison.beside(store, "answers") as found:
        got = found()
    assert why in got["failed"] and got["records"] == lines() and "comparison" not in got


def test_a_comparison_that_takes_too_long_is_ended(answers, store):
    answers("import time\ntime.sleep(60)\n")
    begin = time.perf_counter()
    with comparison.beside(store, "answers", longest_s=0.2) as found:
        assert "longer than a report waits" in found()["failed"]
    assert time.perf_counter() - begin < 10


def test_without_numba_it_says_what_to_install(monkeypatch, store):
    known = comparison.importlib.util.find_spec
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: None if name == "numba" else known(name))
    monkeypatch.setattr(comparison.subprocess, "Popen", lambda *a, **k: pytest.fail("nothing can run"))
    with comparison.beside(store) as found:
        assert found() == {"records": lines(), "lacking": "numba: pip install 'weft[cluster]'"}


def test_demonstration_gives_summaries_of_the_same_jobs():
    pytest.importorskip("numba")
    from weft.cluster import demonstration

    made = demonstration.demonstrate(("fifo", "fifo-skip"), jobs=300)
    json.dumps(made, allow_nan=False)
    first, second = made["runs"]
    assert first["jobs"] == second["jobs"] == first["completed"] == 300 and first["generated"] and first["gpus"] == 160
    assert first["gpu_s"] == second["gpu_s"] and first["jct"]["mean"] > second["jct"]["mean"]
    again = demonstration.demonstrate(("fifo",), jobs=300)["runs"][0]
    assert again["jct"] == first["jct"], "the same seed, the same jobs"


# The benchmark


def test_points_cover_the_table_and_the_growth_once(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import simulator_speed as speed

    points = speed.points()
    assert len(points) == len(set(points))
    for order in ("srtf", "las", "2d-las", "fifo", "fifo-skip", "sjf"):
        for load in (0.7, 1.1):
            assert (order, "best", 1_000_000, 10_000, load, speed.GPUS) in points
    for order in ("fifo-skip", "srtf"):
        grown = [p for p in points if p[0] == order and p[4:] == (0.7, speed.GPUS)]
        for nodes in (1000, 10_000):
            assert {p[2] for p in grown if p[3] == nodes} == {10**n for n in (3, 4, 5, 6)}
        assert {p[3] for p in grown if p[2] == 100_000} == {10**n for n in (1, 2, 3, 4, 5)}


def test_a_measured_point_is_a_record_that_the_tables_read(monkeypatch, tmp_path, capsys):
    pytest.importorskip("numba")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import simulator_speed as speed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_RESULTS", str(tmp_path / "results"))
    points = [("fifo", "best", jobs, 4, 0.7, speed.GPUS) for jobs in (50, 90)]
    monkeypatch.setattr(speed, "points", lambda: points)
    monkeypatch.setattr(sys, "argv", ["speed", "--save", "--jobs-at-most", "60"])
    speed.main()
    (timed,) = simulator.read(Store().lines(name=simulator.FILE))
    assert (timed.order, timed.jobs, timed.nodes, timed.load) == ("fifo", 50, 4, 0.7) and 0 < timed.cpu_s < 5
    assert "fifo" in capsys.readouterr().out and timed.machine and dataclasses.asdict(timed)["asks"] == "GPUs"

"""Pictures of simulated clusters: their numbers against the plainest computation, odd results, and the page in a browser."""

import base64
import dataclasses
import gzip
import json
import re

import numpy as np
import pytest
from chromium import draw, fits, tip
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("bokeh")

from weft.cluster import Cluster, Jobs, allocations, generate, metrics, simulate
from weft.cluster.pictures import compare, distributions, gantt, page, series, time_axis, window, write
from weft.cluster.pictures.heat_map import COLUMNS, heat
from weft.cluster.pictures.lanes import lanes
from weft.drawing import palette


def examples(*drawn):
    return lambda test: settings(max_examples=60, deadline=None)(given(*drawn)(test))


@st.composite
def results(draw):
    """Schedules of a few jobs: gangs, pods, jobs of no GPU, of no duration, and some that can never run."""
    count = draw(st.integers(1, 24))

    def column(low, high):
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    gpus, pods = np.array(column(0, 12)), np.array(column(0, 3))
    pods[gpus % np.maximum(pods, 1) != 0] = 0
    cluster = Cluster.parse(draw(st.sampled_from(["1x4", "3x4", "2x4,2x2", "1x1,1x8"])))
    placement = draw(st.sampled_from(["best", "worst", "first", "counted", "consolidate"]))
    jobs = Jobs(np.sort(column(0, 9)), column(0, 6), gpus, pods=pods)
    return simulate(jobs, cluster, draw(st.sampled_from(["fifo", "fifo-skip", "sjf"])), placement)


def interrupted(result):
    """As if only the first half of the starts had been reached."""
    start = result.start.copy()
    late = start > np.median(start[~np.isnan(start)]) if (start >= 0).any() else np.isnan(start)
    start[late] = np.nan
    held, waited = result.stretches, result.waited.copy()
    where, end = held.where.copy(), start + result.jobs.duration
    where[np.repeat(late, np.diff(held.slot))] = -1
    waited[late] = 0
    held = dataclasses.replace(held, begin=start, end=end, where=where)
    return dataclasses.replace(result, start=start, end=end, stretches=held, waited=waited, complete=False)


@examples(results())
def test_pieces_are_what_jobs_requested(result):
    held = allocations.of(result)
    given = np.bincount(held.job, weights=held.gpus, minlength=len(result.jobs))
    assert (given == np.where(~np.isnan(result.start) & (result.jobs.duration > 0), result.jobs.gpus, 0)).all()


def owned_by(held, runs) -> list[set[int]]:
    """The lanes of each piece."""
    owned = [set() for _ in range(len(held))]
    for piece, first, count in zip(runs.piece, runs.first, runs.count, strict=True):
        owned[piece] |= set(range(first, first + count))
    return owned


@examples(results())
def test_no_gpu_is_held_twice_and_the_lowest_free_ones_are_taken(result):
    held, capacity = allocations.of(result), result.cluster.gpus
    owned = owned_by(held, lanes(held, capacity))
    for p in range(len(held)):
        assert len(owned[p]) == held.gpus[p] and max(owned[p]) < capacity[held.node[p]]
        beside = [q for q in range(len(held)) if held.node[q] == held.node[p]]
        at_start = [q for q in beside if held.start[q] <= held.start[p] < held.end[q]]
        assert all(not owned[p] & owned[q] for q in at_start if q != p)
        taken = set().union(*(owned[q] for q in at_start if (held.start[q], q) < (held.start[p], p)))
        assert owned[p] == set(sorted(set(range(capacity[held.node[p]])) - taken)[: held.gpus[p]])


def test_a_node_that_gave_too_much_is_an_error():
    columns = ([0, 1], [0, 1], [0, 0], [3, 2], [3000, 2000], [0, 0], [0.0, 1.0], [2.0, 2.0])
    held = allocations.Allocations(*(np.array(c) for c in columns))
    with pytest.raises(ValueError, match="node 0 has 4 GPUs and gave more at once to job 1"):
        lanes(held, np.array([4]))


@pytest.mark.parametrize("seed", range(12))
def test_shares_lie_on_their_gpus_and_never_on_each_other(seed):
    g = np.random.default_rng(seed)
    gpus = g.choice([1, 1, 1, 2, 4], 60)
    milli = np.where(gpus == 1, g.choice([125, 250, 500, 700, 1000], 60), 1000)
    jobs = Jobs(np.sort(g.uniform(0, 30, 60)).round(), g.uniform(0.5, 20, 60).round(1), gpus, milli=milli)
    result = simulate(jobs, Cluster.parse("2x4"), "fifo-skip", ("best", "fgd", "first")[seed % 3])
    held = allocations.of(result)
    runs = lanes(held, result.cluster.gpus)
    assert runs.unit == 1000 and held.milli.tolist() == (held.gpus * jobs.milli[held.job]).tolist()
    owned = owned_by(held, runs)
    for p in range(len(held)):
        each = int(jobs.milli[held.job[p]])
        counted = dict(zip(*np.unique(np.array(sorted(owned[p])) // 1000, return_counts=True), strict=True))
        assert counted == {gpu: each for gpu in range(4) if held.on[p] >> gpu & 1}
        beside = (held.node == held.node[p]) & (held.start < held.end[p]) & (held.start[p] < held.end)
        assert all(not owned[p] & owned[q] for q in np.flatnonzero(beside) if q != p)
    found = series.allocated(held)
    for moment in np.unique(held.start):
        running = (held.start <= moment) & (moment < held.end)
        assert found.at(np.array([moment]))[0] == held.milli[running].sum() / 1000


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_shares_are_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'weft[pictures]'")
    shares = simulate(Jobs([0, 0, 0], [5, 5, 5], [1, 1, 0], milli=[500, 500, 500]), Cluster.parse("1x1"))
    write(tmp_path / f"a{suffix}", [shares])
    assert (tmp_path / f"a{suffix}").stat().st_size > 10_000


def plain(result, moment):
    """Allocated GPUs, waiting jobs, GPUs that those ask, and free GPUs on partly used nodes, just after a moment."""
    held, jobs = allocations.of(result), result.jobs
    running = (held.start <= moment) & (moment < held.end)
    used = np.bincount(held.node[running], weights=held.gpus[running], minlength=len(result.cluster))
    able = np.array([j not in result.unschedulable for j in range(len(jobs))])
    waits = able & (jobs.submit <= moment) & ~(result.start <= moment)  # NaN: not started
    free = result.cluster.gpus - used
    return used.sum(), waits.sum(), jobs.gpus[waits].sum(), free[(used > 0) & (free > 0)].sum()


@examples(results(), st.booleans())
def test_series_are_what_a_plain_count_says(result, cut):
    result = interrupted(result) if cut else result
    for number, each in enumerate(vars(series.over_time(result, allocations.of(result))).values()):
        assert [plain(result, moment)[number] for moment in each.edge[:-1]] == each.mean.tolist()


@examples(results(), st.integers(1, 7))
def test_bins_keep_the_mean_and_the_most(result, points):
    held = allocations.of(result)
    exact, few = series.over_time(result, held), series.over_time(result, held, points)
    for fine, coarse in zip(vars(exact).values(), vars(few).values(), strict=True):
        assert len(coarse.mean) <= max(points, 1) and coarse.overall == pytest.approx(fine.overall)
        for a, b, mean, most in zip(coarse.edge[:-1], coarse.edge[1:], coarse.mean, coarse.most, strict=True):
            # of each step in the bin
            part = np.clip(np.minimum(fine.edge[1:], b) - np.maximum(fine.edge[:-1], a), 0, None)
            assert mean == pytest.approx((part * fine.mean).sum() / (b - a))
            near = (fine.edge[1:] > a - 1e-9) & (fine.edge[:-1] < b + 1e-9)  # an edge may be rounded past a step
            assert fine.most[part > 1e-9].max() <= most <= fine.most[near].max()


@examples(results())
def test_the_map_has_the_same_gpu_seconds_as_the_schedule(result):
    held, (begin, end) = allocations.of(result), time_axis.span(result)
    found = heat(held, result.cluster.gpus, begin, end)
    assert found.nodes_each == 1
    for node, row in enumerate(found.share):
        mine = held.node == node
        length = np.minimum(held.end[mine], end) - np.minimum(held.start[mine], end)
        held_s = row.sum() * (end - begin) / COLUMNS * result.cluster.gpus[node]
        assert held_s == pytest.approx(float((held.gpus[mine] * length).sum()))


@examples(results(), st.integers(1, 12))
def test_what_a_page_holds_is_bounded_and_has_no_gaps(result, most):
    held, nodes = allocations.of(result), len(result.cluster)
    kept = window.bounded(held, nodes, most)
    on_first = (held.node == held.node.min(initial=nodes)).sum()
    assert len(kept.rows) <= most and (len(kept.rows) > 0 or on_first > most or not len(held))
    inside = (held.start < kept.until) & (held.end > kept.since) & (held.node < kept.nodes)
    assert np.flatnonzero(inside).tolist() == kept.rows.tolist()


def test_large_nodes_are_shown_in_parts():
    divided = window.blocks(Cluster.parse("2x8,1x150,1x0,1x64"))
    assert divided.offset.tolist() == [0, 8, 16, 80, 144, 166, 166, 230]
    assert divided.node.tolist() == [0, 1, 2, 2, 2, 3, 4] and divided.base.tolist() == [0, 0, 0, 64, 128, 0, 0]


def test_quantiles_of_many_values_are_some_of_them():
    values = np.random.default_rng(0).lognormal(0, 2, 10_000)
    value, share = distributions.quantiles(values)
    assert len(value) == distributions.MOST_QUANTILES and value[-1] == values.max() and share[-1] == 1
    assert all((values <= v).mean() == pytest.approx(s) for v, s in zip(value, share, strict=True))


def test_size_classes_divide_the_jobs():
    gpus = np.arange(0, 20)
    found = metrics.size_classes(gpus)
    assert (sum(mask.astype(int) for mask in found.values()) == 1).all()
    assert [gpus[mask].max() for mask in found.values()] == [1, 8, 19]


def test_runs_with_other_seeds_are_one_policy():
    cluster = Cluster.parse("4x4")
    jobs = generate(60, cluster, load=1.2, seed=1, sizes={1: 0.5, 4: 0.5})
    runs = [simulate(jobs, cluster, "fifo-skip", "best", ties="random", seed=seed) for seed in range(3)]
    found = compare.policies([*runs, simulate(jobs, cluster, "fifo", "counted")])
    assert [(policy.name, len(policy.runs)) for policy in found] == [("fifo-skip, best", 3), ("fifo, counted", 1)]
    assert found[0].statistics("jct")["mean"] == [pytest.approx(float((r.end - jobs.submit).mean())) for r in runs]
    other = compare.policies([runs[0], simulate(jobs, Cluster.parse("8x4"), "fifo-skip", "best")])
    assert [policy.name for policy in other] == ["fifo-skip, best, 16 GPUs", "fifo-skip, best, 32 GPUs"]


@pytest.mark.parametrize(("seconds", "words"), [(0, "0 s"), (5400, "90.0 min"), (90000, "25.0 h"), (None, "–")])
def test_seconds_are_written_with_units(seconds, words):
    assert time_axis.text(seconds).replace("\u202f", " ") == words


def test_colours_of_the_map_leave_those_of_the_page_alone():
    colours = dict(gantt.ramp())
    assert len(colours) == gantt.STEPS
    assert all(palette.TO_DARK.get(light, dark) == dark for light, dark in colours.items())


def run(count=80, nodes="4x8", order="fifo", placement="best", **options):
    cluster = Cluster.parse(nodes)
    jobs = generate(count, cluster, load=1.1, sigma=1.0, seed=2, sizes={1: 0.5, 4: 0.3, 16: 0.2})
    return simulate(jobs, cluster, order, placement, **options)


def jobs_of(*rows):
    return Jobs(*(np.array(column) for column in zip(*rows, strict=True)))


ODD = {
    "one job": lambda: simulate(jobs_of((0.0, 5.0, 1)), Cluster.parse("1x1")),
    "one job that takes no time": lambda: simulate(jobs_of((0.0, 0.0, 1)), Cluster.parse("1x1")),
    "one job without a GPU": lambda: simulate(jobs_of((3.0, 5.0, 0)), Cluster.parse("1x1")),
    "no job": lambda: simulate(Jobs(np.zeros(0), np.zeros(0), np.zeros(0, int)), Cluster.parse("2x8")),
    "none can run": lambda: simulate(jobs_of((0.0, 5.0, 64), (1.0, 5.0, 65)), Cluster.parse("1x8")),
    "some can never run": lambda: simulate(jobs_of((0.0, 5.0, 64), (1.0, 5.0, 1)), Cluster.parse("1x8")),
    "nobody waited": lambda: simulate(jobs_of((0.0, 5.0, 1), (9.0, 5.0, 8)), Cluster.parse("1x8")),
    "interrupted": lambda: interrupted(run()),
    "a node": lambda: run(30, "1x16"),
    "nodes without GPUs": lambda: simulate(jobs_of((0.0, 5.0, 0), (1.0, 5.0, 2)), Cluster.parse("2x0,1x2")),
    "counted": lambda: run(placement="counted"),
    "submitted together": lambda: simulate(jobs_of(*[(7.0, 5.0, 2)] * 9), Cluster.parse("2x4")),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("case", ODD)
def test_odd_results_have_a_page(case):
    result = ODD[case]()
    html = page([result])
    ran = bool((~np.isnan(result.start)).any())
    assert ("No job ran" in html) == (not ran) and ('<figure class="chart">' in html) == ran
    assert ("can never run here" in html) == bool(result.unschedulable)
    assert ("<b>Interrupted.</b>" in html) == (not result.complete)


def test_odd_results_can_be_compared():
    html = page([ODD[case]() for case in ("none can run", "one job", "no job")])
    assert html.count('<td class="n">–</td>') == 2 * (8 + 2), "no numbers where no job ran"
    assert "No job ran under any" in page([ODD["none can run"](), ODD["no job"]()])


def test_names_of_jobs_and_titles_cannot_break_out():
    hostile = "</script><img src=x onerror=alert(1)>"
    result = run(5)
    result.jobs.id = [hostile] * 5
    result.jobs.tenants = (hostile, "b")
    assert hostile not in page([result], title=hostile)


def unpacked(html, name):
    stored = json.loads(re.search(r'class="data-of-bars">(.*?)</script>', html, re.S)[1])
    raw = gzip.decompress(base64.b64decode(stored[name]["data"]))
    return np.frombuffer(raw, {"Uint32": "<u4", "Float32": "<f4"}[stored[name]["kind"]])


def test_a_large_result_is_one_small_page_with_every_bar():
    result = run(20_000, "200x8", "fifo-skip")
    html = page([result])
    assert len(html) < 3_000_000
    held = allocations.of(result)
    assert unpacked(html, "count").sum() == held.gpus.sum()
    start = unpacked(html, "start")[unpacked(html, "job")]
    assert (np.diff(start) >= 0).all(), "the page's script stops at the first bar beyond the window"


@examples(results(), st.integers(1, 5))
def test_the_first_window_is_inside_the_cluster(result, most):
    held = allocations.of(result)
    found = gantt.gantt(result, held, most) if len(held) else None
    if found:
        first = found.facts["window"]
        assert 0 <= first["block"] < first["block"] + first["blocks"] <= len(window.blocks(result.cluster).node)
        assert first["from"] < first["to"]


def test_the_legend_of_a_comparison_counts_jobs_of_a_run():
    results = [run(100, order=order, seed=seed) for order, seeds in (("fifo", 3), ("sjf", 1)) for seed in range(seeds)]
    chart = compare.charts(compare.policies(results))[-1]
    assert [label for _, label in chart.legend] == ["fifo, best (100 jobs, 3 runs)", "sjf, best (100 jobs)"]


def test_write_goes_by_the_suffix(tmp_path):
    assert write(tmp_path / "new" / "a.html", [run(9)]).read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(ValueError, match=r"expected a name that ends in \.html, \.png or \.svg"):
        write(tmp_path / "a.pdf", [run(9)])
    with pytest.raises(ValueError, match="no result"):
        write(tmp_path / "b.html", [])


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_static_overviews(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'weft[pictures]'")
    path = write(tmp_path / f"a{suffix}", [ODD["none can run"](), run(order="sjf", placement="counted")])
    assert path.read_bytes().startswith(magic)


def test_compared_overviews_share_their_axes(tmp_path, monkeypatch):
    """A policy after which jobs wait longer, on fewer GPUs, beside one after which nobody waits."""
    figure = pytest.importorskip(
        "matplotlib.figure", reason="matplotlib is not installed: pip install 'weft[pictures]'"
    )
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    jobs = jobs_of(*((float(k), 50.0, 4) for k in range(12)))
    slow, fast = (simulate(jobs, Cluster.parse(nodes)) for nodes in ("1x4", "12x4"))
    for results in ([slow, fast], [fast, slow]):
        write(tmp_path / "a.png", results)
        axes = np.array(drawn.pop().axes).reshape(4, 2)
        for row in axes:
            assert row[0].get_xlim() == row[1].get_xlim() and row[0].get_ylim() == row[1].get_ylim()
        begin, end = time_axis.span(slow)
        _, length = time_axis.unit(end - begin)
        assert axes[0, 0].get_xlim() == axes[2, 0].get_xlim() == (0, (end - begin) / length)
        assert axes[0, 0].get_ylim() == (48, 0) and axes[1, 0].get_ylim()[1] > 48 and axes[2, 0].get_ylim()[1] > 10


def test_the_page_draws_moves_and_fetches_nothing(visit, tmp_path):
    results = [run(1000, "40x8"), *(run(100, order="fifo-skip", ties="random", seed=seed) for seed in (0, 1))]
    page = visit(write(tmp_path / "a.html", results), 400)
    assert page.locator(".plot").count() == 3 + (1 + 1 + 4 + 3 + 2) + (1 + 4 + 3 + 2)
    plots = page.locator("#comparison .plot, details[open] .plot")
    assert plots.count() == 3 + 11
    draw(page, plots)
    assert fits(page) and page.locator("figure.chart .meaning").count() == page.locator(".plot").count()

    status, bars, heat_map = page.locator("[role=status]").first, page.locator("#bars-1"), page.locator("#map-1")
    first = status.text_content()
    assert re.match(r"\d+ bars: node-0 to node-7, ", first)
    page.get_by_role("button", name="after").first.click()
    assert " bars: node-8 to node-15, " in status.text_content()
    page.get_by_role("button", name="later").first.click()
    assert status.text_content().split(", ")[1] != first.split(", ")[1]

    heat_map.scroll_into_view_if_needed()
    box = heat_map.bounding_box()  # the middle of time, near the last nodes
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 70)
    page.wait_for_function("() => !document.querySelector('[role=status]').textContent.includes('node-8 to')")
    assert int(re.search(r"node-(\d+) to", status.text_content())[1]) > 15

    bars.scroll_into_view_if_needed()
    shown = tip(page, bars, [(150 + 9 * step, 40 + 20 * step) for step in range(12)])
    assert all(word in shown for word in ("job", "GPUs", "waited", "runs", "node-"))


def test_a_window_far_from_the_first_arrival_has_days_and_clock_times(visit, tmp_path):
    """Of four months; the many jobs of an hour, ten minutes each, arrive on day 35 from 15:00 on."""
    submit = np.concatenate(([0.0], 35.625 * 86400 + np.arange(600) * 6.0, [120 * 86400.0]))
    result = simulate(Jobs(submit, np.full(602, 600.0), np.ones(602, int)), Cluster.parse("20x8"), "fifo")
    page = visit(write(tmp_path / "a.html", [result]), 400)
    draw(page, page.locator("#bars-0"))
    page.wait_for_function(
        "() => document.querySelector('[role=status]').textContent.includes(' to ')"
    )  # after the bars
    status = page.locator("[role=status]").first.text_content().replace("\u202f", " ")
    assert re.search(r"35 d 15:\d\d to 35 d 15:\d\d$", status)
    axis = (
        "() => Bokeh.documents.flatMap(d => d.roots()).find(r => r.below?.[0]?.axis_label?.includes('h:min')).below[0]"
    )
    label, ticks = page.evaluate(f"() => (a => [a.axis_label, [...a.major_label_overrides.values()]])(({axis})())")
    assert label == "time since the first job arrived (days, h:min)" and 2 <= len(ticks) <= 5
    assert re.fullmatch(r"35\u202fd 15:\d\d", ticks[0]) and all(re.fullmatch(r"15:\d\d", each) for each in ticks[1:])

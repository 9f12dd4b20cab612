"""Generated traces: the numbers that were asked for come out, a fit gives back what a trace was like, and files of both."""

import dataclasses
import functools
import json
import math
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_traces import TRACES, with_traces

from weft.cluster import Cluster, Jobs, generate, trace
from weft.cluster.files import trace_writer
from weft.cluster.files.text import TraceError
from weft.cluster.synthetic import profile_file
from weft.cluster.synthetic.arrivals import Arrivals
from weft.cluster.synthetic.distributions import LogNormal, Quantiles
from weft.cluster.synthetic.fit import fit
from weft.cluster.synthetic.profile import Profile, Request, Size, Tenant, campaigns, stated

DAY = tuple(1.0 + (9 <= hour < 18) * 4.0 for hour in range(24))
WEEK = (3.0, 3.0, 3.0, 3.0, 2.0, 0.0, 1.0)
RICH = Profile(
    {
        "1": Size(0.7, (Request(1, milli=500, cpu=4000, types=("A", "B"), share=3), Request(1)), LogNormal(100.0, 1.0)),
        "8": Size(
            0.3, (Request(8, pods=2, gpu_memory=40.0, memory=1024, priority=2.0),),
            Quantiles((0.1, 0.5, 0.9), (10.0, 10.0, 1000.0)), Quantiles((0.0, 1.0), (1.0, 4.0)),
        ),
    },
    {"a": Tenant(3.0), "b": Tenant(1.0, {"8": 1.0}, {"8": LogNormal(7.0, 0.0)})},
    Arrivals(500.0, DAY, WEEK, 0.5, 0.5, True), 0.6, 0.5,
)  # fmt: skip


def same(a: Jobs, b: Jobs) -> bool:
    """The same rows, whatever indices their tenants and types have."""

    def words(jobs):
        return [jobs.tenants[t] for t in jobs.tenant], [jobs.type_sets[t] for t in jobs.types]

    plain = [name for name in Jobs.columns() if name not in ("types", "tenant")]
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in plain) and words(a) == words(b)


def chi_square(found, expected) -> float:
    """Standard deviations beyond the mean of the statistic, by Wilson and Hilferty."""
    degrees = (expected > 0).sum() - 1
    statistic = ((found - expected) ** 2)[expected > 0] / expected[expected > 0]
    return ((statistic.sum() / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=300), st.lists(st.floats(-6, 6), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_fitted_curve_stays_within_its_sample_and_ascends(sample, z):
    values = Quantiles.of(np.array(sample)).at(np.sort(z))
    assert (np.diff(values) >= -1e-6).all()
    assert min(sample) - 1e-3 <= values[0] * (1 + 1e-9) and values[-1] <= max(sample) * (1 + 1e-9) + 1e-3


@pytest.mark.parametrize("of", [LogNormal(50.0, 1.2), Quantiles((0.2, 0.5, 0.9), (0.0, 10.0, 9000.0))])
def test_the_mean_is_that_of_what_is_drawn(of):
    drawn = of.at(np.random.default_rng(1).standard_normal(400_000))
    assert abs(drawn.mean() - of.mean) < 4 * drawn.std() / math.sqrt(len(drawn))


def test_modes_and_the_longest_survive_a_fit():
    sample = np.concatenate((np.full(700, 60.0), np.full(290, 86_400.0), np.full(10, 2e6)))
    curve = Quantiles.of(sample)
    drawn = curve.at(np.random.default_rng(0).standard_normal(100_000))
    for value, share in ((60.0, 0.7), (86_400.0, 0.29), (2e6, 0.01)):
        assert abs(np.isclose(drawn, value).mean() - share) < 0.012
    assert curve.mean == pytest.approx(sample.mean(), rel=0.1)


def test_arrivals_follow_hour_and_weekday():
    submit = Arrivals(hours=DAY, weekdays=WEEK).draw(200_000, 0.05, np.random.default_rng(5))
    whole = submit[submit < submit[-1] // (7 * 86_400) * (7 * 86_400)]
    found = np.bincount((whole // 3600).astype(int) % 168, minlength=168)
    expected = np.outer(WEEK, DAY).ravel()
    assert (found[expected == 0] == 0).all() and chi_square(found, expected / expected.sum() * len(whole)) < 3.5
    assert chi_square(found, np.full(168, len(whole) / 168)) > 100  # the same test tells a constant rate apart
    assert len(whole) == pytest.approx(0.05 * (submit[-1] // 604_800) * 604_800, abs=4 * math.sqrt(len(whole)))


def test_without_factors_it_is_a_poisson_process():
    gaps = np.diff(Arrivals().draw(100_000, 2.0, np.random.default_rng(2)))
    assert abs(gaps.mean() - 0.5) < 4 * 0.5 / math.sqrt(len(gaps))
    edges = -0.5 * np.log1p(-np.arange(20) / 20)
    assert chi_square(np.histogram(gaps, [*edges, np.inf])[0], np.full(20, len(gaps) / 20)) < 3.5


def test_bursts_have_the_requested_variance_and_correlation():
    submit = Arrivals(burst=2.0, hold=0.5).draw(300_000, 20 / 3600, np.random.default_rng(3))
    counts = np.bincount((submit // 3600).astype(int))[:-1].astype(float)
    mean = counts.mean()
    assert mean == pytest.approx(20, rel=0.1) and (counts.var() - mean) / mean**2 == pytest.approx(2.0, rel=0.15)
    assert np.corrcoef(counts[1:], counts[:-1])[0, 1] == pytest.approx(0.5 * 2 / (2 + 1 / 20), abs=0.06)


@pytest.mark.parametrize("burst", [0.0, 1.5])
def test_arrivals_ascend_over_chunks_and_empty_hours(burst):
    few = Arrivals(hours=(0.0,) * 23 + (1.0,), burst=burst).draw(300, 1 / 86_400 / 20, np.random.default_rng(4))
    assert (np.diff(few) >= 0).all() and len(few) == 300
    assert (few // 3600 % 24 == 23).all() and few[-1] > 3 * 10_080 * 3600


def test_a_level_is_held_over_the_end_of_a_chunk(monkeypatch):
    monkeypatch.setattr("weft.cluster.synthetic.arrivals.CHUNK", 168)
    submit = Arrivals(burst=1.0, hold=0.95).draw(400_000, 20 / 3600, np.random.default_rng(1))
    counts = np.bincount((submit // 3600).astype(int))
    last = np.arange(167, len(counts) - 1, 168)
    assert np.corrcoef(counts[last], counts[last + 1])[0, 1] > 0.7


def test_the_same_seed_gives_the_same_jobs():
    jobs = RICH.generate(3000, seed=4)
    assert jobs.generated and len(jobs) == 3000
    assert same(jobs, RICH.generate(3000, seed=4)) and not same(jobs, RICH.generate(3000, seed=5))
    loaded = RICH.generate(3000, seed=4, load=0.5, cluster=Cluster.parse("9x8"))
    assert np.array_equal(loaded.duration, jobs.duration) and not np.array_equal(loaded.submit, jobs.submit)


def test_shares_moments_and_load_are_as_requested():
    durations = {1: LogNormal(60.0, 1.0), 8: LogNormal(600.0, 0.5)}
    shape = {"sizes": {1: 3, 8: 1}, "priorities": {0.0: 0.9, 5.0: 0.1}, "over_estimate": 3.0}
    profile = stated(durations=durations, tenants=3, **shape)
    cluster = Cluster.parse("50x8")
    jobs = profile.generate(200_000, seed=1, load=0.8, cluster=cluster)

    def share(rows, expected):
        assert abs(rows.mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / len(rows))

    share(jobs.gpus == 8, 0.25)
    share(jobs.priority == 5, 0.1)
    for k, name in enumerate(("tenant-1", "tenant-2", "tenant-3"), 1):
        share(jobs.tenant == jobs.tenants.index(name), (1 / k) / (1 + 1 / 2 + 1 / 3))
    for gpus, median, sigma in ((1, 60, 1.0), (8, 600, 0.5)):
        logs = np.log(jobs.duration[jobs.gpus == gpus])
        assert abs(logs.mean() - math.log(median)) < 4 * sigma / math.sqrt(len(logs))
        assert logs.std() == pytest.approx(sigma, rel=0.02)
    ratio = jobs.estimate / jobs.duration
    assert 1 - 1e-2 <= ratio.min() < 1.05 and 2.95 < ratio.max() <= 3 + 1e-2
    asked = (jobs.gpus * jobs.duration).sum() / jobs.submit[-1] / cluster.total_gpus
    assert asked == pytest.approx(0.8, rel=0.02)


def test_a_tenants_own_mix_and_durations_hold():
    jobs = RICH.generate(20_000, seed=2)
    of_b = jobs.tenant == jobs.tenants.index("b")
    assert (jobs.gpus[of_b] == 8).all() and (jobs.duration[of_b] == 7).all()
    assert (jobs.gpus[~of_b] == 8).mean() == pytest.approx(0.3, abs=0.05)
    shared = jobs.milli == 500
    assert (jobs.cpu[shared] == 4000).all() and {jobs.type_sets[t] for t in jobs.types[shared]} == {("A", "B")}


def test_campaigns_repeat_without_changing_the_mix():
    profile = stated(sizes={1: 0.9, 8: 0.1}, repeat=0.8, alike=0.9)
    jobs = profile.generate(100_000, seed=6, load=0.5, cluster=Cluster.parse("9x8"))
    large = jobs.gpus == 8
    assert large.mean() == pytest.approx(0.1, abs=0.02)
    assert large[1:][large[:-1]].mean() > 0.2  # 0.1 if it were by chance
    logs = np.log(jobs.duration)
    assert np.corrcoef(logs[1:], logs[:-1])[0, 1] > 0.1 and logs.std() == pytest.approx(2.0, rel=0.05)


@given(st.integers(1, 400), st.floats(0, 0.99), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_campaign_is_named_by_its_first_job(count, repeat, seed):
    first = campaigns(count, repeat, np.random.default_rng(seed))
    assert (first <= np.arange(count)).all() and (first[first] == first).all() and first[0] == 0


@given(
    st.dictionaries(st.integers(1, 64), st.floats(0, 10), min_size=1, max_size=4).filter(lambda s: sum(s.values()) > 0),
    st.integers(1, 5), st.floats(0, 3), st.floats(0, 0.95), st.integers(0, 2**40),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_stated_profile_gives_jobs_that_keep_the_rules(sizes, tenants, burst, repeat, seed):
    profile = stated(sizes=sizes, tenants=tenants, arrivals=Arrivals(1e4, burst=burst), repeat=repeat, over_estimate=2)
    jobs = profile.generate(50, seed=seed)
    assert len(jobs) == 50 and (np.diff(jobs.submit) >= 0).all() and (jobs.estimate >= jobs.duration - 1e-3).all()
    assert set(jobs.gpus.tolist()) <= {gpus for gpus, share in sizes.items() if share > 0}


def test_a_fit_finds_what_a_trace_was_made_from():
    made = Profile(
        {
            "1": Size(0.6, (Request(1, cpu=2000, share=0.5), Request(1)), LogNormal(300.0, 2.0)),
            "4": Size(0.4, (Request(4),), LogNormal(3000.0, 1.0), Quantiles((0.0, 1.0), (1.0, 5.0))),
        },
        {"a": Tenant(0.5), "b": Tenant(0.5, {"1": 0.9, "4": 0.1})},
        Arrivals(2000.0, DAY, (3.0, 3.0, 3.0, 3.0, 2.0, 1.0, 1.0), 0.5, 0.5), 0.8, 0.7,
    )  # fmt: skip
    found = fit(made.generate(100_000, seed=3))
    assert set(found.sizes) == {"1", "4"} and set(found.tenants) == {"a", "b"}
    assert np.allclose(found.mix[np.argsort(list(found.tenants))], made.mix, atol=0.04)
    assert found.arrivals.per_day == pytest.approx(2000, rel=0.1)
    shift = int(made.generate(1, seed=3).submit[0] // 3600)  # hour 0 of a fit is that of the first arrival
    assert not shift and np.allclose(found.arrivals.hours, np.array(DAY) / np.mean(DAY), rtol=0.4)
    assert found.arrivals.burst == pytest.approx(0.5, rel=0.3) and found.arrivals.hold == pytest.approx(0.5, abs=0.15)
    assert found.repeat == pytest.approx(0.8, abs=0.07) and found.alike == pytest.approx(0.7, abs=0.15)
    assert found.gpu_seconds == pytest.approx(made.gpu_seconds, rel=0.15)
    assert found.sizes["4"].estimates.mean == pytest.approx(made.sizes["4"].estimates.mean, rel=0.05)
    assert {r.cpu: r.share for r in found.sizes["1"].requests} == pytest.approx({0: 2 / 3, 2000: 1 / 3}, abs=0.05)


def test_what_is_not_there_is_not_found():
    found = fit(stated(tenants=4, arrivals=Arrivals(5000.0)).generate(30_000, seed=1))
    assert found.arrivals.burst == found.repeat == found.alike == 0
    assert max(found.arrivals.hours) < 1.15 and all(size.estimates is None for size in found.sizes.values())


def test_a_fit_of_a_calendar_begins_on_monday_at_midnight():
    submit = np.arange(0, 28 * 86_400, 600.0)
    submit = submit[(submit // 3600 + 9) % 24 == 12]  # second 0 is at nine, and they come at twelve
    jobs = Jobs(submit, np.ones(len(submit)), np.ones(len(submit), np.int64))
    known, unknown = fit(jobs, datetime(2024, 5, 1, 9)), fit(jobs)
    assert known.arrivals.calendar and np.flatnonzero(known.arrivals.hours).tolist() == [12]
    assert not unknown.arrivals.calendar and np.flatnonzero(unknown.arrivals.hours).tolist() == [0]


def test_a_short_trace_has_no_hours_or_weekdays():
    arrivals = fit(stated(arrivals=Arrivals(24_000.0, hours=DAY)).generate(1500, seed=0)).arrivals
    assert set(arrivals.hours) == set(arrivals.weekdays) == {1.0}


def test_rare_sizes_share_a_curve_and_keep_their_requests():
    gpus = np.repeat([1, 2, 3, 4, 8], [500, 5, 5, 30, 3])
    found = fit(Jobs(np.arange(543.0), np.full(543, 5.0), np.random.default_rng(0).permutation(gpus)))
    assert list(found.sizes) == ["1", "2-8"]
    assert {r.gpus: round(r.share * 43) for r in found.sizes["2-8"].requests} == {2: 5, 3: 5, 4: 30, 8: 3}


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5), st.integers(0, 9)), min_size=2, max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_trace_with_two_submission_times_can_be_fitted_and_generated(rows):
    submit, duration, gpus = (np.array(column) for column in zip(*rows, strict=True))
    jobs = Jobs(submit, duration, gpus)
    if jobs.submit[-1] - jobs.submit[0] < 0.001:
        submit[0] += 1
        jobs = Jobs(submit, duration, gpus)
    made = fit(jobs).generate(40, seed=1)
    assert set(made.gpus.tolist()) <= set(gpus.tolist()) and made.duration.max() <= duration.max() * (1 + 1e-9) + 0.01


@pytest.mark.parametrize("jobs, what", [
    (Jobs(np.zeros(0), np.zeros(0), np.zeros(0, np.int64)), "has 0 jobs; expected at least two"),
    (Jobs(np.zeros(1), np.ones(1), np.ones(1, np.int64)), "has 1 jobs"),
    (Jobs(np.full(5, 3.0), np.ones(5), np.ones(5, np.int64)), "all 5 jobs are submitted at 3 s"),
    (Jobs(np.array([0, 1e11]), np.ones(2), np.ones(2, np.int64)), r"1e\+11 s lie between"),
])  # fmt: skip
def test_a_trace_that_says_no_rate(jobs, what):
    with pytest.raises(ValueError, match=what):
        fit(jobs)


@with_traces
@pytest.mark.parametrize("file, format, where", [
    ("philly/sia_philly_first20000_s.csv.gz", "tiresias", {}),
    ("helios/helios_venus_2vc_sept_helios_form.csv.gz", "helios", {"vc": "vcvGl"}),
    ("openb/openb_pod_list_default.csv.gz", "openb", {}),
])  # fmt: skip
def test_jobs_like_a_real_traces(file, format, where):
    jobs = trace.load(TRACES / file, format, where)
    found = fit(jobs)
    assert found.gpu_seconds == pytest.approx((jobs.gpus * jobs.milli / 1000 * jobs.duration).mean(), rel=0.1)
    made = dataclasses.replace(found, repeat=0.0).generate(50_000, seed=1)  # campaigns make samples vary
    for q in (0.1, 0.5, 0.9, 0.99):
        here, there = np.log1p(np.quantile(made.duration, q)), np.log1p(np.quantile(jobs.duration, q))
        assert here == pytest.approx(there, abs=0.2), q
    for gpus in np.unique(jobs.gpus):
        assert (made.gpus == gpus).mean() == pytest.approx((jobs.gpus == gpus).mean(), abs=0.01)


ONE = Cluster.parse("1x8")


@pytest.mark.parametrize("make, what", [
    (lambda: stated(sizes={1: 0.5, 2: -0.1}), "shares of sizes are {'2': -0.1}"),
    (lambda: stated(sizes={}), "shares of sizes are {}"), (lambda: stated(sizes={-1: 1.0}), "-1 GPUs"),
    (lambda: stated(tenants={"a": 0.0}), "shares of tenants"), (lambda: stated(tenants=0), "shares of tenants"),
    (lambda: stated(priorities={1.0: math.nan}), "shares of requests"),
    (lambda: stated(over_estimate=0.5), "over_estimate is 0.5"),
    (lambda: stated(durations={1: LogNormal(1, 1)}, sizes={1: 1, 2: 1}), r"jobs of \[2\] GPUs are missing"),
    (lambda: stated(repeat=1.0), "repeat is 1.0"), (lambda: LogNormal(0, 1), "median is 0"),
    (lambda: Quantiles((0.5, 0.2), (1, 2)), "probabilities begin"), (lambda: Quantiles((), ()), "at least one"),
    (lambda: Arrivals(hours=(1.0,)), "expected 24 factors"), (lambda: Arrivals(weekdays=(0.0,) * 7), "not all 0"),
    (lambda: Arrivals(burst=-1), "burst is -1"),
    (lambda: Profile({"1": Size(1, (Request(1),), LogNormal(1, 1))}, {"a": Tenant(1, {"2": 1})}), "unknown size"),
    (lambda: stated().generate(5), "says no rate of arrivals"), (lambda: RICH.generate(0), "count is 0"),
    (lambda: RICH.generate(5, load=0.5), "load and cluster go together"),
    (lambda: RICH.generate(5, load=-1, cluster=ONE), "a load of -1 on 8 GPUs"),
    (lambda: RICH.generate(5, load=1, cluster=Cluster.parse("1x0")), "on 0 GPUs"),
    (lambda: stated(sizes={0: 1}).generate(5, load=1, cluster=ONE), "no job of the profile requests"),
])  # fmt: skip
def test_bad_numbers_are_named(make, what):
    with pytest.raises(ValueError, match=what):
        make()


def test_tenants_without_a_job_are_none_of_the_trace_and_a_million_is_the_most():
    profile = stated(tenants=100_000)
    jobs = profile.generate(1000, seed=3, load=0.7, cluster=Cluster.parse("20x8"))
    assert len(jobs) == 1000 and 100 < len(jobs.tenants) < 1000
    assert profile.gpu_seconds == pytest.approx(stated().gpu_seconds)
    with pytest.raises(ValueError, match="2,000,000 tenants; expected at most 1,000,000"):
        stated(tenants=2_000_000)


def test_a_profile_is_read_back(tmp_path):
    for k, profile in enumerate((RICH, stated(), fit(RICH.generate(2000, seed=1)))):
        profile_file.save(tmp_path / f"{k}.json", profile)
        assert profile_file.load(tmp_path / f"{k}.json") == profile and profile.source in str(profile)


@pytest.mark.parametrize("path, value, what", [
    ("repaet", 0.5, "unknown key of the profile 'repaet'; did you mean 'repeat'"),
    ("arrivals/hour", [], "unknown key of arrivals of the profile 'hour'; did you mean 'hours'"),
    ("sizes/1/requests/0/gpu", 1, "unknown key of item 1 of requests of '1' in sizes"),
    ("sizes/1/durations", {"median": 5}, "durations of '1' in sizes of the profile has no 'sigma'"),
    ("sizes/1/share", "x", 'share of .* is "x"; expected a number'),
    ("sizes/1/share", -1, "shares of sizes are {'1': -1}"),
    ("sizes/1/requests/0/gpus", 1.5, "is 1.5; expected a whole number"),
    ("sizes/1/requests/0/gpus", True, "is true; expected a whole number"),
    ("arrivals/per_day", math.nan, "is NaN; expected a number"), ("tenants", [], "expected an object"),
    ("arrivals/hours", 3, "expected a list"), ("tenants/b/sizes", {"9": 1.0}, "unknown size of tenant 'b' '9'"),
])  # fmt: skip
def test_a_profile_with_a_mistake_is_named(tmp_path, path, value, what):
    profile_file.save(tmp_path / "p.json", RICH)
    wrong, made = tmp_path / "wrong.json", json.loads((tmp_path / "p.json").read_text())
    *keys, last = path.split("/")
    functools.reduce(lambda of, key: of[int(key) if isinstance(of, list) else key], keys, made)[last] = value
    wrong.write_text(json.dumps(made))
    with pytest.raises(TraceError, match=what) as raised:
        profile_file.load(wrong)
    assert str(raised.value).startswith(str(wrong))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_trace_is_read_back(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    jobs, path = RICH.generate(2000, seed=1), tmp_path / f"t.{suffix}"
    trace_writer.write(path, jobs, 'from "RICH"\nby hand')
    assert same(trace.load(path, suffix), jobs)
    if suffix == "csv":
        assert path.read_text().startswith("# generated by weft: from 'RICH' by hand\nsubmit,")
    else:
        from pyarrow import parquet

        assert json.loads(parquet.read_schema(path).metadata[b"weft"])["generated"] is True
    with pytest.raises(ValueError, match="already exists"):
        trace_writer.write(path, jobs)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_name_like_a_comment_is_no_comment(tmp_path):
    jobs = Jobs(np.arange(3.0), np.ones(3), np.ones(3, np.int64), id=["#1", "a,b", 'c"d'])
    trace_writer.write(tmp_path / "t.csv", jobs)
    assert trace.load(tmp_path / "t.csv", "csv").id == jobs.id and "generated" not in (tmp_path / "t.csv").read_text()


@pytest.fixture
def weft(command, monkeypatch, tmp_path):
    """Runs ``weft simulate generate …`` in an empty folder: exit status and standard error on one line."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code, out, err = command("simulate", "generate", *words)
        assert not out
        return code, " ".join(err.split())

    return run


def test_the_command_states_saves_and_follows(weft):
    cluster = ("--nodes", "20x8", "--load", "0.7")
    shape = ("--sizes", "1:3,8:1", "--tenants", 2, "--median", 60, "--sigma", 1, "--hours", ",".join(["1"] * 24))
    code, said = weft("a.csv", "--jobs", 400, *cluster, *shape, "--save-profile", "p.json", "--seed", 3)
    assert code == 0 and "400 generated jobs" in said
    jobs = trace.load("a.csv", "csv")
    expected = stated(sizes={1: 3, 8: 1}, tenants=2, durations=LogNormal(60.0, 1.0))
    assert same(jobs, expected.generate(400, seed=3, load=0.7, cluster=Cluster.parse("20x8")))
    assert profile_file.load("p.json") == expected

    assert weft("b.csv", "--jobs", 400, *cluster, "--profile", "p.json", "--seed", 3)[0] == 0
    assert same(trace.load("b.csv", "csv"), jobs)

    assert weft("c.csv", "--jobs", 300, "--like", "a.csv", "--format", "csv", "--begins", "2024-05-01T09:00")[0] == 0
    like = fit(jobs, datetime(2024, 5, 1, 9))
    assert same(trace.load("c.csv", "csv"), like.generate(300))
    assert Path("c.csv").read_text().startswith("# generated by weft: seed 0, fitted to 400 jobs")


def test_the_printed_rate_is_that_of_the_load(weft):
    assert weft("a.csv", "--jobs", 50, "--nodes", "1x8", "--load", 1, "--save-profile", "p.json")[0] == 0
    profile, cluster = profile_file.load("p.json"), Cluster.parse("2x8")
    profile = dataclasses.replace(profile, arrivals=dataclasses.replace(profile.arrivals, per_day=5.0))
    profile_file.save("q.json", profile)
    told = f"{profile.rate(0.5, cluster) * 86400:,.0f} jobs a day, "
    assert weft("b.csv", "--jobs", 50, "--profile", "q.json", "--nodes", "2x8", "--load", 0.5)[1].startswith(told)
    assert weft("c.csv", "--jobs", 50, "--profile", "q.json")[1].startswith("5.00 jobs a day, ")


def test_jobs_without_a_gpu_are_reported(weft):
    code, said = weft("a.csv", "--jobs", 40, "--nodes", "1x8", "--load", 1, "--sizes", "0:1,1:1")
    assert code == 0 and "jobs request neither GPUs nor cores; formats csv and parquet leave them out" in said


@pytest.mark.parametrize("words, what", [
    (("a.csv", "--jobs", 5), "the cluster is missing"),
    (("a.csv", "--jobs", 5, "--nodes", "2x8"), "load and cluster go together"),
    (("a.csv", "--jobs", 5, "--profile", "missing.json"), "missing.json"),
    (("a.txt", "--jobs", 5, "--nodes", "2x8"), "ends in .csv or .parquet"),
    (("a.csv", "--jobs", 5, "--nodes", "2x8", "--load", 1, "--sizes", "1=2"), "--sizes is '1=2'"),
    (("a.csv", "--jobs", 5, "--nodes", "2x8", "--load", 1, "--sizes", "1:2,1:3"), "names 1 GPU twice"),
    (("a.csv", "--jobs", 5, "--nodes", "2x8", "--load", 1, "--hours", "1,2"), "--hours are 2 numbers; expected 24"),
    (("a.csv", "--jobs", 5, "--nodes", "2x8", "--load", 1, "--weekdays", "x"), "--weekdays is 'x'"),
    (("a.csv", "--jobs", 5, "--nodes", "2x8", "--load", 1, "--format", "csv"), "--format goes with --like"),
    (("a.csv", "--jobs", 5, "--like", "b.csv", "--tenants", 3), "--tenants goes with neither"),
    (("a.csv", "--jobs", 5, "--like", "b.csv", "--profile", "p.json"), "both --like and --profile"),
    (("a.csv", "--jobs", 5, "--like", "b.csv", "--format", "csv", "--begins", "May"), "--begins is 'May'"),
    (("no/a.csv", "--jobs", 5, "--nodes", "2x8", "--load", 1), "no/a.csv cannot be written"),
])  # fmt: skip
def test_the_commands_mistakes_are_named(weft, tmp_path, words, what):
    (tmp_path / "b.csv").write_text("submit,duration,gpus\n0,1,1\n5,1,1\n")
    code, said = weft(*words)
    assert code in (1, 2) and what in said and "Traceback" not in said
    assert [file.name for file in tmp_path.iterdir()] == ["b.csv"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_what_is_generated_is_still_known_for_it_when_it_is_read(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    jobs = generate(20, Cluster.parse("2x8"), sizes={1: 1})
    jobs.gpus[3], jobs.cpu[3], jobs.gpus[4] = 0, 2000, 0  # one on cores alone, and one that asks nothing
    trace_writer.write(tmp_path / f"t.{suffix}", jobs, "a test")
    again = trace.load(tmp_path / f"t.{suffix}", suffix)
    assert again.generated and len(again) == 19 and again.dropped == {"no GPU": 1} and again.cpu[3] == 2000

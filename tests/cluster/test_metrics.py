"""Metrics of a schedule: groups, slowdowns, allocation, fairness."""

import numpy as np
import pytest
from random_traces import random_jobs

from weft.cluster import Cluster, Jobs, compare, metrics, simulate
from weft.cluster.metrics import fairness, finish_time_ratio
from weft.cluster.model import NodeGroup


def test_no_slowdown_is_below_one():
    jobs = Jobs(submit=[0, 0, 0], duration=[1, 4, 100], gpus=[8, 8, 8])
    times = metrics.times(simulate(jobs, Cluster.parse("1x8")))
    assert times["jct"].tolist() == [1, 5, 105]
    assert times["slowdown"].tolist() == [1, 1, 1.05]  # 0.1 and 0.5 without the bound


def test_jains_index_is_one_over_n_where_one_tenant_has_all_the_slowdown():
    jobs = Jobs(submit=[0] * 4, duration=[10] * 4, gpus=[1] * 4, tenant=[0, 1, 2, 3], tenants=tuple("abcd"))
    result = simulate(jobs, Cluster.parse("1x8"))
    found = fairness(result, metrics.times(result)["slowdown"])
    assert (found["jain"], found["tenants"]) == (1.0, 4)
    assert fairness(result, np.array([1e9, 1, 1, 1]))["jain"] == pytest.approx(0.25)
    assert fairness(simulate(jobs.take([0]), Cluster.parse("1x8")), np.ones(1))["jain"] is None


def test_finish_time_ratio_of_three_jobs_by_hand():
    jobs = Jobs(submit=[0, 0, 50], duration=[100, 100, 50], gpus=[8, 8, 4])
    result = simulate(jobs, Cluster.parse("1x8"), "fifo-skip")  # 0 to 100, 100 to 200, 200 to 250
    asked = np.array([50 * 16 + 50 * 20, 50 * 16 + 50 * 20 + 100 * 12, 50 * 20 + 100 * 12 + 50 * 4])  # GPU seconds
    contention = asked / [100, 200, 200] / 8
    wanted = np.array([100, 200, 200]) / (np.array([100, 100, 50]) * contention)
    assert finish_time_ratio(result) == pytest.approx(wanted)
    found = metrics.summary(result)["fairness"]["finish_time"]
    assert found["above_1"] == pytest.approx(2 / 3) and found["max"] == pytest.approx(200 / (50 * 1.5))
    assert finish_time_ratio(simulate(jobs.take([2]), Cluster.parse("1x8"))).tolist() == [1.0]
    assert np.isnan(finish_time_ratio(simulate(Jobs([0], [1], [9]), Cluster.parse("1x8")))).all()


def test_by_type_adds_up_to_what_was_held():
    cluster = Cluster.of([NodeGroup(2, 8, "A"), NodeGroup(1, 4, "B")])
    found = metrics.summary(simulate(random_jobs(300, 5), cluster, "fifo-skip", "worst"))
    assert list(found["by_type"]) == ["A", "B"] and [of["gpus"] for of in found["by_type"].values()] == [16, 4]
    assert sum(of["gpu_s"] for of in found["by_type"].values()) == pytest.approx(found["gpu_s"])
    one = Jobs([0, 0], [10, 20], [8, 4], types=[1, 2], type_sets=((), ("A",), ("B",)))
    found = metrics.summary(simulate(one, cluster))["by_type"]
    assert [found[name]["jobs"] for name in "AB"] == [1, 1]
    assert [found[name]["jct"]["mean"] for name in "AB"] == [10, 20]
    assert (found["A"]["allocation"], found["B"]["allocation"]) == (80 / (16 * 20), 1.0)
    assert metrics.summary(simulate(one.take([0]), Cluster.parse("1x8")))["by_type"] == {}


def test_groups_add_up_to_the_whole():
    found = metrics.summary(simulate(random_jobs(500), Cluster.parse("3x8"), "fifo-skip"))
    for groups in (found["by_size"], found["by_tenant"]):
        assert sum(of["jobs"] for of in groups.values()) == 500
        for name in ("jct", "queueing", "slowdown"):
            mean = sum(of["jobs"] * of[name]["mean"] for of in groups.values()) / 500
            assert mean == pytest.approx(found[name]["mean"])
    used = [of["gpu_s"] for of in found["by_tenant"].values()]
    assert used == sorted(used, reverse=True)
    assert sum(used) == pytest.approx(found["utilisation"] * found["makespan"] * 24)


def test_at_most_twenty_tenants_are_listed():
    jobs = Jobs(submit=np.zeros(50), duration=np.arange(50) + 1.0, gpus=np.ones(50, int), tenant=np.arange(50),
                tenants=tuple(map(str, range(50))))  # fmt: skip
    found = metrics.summary(simulate(jobs, Cluster.parse("1x8")))
    assert list(found["by_tenant"]) == [str(t) for t in range(49, 29, -1)] and found["fairness"]["tenants"] == 50


def test_allocation_is_that_of_a_loop_over_time():
    result = simulate(random_jobs(300, 3), Cluster.parse("2x8"))
    until = int(result.start.max())
    runs = [(result.start <= t) & (result.end > t) for t in range(int(result.jobs.submit[0]), until)]
    held = [int(result.jobs.gpus[of].sum()) for of in runs]
    found = metrics.summary(result)["allocation"]
    assert found["mean"] == pytest.approx(np.mean(held) / 16) and found["max"] == max(held) / 16
    assert found["p50"] == sorted(held)[(len(held) - 1) // 2] / 16


def test_jobs_of_the_warm_up_run_and_count_in_no_metric_of_jobs():
    """Two of 10 s at once on 8 GPUs, then two at 100 s; the first pair is the warm-up."""
    jobs = Jobs([0, 0, 100, 100], [10, 10, 20, 40], [8, 8, 8, 4], tenant=[0, 1, 1, 1], tenants=("a", "b"))
    found = metrics.summary(simulate(jobs, Cluster.parse("1x8"), warm_up_s=50))
    assert found["warm_up"] == {"seconds": 50, "jobs": 2} and found["completed"] == 4 and found["makespan"] == 160
    assert found["jct"]["mean"] == 40 and found["queueing"]["mean"] == 10 and found["wait_reasons"]["capacity"] == 20
    assert [of["jobs"] for of in found["by_size"].values()] == [2] and list(found["by_tenant"]) == ["b"]
    assert found["by_tenant"]["b"]["gpu_s"] == 20 * 8 + 40 * 4 and found["fairness"]["tenants"] == 1
    assert found["allocation"]["mean"] == pytest.approx(20 / 70)  # from 50 to the last start at 120
    for order in ("srtf", "time-slices"):
        assert simulate(jobs, Cluster.parse("1x8"), order, warm_up_s=50).counted.tolist() == [False] * 2 + [True] * 2
    (compared,) = compare(jobs, Cluster.parse("1x8"), ["fifo:best"], processes=1, warm_up_s=50)
    assert compared.value("jct.mean") == 40
    for seconds, words in (
        (-1, "warm_up_s is -1; expected seconds"),
        (101, "is 1 min 41 s, and all .* within 1 min 40 s"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate(jobs, Cluster.parse("1x8"), warm_up_s=seconds)

"""The cluster simulator against published results, and against what queueing theory says."""

import numpy as np
import pytest
from sample_traces import TRACES, with_traces

from weft.cluster import Cluster, Jobs, simulate, trace
from weft.cluster.metrics import summary
from weft.cluster.synthetic.generate import generate


@with_traces
@pytest.mark.parametrize(("file", "format", "nodes", "order", "placement", "jct", "more"), [
    ("tiresias/60_job.csv", "tiresias", "4x4", "fifo", "counted", 200.8167, {"makespan": 3335}),
    ("tiresias/60_job.csv", "tiresias", "4x4", "fifo-skip", "counted", 190.6833, {"makespan": 3271}),
    ("muri/muri_trace1_s.csv.gz", "tiresias", "8x8", "fifo", "counted", 10_313_080.6720, {}),
    ("muri/trace1.csv.gz", "muri", "8x8", "fifo-skip", "counted", 5_488_127.6546, {}),
    (
        "helios/helios_venus_2vc_sept_helios_form.csv.gz", "helios", "20x8", "fifo", "consolidate", 18_497.0110,
        {"queueing": 13_891.1205, "last_completion": 2_590_097, "makespan": 2_584_262},
    ),
    (
        "helios/helios_venus_2vc_sept_helios_form.csv.gz", "helios", "20x8", "sjf", "consolidate", 5302.6798,
        {"queueing": 696.7893},
    ),
])  # fmt: skip
def test_published_results_to_the_last_digit(file, format, nodes, order, placement, jct, more):
    jobs = trace.load(TRACES / file, format, {"vc": "vcvGl"} if format == "helios" else {})
    found = summary(simulate(jobs, Cluster.parse(nodes), order, placement))
    assert round(found["jct"]["mean"], 4) == jct
    for name, value in more.items():
        assert round(found[name]["mean"] if isinstance(found[name], dict) else found[name], 4) == value
    assert not found["unschedulable"] and found["completed"] == len(jobs)


def agrees(values, want: float) -> bool:
    """Whether the mean is what theory says, within four standard errors, which means of 40 batches tell; and within 5 %."""
    batches = values[: len(values) // 40 * 40].reshape(40, -1).mean(axis=1)
    error = batches.std(ddof=1) / np.sqrt(40)
    return abs(batches.mean() - want) < 4 * error < 0.2 * want and abs(batches.mean() / want - 1) < 0.05


def test_a_queue_of_many_servers_waits_as_long_as_theory_says():
    """M/M/8 at 75 % load, two nodes of 4: Erlang's C formula."""
    servers, load, n = 8, 0.75, 800_000
    g = np.random.default_rng(2)
    offered = servers * load
    jobs = Jobs(np.cumsum(g.exponential(1 / offered, n)), g.exponential(1.0, n), np.ones(n, int))
    terms = np.cumprod(np.concatenate(([1.0], offered / np.arange(1, servers + 1))))
    waits = terms[-1] / (1 - load)
    want = waits / (terms[:-1].sum() + waits) / (servers - offered)
    assert agrees(simulate(jobs, Cluster.parse("2x4"), "fifo", "first").queueing, want)


@pytest.mark.parametrize("cv2", [0.0, 1.0, 4.0])
def test_any_durations_wait_as_long_as_theory_says(cv2):
    """M/G/1 at 70 % load, Pollaczek and Khinchine: ρ / (1 − ρ) × (1 + cv²) / 2. Constant durations, exponential ones,
    and a mix of two exponentials with equal shares of the work."""
    g, n = np.random.default_rng(3), 500_000
    share = (1 - np.sqrt((cv2 - 1) / (cv2 + 1))) / 2 if cv2 else 0.0
    long = g.random(n) < share
    mean = np.where(long, 1 / (2 * share), 1 / (2 * (1 - share))) if cv2 else np.ones(n)
    jobs = Jobs(np.cumsum(g.exponential(1 / 0.7, n)), mean * g.exponential(1.0, n) if cv2 else mean, np.ones(n, int))
    assert agrees(simulate(jobs, Cluster.parse("1x1"), "fifo").queueing, 0.7 / 0.3 * (1 + cv2) / 2)


@pytest.mark.parametrize("wrong", [{"load": 0}, {"median_s": -1}, {"sigma": -1}, {"sizes": {}}, {"sizes": {0: 1}}])
def test_a_generated_trace_is_marked_and_wrong_numbers_are_refused(wrong):
    cluster = Cluster.parse("1x8")
    jobs = generate(9, cluster, seed=1)
    assert jobs.generated and summary(simulate(jobs, cluster))["generated"]
    with pytest.raises(ValueError, match="generate: "):
        generate(9, cluster, **wrong)

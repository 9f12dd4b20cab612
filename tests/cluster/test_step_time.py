"""A training step's time from measured links, against the formulas by hand, and the traces whose durations it makes."""

import json

import pytest

from weft.cluster import trace
from weft.cluster.files.text import TraceError
from weft.cluster.step_time import BUCKET, Link, all_reduce_us, step_ms

MIB = 1 << 20


def records(ranks, alpha_us, gb_s, **more):
    """Of a link on which an all-reduce takes ``alpha_us`` and its bytes at ``gb_s``, the other two half of both."""
    return [
        {
            "collective": name,
            "bytes": size,
            "ranks": ranks,
            "mode": "stream",
            "p50_us": k * (alpha_us + size / gb_s / 1e3),
        }
        | more
        for name, k in (("all_reduce", 1), ("all_gather", 0.5), ("reduce_scatter", 0.5))
        for size in (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    ]


@pytest.fixture
def links(tmp_path):
    (tmp_path / "within.json").write_text(json.dumps({"records": records(2, 10, 200)}))
    older, newer = records(4, 1000, 1), records(4, 60, 20)
    lines = [{"about": {}, "run": "x"}, *older, *records(2, 5, 999), *newer, *records(8, 1, 999, mode="graph")]
    (tmp_path / "between.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Link.read(tmp_path / "within.json"), Link.read(tmp_path / "between.jsonl")


def test_times_scale_with_ranks_as_rings_do(links):
    within, between = links
    assert (within.ranks, between.ranks) == (2, 4)  # of the most ranks, the newest; graphs are another thing
    size = 8 * MIB
    assert within.time_us("all_reduce", size, 2) == pytest.approx(10 + size / 200e3, rel=1e-3)
    # 7/4 of the bytes of two ranks and 7 times the rounds
    assert within.time_us("all_reduce", size, 8) == pytest.approx(70 + 1.75 * size / 200e3, rel=1e-3)
    assert within.time_us("all_gather", size, 8) == pytest.approx(35 + 1.75 * size / 400e3, rel=1e-3)
    assert between.time_us("all_reduce", size, 3) == pytest.approx(40 + (4 / 3) / 1.5 * size / 20e3, rel=1e-3)
    assert within.time_us("all_reduce", size, 1) == 0


def test_over_nodes_a_part_goes_between_them(links):
    within, between = links
    inside = 2 * (35 + 1.75 * BUCKET / 400e3)
    outside = between.time_us("all_reduce", BUCKET / 8, 4)
    assert all_reduce_us(BUCKET, 32, 8, within, between) == pytest.approx(inside + outside, rel=1e-3)
    with pytest.raises(ValueError, match="9 GPUs are 2 nodes of 8; expected a record of the link between"):
        all_reduce_us(BUCKET, 9, 8, within, None)


def test_backward_hides_all_but_the_last_bucket(links):
    within, _ = links
    bucket = within.time_us("all_reduce", BUCKET, 8) / 1e3
    assert step_ms(1000, 10 * BUCKET, 8, 8, within) == pytest.approx(1000 + bucket)
    assert step_ms(3, 100 * BUCKET, 8, 8, within) == pytest.approx(3 + 99 * bucket - 2 + bucket)
    assert step_ms(5, 100 * BUCKET, 1, 8, within) == 5


def test_a_trace_of_training_jobs(tmp_path, links):
    within, between = links
    path = tmp_path / "jobs.csv"
    path.write_text(
        "id,submit,gpus,steps,compute_ms,parameters,bytes\na,0,8,1000,100,1e9,2\nb,5,16,10,100,1e9,\nc,6,0,1,1,1,1\n"
    )
    options = {"within": str(tmp_path / "within.json"), "between": str(tmp_path / "between.jsonl")}
    jobs = trace.load(path, "training", **options)
    assert list(jobs.id) == ["a", "b"] and jobs.gpus.tolist() == [8, 16]
    assert jobs.dropped == {"no GPU": 1} or jobs.dropped == {"no submission or duration": 1}
    assert jobs.duration[0] == pytest.approx(step_ms(100, 2e9, 8, 8, within))
    assert jobs.duration[1] == pytest.approx(10 * step_ms(100, 4e9, 16, 8, within, between) / 1e3)
    with pytest.raises(TraceError, match=r"jobs.csv:3: 16 GPUs are 2 nodes .* --option between="):
        trace.load(path, "training", within=options["within"])
    with pytest.raises(TraceError, match="needs a record of weft comm"):
        trace.load(path, "training")
    with pytest.raises(TraceError, match=r"node_gpus is 1.5"):
        trace.load(path, "training", node_gpus=1.5, **options)
    path.write_text("submit,gpus,steps,compute_ms,parameters\n0,8,-1,100,1e9\n")
    with pytest.raises(TraceError, match=r"jobs.csv:2: steps is -1.*expected 0 or more"):
        trace.load(path, "training", **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no records of all_reduce"),
        ("{]", "no JSON"),
        ('{"records": [{"bytes": 1}]}', "a record without 'ranks'"),
        (json.dumps({"records": records(2, 10, 200)[:8]}), "no records of all_reduce, all_gather, reduce_scatter"),
        (json.dumps({"records": records(2, 10, 200, p50_us="x")}), "expected what weft comm writes"),
        (json.dumps({"records": records(2, 10, 200, p50_us=0)}), "times above 0"),
    ],
)
def test_records_that_are_none_are_named(tmp_path, text, words):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(TraceError, match=words):
        Link.read(tmp_path / "r.json")

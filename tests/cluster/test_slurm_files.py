"""Slurm's own files: ``sacct --json`` has the meaning of ``sacct --parsable2``; nodes of ``scontrol`` and ``sinfo``."""

import json
import re

import numpy as np
import pytest
import slurm_files as files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.cluster import Jobs, trace
from weft.cluster.files.text import TraceError

NAME = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), exclude_characters="|\x85"), max_size=10).map(
    str.strip
)
HOSTILE = st.sampled_from(['"a', "#x", "[red]:boom:", "Köln", "'", "a,b=c", "Unknown", ""]) | NAME
TRES = st.sampled_from([
    {"gres/gpu": 8, "gres/gpu:h100": 8}, {"gres/gpu:a100_1g.5gb": 2, "gres/gpu": 2}, {"gres/gpu:a100": 1, "gres/gpu:h100": 2},
    {"gres/shard": 3}, {"gres/gpu": 1, "gres/gpumem": 80}, {"gres/gpu:1g.5gb": 1, "gres/gpu:3g.20gb": 1}, {},
])  # fmt: skip
TIME = st.none() | st.integers(0, 10**6)
JOB = st.fixed_dictionaries({
    "id": st.sampled_from(["7", "7_0", "7_12", "7+0", "7+1", "8", "8_3"]), "user": HOSTILE, "account": HOSTILE,
    "submit": st.integers(0, 10**6), "eligible": TIME, "start": TIME, "end": TIME, "elapsed": st.integers(0, 10**7),
    "limit": st.none() | st.just(np.inf) | st.integers(1, 10**6), "nodes": st.integers(1, 4), "reservation": HOSTILE,
    "priority": st.integers(0, 2**31), "tres": TRES.map(lambda gpus: {"cpu": 3, "mem": 70_000, **gpus, "billing": 9, "node": 1}),
})  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(JOB, min_size=1, max_size=8), style=st.sampled_from(files.STYLES))
def test_the_same_jobs_written_both_ways_are_the_same_trace(write, jobs, style):
    found = []
    for path, format in (("a", "sacct"), ("b", "sacct-json")):
        text = files.piped(jobs) if path == "a" else files.as_json(jobs, style)
        try:
            found.append(trace.load(write(path, text), format))
        except TraceError as error:
            found.append(re.sub(r"^.*/[ab]", "", str(error)))
    if isinstance(found[0], str) or isinstance(found[1], str):
        assert found[0] == found[1] and "no jobs are left" in found[0]
        return
    one, other = found
    for name in Jobs.columns():
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    for name in ("id", "tenants", "type_sets", "dropped", "warnings"):
        assert getattr(one, name) == getattr(other, name), name
    assert len(one) + sum(one.dropped.values()) == len(jobs)


RUN = {
    "id": "7", "user": "ann", "account": "", "submit": 0, "eligible": 0, "start": 60, "end": 90, "elapsed": 30, "limit": 5,
    "nodes": 1, "priority": 4, "reservation": "", "tres": {"cpu": 2, "mem": 1024, "gres/gpu": 2},
}  # fmt: skip


def read(write, jobs, style="object"):
    return trace.load(write("a", files.as_json(jobs, style)), "sacct-json")


def test_what_a_job_of_sacct_json_means(write):
    jobs = read(write, [RUN, {**RUN, "id": "8_3", "submit": 10, "eligible": 50, "limit": np.inf, "tres": {"gres/gpu:h100": 4},
                              "account": "chem", "nodes": 2}])  # fmt: skip
    assert list(jobs.id) == ["7", "8_3"] and jobs.submit.tolist() == [0, 50] and jobs.duration.tolist() == [30, 30]
    assert jobs.estimate.tolist() == [300, 1e11] and jobs.gpus.tolist() == [2, 4] and jobs.pods.tolist() == [1, 2]
    assert jobs.cpu.tolist() == [2000, 0] and jobs.memory.tolist() == [1024, 0] and jobs.priority.tolist() == [4, 4]
    assert [jobs.tenants[k] for k in jobs.tenant] == ["ann", "chem"] and jobs.type_sets == ((), ("h100",))
    (told,) = jobs.warnings
    assert told.startswith("1 job: became eligible after the submission")


@pytest.mark.parametrize("format", ["sacct", "sacct-json"])
def test_a_requeued_job_has_a_job_for_each_run_and_a_row_that_is_there_again_counts_once(write, format):
    again = {**RUN, "submit": 100, "eligible": 100, "start": 150, "end": 155, "elapsed": 5}
    runs = [RUN, again, RUN]
    jobs = trace.load(write("a", files.piped(runs) if format == "sacct" else files.as_json(runs, "plain")), format)
    assert list(jobs.id) == ["7", "7#2"] and jobs.duration.tolist() == [30, 5] and jobs.submit.tolist() == [0, 100]
    assert jobs.dropped == {"a row that is there again": 1}
    assert jobs.warnings == ("1 job: ran again after a requeue, as a job of its own",)


def test_gpus_that_slurm_does_not_record_are_named(write):
    for format, text in (("sacct", files.piped([{**RUN, "tres": {"cpu": 1}}])),
                         ("sacct-json", files.as_json([{**RUN, "tres": {"cpu": 1}}], "object"))):  # fmt: skip
        with pytest.raises(
            TraceError, match="1 dropped: no GPU: gres/gpu is in no row, and must be in AccountingStorageTRES"
        ):
            trace.load(write("a", text), format)


@pytest.mark.parametrize(("key", "value", "words"), [
    ("job_id", None, "job 1 (None): job_id is None; expected a whole number"), ("job_id", -3, "job_id is -3"),
    ("job_id", 10**400, "is 1000"), ("time", None, "job 1 (7): "), ("time", {}, "'submission' is missing"),
    ("tres", {"allocated": "gpu"}, "tres.allocated is 'gpu'; expected a list"), ("tres", {"allocated": [3]}, "job 1 (7): "),
    ("tres", {"allocated": [{"type": "gres", "name": "gpu", "count": -2}]}, "gres/gpu is -2; expected a whole number"),
    ("tres", {"allocated": [{"type": "gres", "name": "gpu", "count": 1e300}]}, "gres/gpu is 1e+300"),
    ("tres", {"allocated": [{"type": "mem", "name": "", "count": {"set": True, "number": [1]}}]}, "tres.allocated: mem is {"),
    ("tres", {"allocated": [{"type": "cpu", "count": 1}] * 2}, "cpu is there twice"), ("priority", "high", "priority is 'high'"),
    ("account", ["a"], "['a']; expected a word"), ("array", {"job_id": "x"}, "array.job_id is 'x'"), ("het", [1], "job 1 (7)"),
])  # fmt: skip
def test_what_is_wrong_in_sacct_json_is_named(write, key, value, words):
    found = json.loads(files.as_json([RUN], "object"))
    found["jobs"][0][key] = value
    with pytest.raises(TraceError, match=re.escape(words)):
        trace.load(write("a", found), "sacct-json")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"jobs": {}}', '{"jobs": [3]}', '{"jobs": []}', "\ufeff{}", '{"jobs": [null]}', "7|8"]
)
def test_no_sacct_json_is_named(write, text):
    with pytest.raises(TraceError):
        trace.load(write("a", text), "sacct-json")
    if text.startswith(("{", "\ufeff{")):
        with pytest.raises(TraceError, match="it is JSON; expected what sacct --parsable2 writes"):
            trace.load(write("a", text), "sacct")

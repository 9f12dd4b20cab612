"""Slurm's own files: ``sacct --json`` has the meaning of ``sacct --parsable2``; nodes of ``scontrol`` and ``sinfo``."""

import json
import re

import numpy as np
import pytest
import slurm_files as files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.cluster import Jobs, cluster_file, trace
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
    "tres": TRES.map(lambda gpus: {"cpu": 3, "mem": 70_000, **gpus, "billing": 9}), "priority": st.integers(0, 2**31),
})  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_parts_of_jobs_pending_arrays_and_reservations_are_told(write):
    jobs = read(write, [{**RUN, "id": "7+0"}, {**RUN, "id": "7+1", "reservation": "maint"}])
    assert list(jobs.id) == ["7+0", "7+1"] and jobs.warnings == (
        "2 jobs: parts of heterogeneous jobs, each a job of its own",
        "1 job: ran in a reservation, of which the simulation has none",
    )
    pending = json.loads(files.as_json([RUN, RUN], "object"))
    pending["jobs"][1] |= {
        "array": {"job_id": 9, "task_id": {"set": False, "infinite": False, "number": 0}, "task": "4-9"}
    }
    pending["jobs"][1]["time"] |= {"start": 0, "end": 0}
    jobs = trace.load(write("a", pending), "sacct-json")
    assert list(jobs.id) == ["7"] and jobs.dropped == {"never started": 1}


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
    ("tres", {"allocated": [{"type": "cpu", "count": 1}] * 2}, "cpu is there twice"), ("priority", "high",
    "priority is 'high'"),
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


WRITERS = [(write, style) for write, styles in (
    (files.scontrol, ("text", "oneliner", "json")), (files.sinfo, ("text", "bars", "json"))) for style in styles]  # fmt: skip
# gres → GPUs, their type, warnings.
GRES = {
    "gpu:h100:8(S:0-1)": (8, "h100", ""), "gpu:4": (4, "gpu", ""), "": (0, "none", ""), "gpu_mem:80G,gpu:a:2": (2, "a",
    "gpu_mem"),
    "gpu:h100:4(IDX:0,2-3),shard:h100:16": (4, "h100", "16 gres/shards of 4 GPUs"), "gpu:a100_1g.5gb:8": (2, "a100", ""),
    "gpu:3g.20gb:2,gpu:1g.5gb:1": (1, "gpu", ""), "gpu:nvidia_h100_80gb_hbm3_2g.20gb:3": (1, "nvidia_h100_80gb_hbm3", ""),
    "gpu:a100:2,gpu:a100_7g.40gb:2": (4, "a100", ""), "craynetwork:4,gpumem:3": (0, "none", "craynetwork, gpumem"),
}  # fmt: skip
STATE = {
    "IDLE": "", "MIXED+CLOUD": "", "ALLOCATED": "", "idle~": "", "MAINTENANCE": "", "DOWN*+DRAIN": "down", "down*": "down",
    "IDLE+DRAIN": "drained or draining", "drng": "drained or draining", "draining@": "drained or draining",
    "idle*": "not responding", "IDLE+NOT_RESPONDING": "not responding", "FAIL": "failing", "unk*": "in an unknown state",
}  # fmt: skip


def some(name="cn1", gres="gpu:h100:8", state="IDLE", cpus=64, memory=1024, text="Gres=gpu:99 State=DOWN RealMemory=x"):
    return {"name": name, "gres": gres, "state": state, "cpus": cpus, "memory": memory, "text": text}


@pytest.mark.parametrize(("writer", "style"), WRITERS)
def test_nodes_of_slurm(write, writer, style):
    nodes = [some(f"n{k}", gres, cpus=k + 1, memory=1000 + k) for k, gres in enumerate(GRES)]
    cluster = cluster_file.load(write("nodes", writer(nodes, style)))
    assert cluster.names == tuple(f"n{k}" for k in range(len(GRES))) and not cluster.dropped
    assert [(n, cluster.types[t]) for n, t in zip(cluster.gpus, cluster.gpu_type, strict=True)] == [
        of[:2] for of in GRES.values()
    ]
    assert cluster.cpu.tolist() == [1000 * (k + 1) for k in range(len(GRES))]
    assert cluster.memory.tolist() == [1000 + k for k in range(len(GRES))]
    assert [text in " ".join(cluster.warnings) for *_, text in GRES.values()] == [True] * len(GRES)


@pytest.mark.parametrize(("writer", "style"), WRITERS)
def test_nodes_that_take_no_jobs_are_left_out_and_counted(write, writer, style):
    nodes = [some(f"n{k}", state=state) for k, state in enumerate(STATE)] + [some("two", "gpu:a:1,gpu:b:1")]
    cluster = cluster_file.load(write("nodes", writer(nodes, style)))
    assert cluster.names == tuple(f"n{k}" for k, why in enumerate(STATE.values()) if not why)
    reasons = [*filter(None, STATE.values()), "with GPUs of several types"]
    assert cluster.dropped == {why: reasons.count(why) for why in reasons}
    with pytest.raises(TraceError, match=r"it has no nodes \(1 left out: down\)"):
        cluster_file.load(write("nodes", writer([some(state="DOWN")], style)))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(list(GRES)), st.sampled_from(list(STATE)), st.integers(1, 999), st.integers(2, 10**7),
                          NAME.filter(lambda name: "NodeName" not in name)), min_size=1, max_size=5))  # fmt: skip
def test_the_same_nodes_written_every_way_are_the_same_cluster(write, nodes):
    rows = [some(f"cn{k}", *of) for k, of in enumerate(nodes)]
    found = []
    for writer, style in WRITERS:
        try:
            cluster = cluster_file.load(write("nodes", writer(rows, style)))
            columns = [getattr(cluster, name).tolist() for name in ("gpus", "gpu_type", "cpu", "memory")]
            found.append((cluster.names, columns, cluster.types, cluster.dropped, cluster.warnings))
        except TraceError as error:
            found.append(str(error).partition(": ")[2])
    assert all(other == found[0] for other in found)


def test_rows_of_several_nodes(write):
    text = "Tue Nov 25 10:00:00 2025\nPARTITION NODES HOSTNAMES GRES CPUS(A/I/O/T) MEMORY STATE REASON\n"
    text += (
        "a* 5 cn[08-11],x[1-2]y[1,3] gpu:4 0/8/0/64 500+ mixed none at all\nb 1 cn09 gpu:4 0/8/0/96 900 mixed none\n"
    )
    cluster = cluster_file.load(write("nodes", text.replace("\n", "\r\n").encode("utf-8-sig")))
    assert (
        cluster.names == ("cn08", "cn09", "cn10", "cn11", "x1y1", "x1y3", "x2y1", "x2y3") and cluster.total_gpus == 32
    )
    assert set(cluster.memory.tolist()) == {500} and set(cluster.cpu.tolist()) == {64_000}
    assert cluster.warnings == ("cores and memory of 8 nodes are the least of their row; sinfo -N has those of each",)


HEAD = "NODELIST GRES CPUS MEMORY STATE\n"


@pytest.mark.parametrize(("text", "words"), [
    (HEAD, "it has no nodes"), (HEAD + "a gpu:1 x 1 idle", ":2: CPUS is 'x'; expected a whole number"),
    (HEAD + "a gpu:1 1 1", ":2: 4 columns; expected 5"), (HEAD + "a[1-2 gpu:1 1 1 idle",
    "are no names of nodes; expected such as"),
    (HEAD + "a[0-99999999999] gpu:1 1 1 idle", "are 100,000,000,000 nodes; expected 1 to 1,000,000"),
    (HEAD + "a[2-1] gpu:1 1 1 idle", "'a[2-1]' are 0 nodes"), (HEAD + "a[1-1000]b[1-9999] gpu:1 1 1 idle", "too many nodes"),
    (HEAD + "a gpu:a:b:( 1 1 idle", "is no list of gres; expected name:type:count"), (HEAD + "a gpu:0g.5gb:1 1 1 idle",
    "slice of nothing"),
    (HEAD + "a gpu:99999999999999 1 1 idle", "gpus is 99999999999999; expected at most"),
    (HEAD + "a gpu:1 1 1 idle\na gpu:2 1 1 idle", ":3: node 'a' is there before, and not the same ("),
    ("NODELIST STATE\na idle", "no column GRES (there are: NODELIST, STATE); expected those of sinfo -N"),
    ("NodeName=a State=IDLE Gres=(null) CPUTot=4", ":1: node 'a' has no RealMemory"),
    ("NodeName=a State=IDLE Gres=(null) CPUTot=4 RealMemory=9\nNodName=b State=IDLE", ":2: expected 'NodeName=…'"),
    ("NodeName=a State=IDLE CPUTot=4", "has no Gres"), ("NodeName=a State=IDLE Gres=gpu:1 CPUTot=-4 RealMemory=1",
    "CPUTot of node 'a' is '-4'"),
    ('{"nodes": [{}]}', "node 1: KeyError: 'cpus'"), ('{"nodes": [3]}', "node 1: AttributeError"),
    ('{"nodes": []}', "it has no nodes"),
    ('{"nodes": [{"name": 3, "state": [], "cpus": 1, "real_memory": 1}]}', "3; expected a word"),
    ('{"nodes": [{"name": "a", "state": null, "cpus": 1, "real_memory": 1}]}', "None; expected a word"),
    ('{"nodes": [{"name": "a", "state": [], "cpus": 1e18, "real_memory": 1}]}', "node 'a': node group 'node': cpu is"),
    ('{"nodes": [{"name": "a", "state": [], "cpus": {"set": false}, "real_memory": 1}]}', "cpu is nan"),
    ('{"sinfo": [{"nodes": {"nodes": "abc"}}]}', "'abc'; expected a list"), ('{"sinfo": []}', "it has no nodes"),
    ('{"sinfo": [', "no JSON"),
    ('{"sinfo": {}}', "no list under 'sinfo'"), ('{"meta": {}, "nodes": [{', "no JSON"),
])  # fmt: skip
def test_what_is_wrong_in_slurms_nodes_is_named(write, text, words):
    for content in (text, text.replace("\n", "\r\n").encode("utf-8-sig")):
        with pytest.raises(TraceError, match=re.escape(words)):
            cluster_file.load(write("nodes", content))


def test_check_tells_of_the_cluster(tmp_path, weft):
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n0,5,4\n")
    (tmp_path / "nodes").write_text(files.sinfo([some(), some("cn2", state="drain"), some("cn3", "gpu:a:2,shard:4")]))
    args = (tmp_path / "t.csv", "--format", "csv", "--cluster", tmp_path / "nodes")
    found = json.loads(weft("check", *args, "--json")[1])["cluster"]
    assert (found["nodes"], found["gpus"], found["dropped"]) == (2, {"h100": 8, "a": 2}, {"drained or draining": 1})
    shown = " ".join(weft("check", *args)[1].split())
    assert "cluster: 2 nodes, GPUs: 8 h100, 2 a" in shown and "cluster, left out: 1 node, drained or draining" in shown
    assert "cluster, doubtful: 4 gres/shards of 2 GPUs on 1 node" in shown
    assert (
        found["assumed"] == ["no memory of a GPU of 2 nodes: enough for any job"]
        and f"cluster, assumed: {found['assumed'][0]}" in shown
    )
    assert "of the cluster 1 node was left out: drained or draining" in " ".join(weft(*args)[1].split())

"""What the cluster simulator refuses, and ``weft simulate`` as a beginner types it."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from where import python

from weft.cluster import Cluster, Jobs, NodeGroup, simulate, trace

# ---- bad input -------------------------------------------------------------------------------------------------------

HEAD = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "columns num_gpu, submit_time, duration, job_id are missing (there are: none)"),
        (HEAD, "no jobs are left to simulate (the file has none)"),
        (HEAD + "0,1,0,5,x,10\n", "trace.csv:2: 6 columns; expected 7"),
        (HEAD + "0,1,0,5,x,10,0\n1,one,0,5,x,10,0\n", "trace.csv:3: num_gpu is 'one'; expected a number"),
        (HEAD + "0,1,-5,5,x,10,0\n", "trace.csv:2: the submission is -5; expected 0 or more"),
        (HEAD + "0,1.5,0,5,x,10,0\n", "trace.csv:2: 1.5 GPUs; expected a whole number"),
        (HEAD + "0,0,0,5,x,10,0\n0,1,0,5,x,,0\n", "1 dropped: no submission or duration, 1 dropped: no GPU"),
        (HEAD + "0,1,inf,5,x,10,0\n", "submit of job '0' (row 0) is inf"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        trace.load(path, "tiresias")
    assert words in str(caught.value)


def test_what_windows_and_gzip_write_is_read(tmp_path):
    rows = HEAD + "ä,1,5,5,x,10,0\r\n\r\nb,2,0,5,x,10,0\r\n"
    for name, data in (
        ("mark.csv", b"\xef\xbb\xbf" + rows.encode()),
        ("windows.csv", rows.encode("cp1252")),
        ("zipped.csv", gzip.compress(rows.encode())),
    ):
        (tmp_path / name).write_bytes(data)
        jobs = trace.load(tmp_path / name, "tiresias")
        assert list(jobs.id) == ["b", "ä"] and jobs.submit.tolist() == [0, 5]  # sorted by submission
    (tmp_path / "cut.csv").write_bytes(gzip.compress(rows.encode())[:-9])
    with pytest.raises(trace.TraceError, match="it is not whole"):
        trace.load(tmp_path / "cut.csv", "tiresias")


def test_raw_helios_has_dates(tmp_path):
    head = "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    row = "1,u,v,n,8,1,1,COMPLETED,2020-04-01 00:00:{0},2020-04-01 00:01:00,2020-04-01 00:02:00,60,5\n"
    (tmp_path / "log.csv").write_text(head + row.format("10") + "2" + row[1:].format("40"))
    jobs = trace.load(tmp_path / "log.csv", "helios")
    assert np.diff(jobs.submit) == [30] and jobs.gpus.tolist() == [8, 8]
    (tmp_path / "log.csv").write_text(head + row.format("1x"))
    with pytest.raises(
        trace.TraceError, match=r"log.csv:2: submit_time is '2020-04-01 00:00:1x'; expected seconds or a date"
    ):
        trace.load(tmp_path / "log.csv", "helios")


@pytest.mark.parametrize("text", ["", "20", "x8", "20x", "0x8", "2x8,", "-1x8", "2x8;2x4"])
def test_wrong_nodes_are_refused(text):
    with pytest.raises(ValueError, match="nodes '"):
        Cluster.parse(text)


def test_a_job_that_can_never_run_is_reported_and_the_others_run():
    jobs = Jobs(submit=[0, 0, 0], duration=[1, 1, 1], gpus=[8, 1, 40], gpu_memory=[0, 100, 0])
    result = simulate(jobs, Cluster.parse("4x8", gpu_memory_gb=80))
    assert result.unschedulable == {
        1: "the closest node, node-0, lacks 100 GB a GPU (it has 80)",
        2: "it needs 5 free nodes of 8 GPUs that fit it, and the cluster has 4",
    }
    assert result.start[0] == 0 and np.isnan(result.start[1:]).all()


@pytest.mark.parametrize("policy", [("fifo", "best"), ("fifo", "counted"), ("time-slices", "best")])
def test_a_cluster_without_nodes_is_refused(policy):
    with pytest.raises(ValueError, match="the cluster has no nodes; expected at least one"):
        simulate(Jobs([0], [1], [1]), Cluster.of([]), *policy)


def test_missing_cores_of_pods_without_gpus_are_reported():
    jobs = Jobs([0], [1], [0], pods=[4], cpu=[64_000])
    why = simulate(jobs, Cluster.of([NodeGroup(1, cpu=32)])).unschedulable[0]
    assert why == "it comes in 4 pods of 0 GPUs, and all of them do not fit at once even when nothing else runs"


def test_of_nodes_that_lack_as_much_one_of_the_right_type_is_nearer():
    cluster = Cluster.of([NodeGroup(1, 8, "H100", 80), NodeGroup(1, 8, "A100", 40)])
    jobs = Jobs(submit=[0], duration=[1], gpus=[1], gpu_memory=[70], types=[1], type_sets=((), ("A100",)))
    told = {0: "the closest node, node-1, lacks 70 GB a GPU (it has 40)"}
    assert simulate(jobs, cluster).unschedulable == told


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("submit,duration,gpus,tenant\n0,10,4,a\n1,20,8,a\n2,5,99,b\n")
    return path


def test_simulate_prints_one_object(command, file):
    code, out, _ = command("simulate", file, "--format", "csv", "--nodes", "1x8", "--json")
    found = json.loads(out)
    assert code == 0 and found["jobs"] == 3 and found["completed"] == 2
    assert found["jct"]["mean"] == (10 + 29) / 2 and found["queueing"]["mean"] == 4.5 and found["makespan"] == 30
    assert found["utilisation"] == pytest.approx((40 + 160) / (8 * 30))
    assert found["unschedulable"][0]["job"] == 2
    assert set(found) >= {"slowdown", "preemptions", "cpu_s", "peak_memory_mib"}


def test_simulate_prints_a_table(command, file):
    code, out, _ = command("simulate", file, "--format", "csv", "--nodes", "1x8", "--where", "tenant=a", "--limit", "1")
    assert code == 0 and "job completion time" in out and "1 of 1 job ran on 1 node, 8 GPUs;" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--nodes", "8"), "should read COUNTxGPUS"),
        (("--nodes", "1x8", "--order", "fofi"), "did you mean 'fifo'"),
        (("--nodes", "1x8", "--placement", "bets"), "did you mean 'best'"),
        (("--nodes", "1x8", "--format", "cvs"), "did you mean 'csv'"),
        (("--nodes", "1x8", "--where", "tenant=c"), "unknown tenant 'c' (there are: a, b)"),
        (("--nodes", "1x8", "--where", "tenant"), "expected COLUMN=VALUE"),
    ],
)
def test_mistakes_are_one_line(command, file, words, told):
    code, out, err = command("simulate", file, "--format", "csv", *words)
    assert code == 2 and out == "" and told in " ".join(err.replace("│", " ").split())


def test_the_simulator_needs_no_pytorch(file):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        f"from weft.cluster import *; from weft.cluster import trace\n"
        f"print(simulate(trace.load({str(file)!r}, 'csv'), Cluster.parse('2x8')).end.tolist())"
    )
    done = python("-c", code)
    assert done.returncode == 0 and done.stdout.strip() == "[10.0, 21.0, nan]", done.stderr


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: NodeGroup(1.5), TypeError, "count is 1.5; expected a whole number"),
        (lambda: NodeGroup(1, 2.5), TypeError, "gpus is 2.5; expected a whole number"),
        (lambda: NodeGroup(1, gpu_memory_gb=float("nan")), ValueError, "gpu_memory_gb is nan; expected 0 or more"),
        (lambda: NodeGroup(1, cpu=1e30), ValueError, "expected at most 1,000,000,000"),
        (lambda: NodeGroup(1, cpu=1e-9), ValueError, "expected 0, or 0.001 or more"),
        (lambda: Jobs([0.0], [1.0], [1.5]), ValueError, "gpus of row 0 is 1.5; expected a whole number"),
        (lambda: Jobs([0.0], [1.0], [float("nan")]), ValueError, "gpus of row 0 is nan"),
        (lambda: Jobs([0.0, 1.0], [1.0, 1.0], [1, 1], id=["a"]), ValueError, "'id' has 1 rows and 'submit' has 2"),
        (lambda: Jobs([0.0], [1.0], [1], tenant=[3]), ValueError, "tenant of job 0 .* is 3; expected an index below 1"),
        (lambda: Jobs([[0.0]], [[1.0]], [[1]]), ValueError, "'submit' has 2 dimensions; expected one"),
    ],
)
def test_nodes_and_jobs_from_python_are_checked(make, error, words):
    with pytest.raises(error, match=words):
        make()

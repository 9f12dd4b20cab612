"""Published trace formats: a small file in each one's schema, and the real ones where they are."""

import gzip
import json

import numpy as np
import pytest
import sample_traces as samples
from sample_traces import PAI, SPEEDS, TRACES, attempt, node, philly, pod, rows, tar, with_traces

from weft.cluster import trace
from weft.cluster.files.text import TraceError
from weft.definition import UnknownName


def test_philly_raw(write):
    log = [
        philly(
            "twice", "2017-10-07 01:11:39",
            attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23", 8),
            attempt("2017-10-07 02:00:00", "2017-10-07 03:00:00", 8, 8),
        ),
        philly("first", "2017-10-07 01:11:09", attempt("2017-10-07 01:12:00", "2017-10-07 01:12:00", 1)),
        philly("never", "2017-10-07 01:11:39"),
        philly("runs", "2017-10-07 01:11:39", attempt("2017-10-07 01:12:09", None, 8)),
        philly("runs too", "2017-10-07 01:11:39", attempt("2017-10-07 01:12:09", "None", 8)),
        philly("lost", "2017-10-07 01:11:39", attempt(None, "2017-10-07 01:12:09", 8)),
        philly("clock", "2017-11-05 01:11:39", attempt("2017-11-05 01:50:00", "2017-11-05 01:20:00", 8)),
        philly("cpu", "2017-10-07 01:11:39", attempt("2017-10-07 01:12:00", "2017-10-07 01:13:00")),
    ]  # fmt: skip
    jobs = trace.load(write("cluster_job_log.gz", gzip.compress(json.dumps(log).encode())), "philly", {"vc": "ee9e8c"})
    assert rows(jobs) == [("first", 0.0, 0.0, 1), ("twice", 30.0, 74.0 + 3600.0, 16)]
    assert jobs.dropped == {
        "never ran": 1, "still running": 2, "an attempt without its times": 1,
        "an attempt that ends before it starts": 1, "no GPU": 1,
    }  # fmt: skip


def test_helios_raw(write):
    jobs = trace.load(write("cluster_log.csv", samples.HELIOS), "helios")
    assert rows(jobs, "cpu", "pods") == [("7", 1591728061.0, 50.0, 16, 48_000, 0)]
    assert jobs.dropped == {"no GPU": 1, "no submission or duration": 1} and jobs.tenants == ("vcA", "vcB")


def test_chronus(write):
    head = "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
    path = write(
        "t.csv",
        head + "best_effort,job_type\n0,vc_a,1,20,1,vgg,3,1,159-189,10-8,0,soft\n1,vc_b,4,10,1,vgg,2,1,10,10,1,best\n"
        "2,vc_b,0,30,1,vgg,2,1,10,10,1,best\n",
    )
    jobs = trace.load(path, "chronus")
    assert rows(jobs, "priority") == [("1", 600.0, 120.0, 4, 0.0), ("0", 1200.0, 180.0, 1, 1.0)]
    assert jobs.dropped == {"no GPU": 1}
    assert trace.load(path, "chronus", seconds_per_unit=1).submit.tolist() == [10.0, 20.0]


PAI_JOBS = "a,i1,u1,Terminated,90.0,160.0\nb,i2,u2,Failed,48.0,55.0\n"


@pytest.mark.parametrize("content", [PAI, samples.PAI_HEAD + PAI, tar(pai_task_table=PAI)])
def test_pai(write, content):
    path = write("pai_task_table.tar.gz", content)
    dropped = {
        "no GPU": 1, "no number of instances": 1, "neither a share of one GPU nor whole GPUs": 1,
        "no submission or duration": 1,
    }  # fmt: skip
    jobs = trace.load(path, "pai")
    assert rows(jobs, "pods", "milli", "cpu", "memory") == [
        ("f/worker", 20.0, 10.0, 1, 1, 250, 0, 0),
        ("b/tensorflow", 50.0, 5.0, 6, 3, 1000, 18_000, 3072),
        ("a/worker", 100.0, 60.0, 2, 2, 500, 8000, 60_000),
    ]
    assert [jobs.type_sets[k] for k in jobs.types] == [(), ("V100M32",), ("T4",)] and jobs.dropped == dropped

    jobs = trace.load(path, "pai", {"user": "u1"}, jobs=write("pai_job_table.csv", PAI_JOBS))
    assert rows(jobs) == [("a/worker", 90.0, 60.0, 2)]
    # c and f are not in the job table; that c did not end is then not counted again
    del dropped["no submission or duration"]
    assert jobs.dropped == {**dropped, "not in the job table": 2}


def test_alibaba2025(write):
    head = (
        "instance_sn,role,app_name,cpu_request,cpu_limit,gpu_request,gpu_limit,rdma_request,rdma_limit,memory_request,"
        "memory_limit,disk_request,disk_limit,max_instance_per_node,creation_time,scheduled_time,deletion_time\n"
    )
    row = "{},{},app_0,12,12,{},1,25,25,120.0,120.0,640.0,800.0,8,{}\n"
    nodes = ("HN", 1, "10,12.5,100"), ("HN", 1, ",,100"), ("HN", 1, "10,12,"), ("HN", 1, ",,"), ("CN", 0, "10,12,100")
    text = head + "".join(row.format(f"i{k}", *of) for k, of in enumerate(nodes))
    jobs = trace.load(write("t.csv", text), "alibaba2025")
    assert rows(jobs, "pods", "cpu", "memory") == [("i0", 10.0, 87.5, 1, 1, 12_000, 122_880)]
    assert jobs.dropped == {"there before the window": 2, "there after the window": 1, "no GPU": 1}


def test_spot_gpus(write):
    head = "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type\n"
    text = "a,13,A10,20.0,1.0,1,0,2764799,HP\nb,57,A100-SXM4-80GB,15,8,94,9,71718.0,Spot\nc,57,,0.5,0.25,3,5,10,Spot\n"
    text += "d,1,A10,1,1.5,1,0,1,HP\ne,1,A10,1,1,,0,1,HP\nf,1,A10,1,0,1,0,1,HP\n"
    jobs = trace.load(write("job_info_df.csv", head + text), "spot")
    assert rows(jobs, "pods", "milli", "cpu", "priority") == [
        ("a", 0, 2764799, 1, 1, 1000, 20_000, 1), ("c", 5, 10, 3, 3, 250, 1500, 0),
        ("b", 9, 71718, 752, 94, 1000, 1_410_000, 0),
    ]  # fmt: skip
    assert [jobs.type_sets[k] for k in jobs.types] == [("A10",), (), ("A100-SXM4-80GB",)] and jobs.tenants[:2] == (
        "13",
        "57",
    )
    assert jobs.dropped == {"no number of workers": 1, "neither a share of one GPU nor whole GPUs": 1, "no GPU": 1}
    for row, words in (
        ("a,1,T4,1,1,0,0,1,HP", ":2: worker_num is 0.0; expected a whole number of 1 or more"),
        ("a,1,T4,1,1,1.5,0,1,HP", "worker_num is 1.5"), ("a,1,T4,1,1,1,0,1,hp", "job_type is 'hp'; expected HP or Spot"),
        ("a,1,T4,1,inf,1,0,1,HP", "inf GPUs; expected a whole number"), ("a,1,T4,1,1,1e9,0,1,HP", "gpus of job 'a'"),
    ):  # fmt: skip
        with pytest.raises(TraceError, match=words):
            trace.load(write("t", head + row), "spot")


def test_the_jobs_of_pais_simulator(write):
    text = "job_id,num_inst,submit_time,num_cpu,num_gpu,gpu_type,duration,user\n7,2,10,6,0.5,T4,30,u\n8,,0,8.5,2,V100,60.0,v\n"
    text += "9,1,20,4,0,CPU,5,u\n10,1,0,1,1.25,T4,1,u\n11,1,0,0,0,CPU,5,u\n"
    jobs = trace.load(write("t", text), "pai-simulator")
    assert rows(jobs, "pods", "milli", "cpu") == [
        ("8", 0, 60, 2, 1, 1000, 8500), ("7", 10, 30, 2, 2, 500, 12_000), ("9", 20, 5, 0, 1, 1000, 4000),
    ]  # fmt: skip
    assert [jobs.type_sets[k] for k in jobs.types] == [("V100",), ("T4",), ()]
    assert jobs.dropped == {"neither a share of one GPU nor whole GPUs": 1, "no GPU": 1}
    with pytest.raises(TraceError, match=r"t:3: num_inst is -1.0; expected a whole number of 1 or more"):
        trace.load(write("t", text.replace("8,,0", "8,-1,0")), "pai-simulator")


def test_acme_takes_the_time_between_start_and_end(write):
    kalos = (
        "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,"
        "fail_time,stop_time,duration,queue,gpu_time\n"
        "d1,u1,8,64,960,1000,100.0,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,"
        "2023-05-17 11:01:16+00:00,2023-05-17 11:01:16+00:00,,18,10.0,1152.0\n"
        "d2,u1,1,8,96,1000,100.0,Other,CANCELLED,2023-05-17 11:00:58+00:00,,,,,,,\n"
        "d3,u2,1,0,96,1000,100.0,CPU,COMPLETED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,"
        "2023-05-17 11:01:16+00:00,,,18,10.0,0\n"
    )
    jobs = trace.load(write("trace_kalos.csv", kalos), "acme")
    assert rows(jobs, "pods", "cpu", "memory") == [("d1", 0.0, 8.0, 64, 8, 960_000, 8_192_000)]
    assert jobs.dropped == {"never started": 1, "no GPU": 1}
    seren = (
        "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"
        "5,u,3,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,9\n"
        "6,u,1,8,128,Other,FAILED,2023-02-28 16:18:23+00:00,2023-02-28 16:18:54+00:00,2023-02-28 16:18:55+00:00,1,31,8\n"
    )
    jobs = trace.load(write("trace_seren.csv", seren), "acme")
    assert rows(jobs, "pods") == [("5", 0.0, 117.0, 8, 0), ("6", 1.0, 1.0, 8, 1)]


@pytest.mark.parametrize("line", [
    "{model}\tcmd\tfolder\t-n\t1\t{steps}\t{gpus}\t2\t-1.0\t{at}\n",
    "{model}\tcmd\t-n\t1\t{steps}\t{gpus}\t2\t-1.0\t{at}\n", "{model}\tcmd\t-n\t1\t{steps}\t{at}\t{gpus}\n",
])  # fmt: skip
def test_gavel_divides_steps_by_their_speed(write, line):
    write("simulation_throughputs.json.gz", gzip.compress(json.dumps(SPEEDS).encode()))
    asked = (("LM", 100, 2, 7.5), ("LM", 100, 1, 8), ("LM", 100, 4, 9), ("GPT", 100, 2, 9))
    text = "".join(line.format(model=model, steps=steps, gpus=gpus, at=at) for model, steps, gpus, at in asked)
    path = write("traces/seed_0/x.trace", text)
    jobs = trace.load(path, "gavel")
    assert rows(jobs) == [(0, 7.5, 25.0, 2)] and jobs.priority[0] == (0.0 if line.count("\t") == 6 else 2.0)
    assert jobs.dropped == {"no speed on so many v100": 2, "cannot run on v100": 1}
    assert trace.load(path, "gavel", gpu="k80", throughputs=write("speeds.json", SPEEDS)).duration.tolist() == [200.0]
    with pytest.raises(UnknownName, match=r"unknown GPU type .* 'v10'; did you mean 'v100'"):
        trace.load(path, "gavel", gpu="v10")
    with pytest.raises(TraceError, match="2 tab-separated columns; expected 10, 9, 7"):
        trace.load(write("short.trace", "a\tb\n"), "gavel")


def test_pollux_multiplies_iterations_by_their_seconds(write):
    write("traces/bert/validation-24.csv", "progress,iteration,metric,grad_sqr,grad_var\n1,50,0,0,0\n2,100,0,0,0\n")
    shapes = "placement,local_bsz,step_time,sync_time\n2,8,1.0,0.25\n2,4,0.5,0.25\n11,8,9,9\n11,4,9,9\n"
    write("traces/bert/placements.csv", shapes)
    write("traces/bert/placements-rtx.csv", shapes.replace("0.5,", "0.1,").replace("1.0,", "0.2,"))
    steps = "4,4,4,7,7\n4,4,8,7,7\n1,4,4,2,1\n1,4,8,4,1\n"
    write("traces/bert/scalability.csv", "num_nodes,num_replicas,local_bsz,step_time,sync_time\n" + steps)
    jobs = "four,2,bert,4,24\ntwo,1,bert,2,24\nbatch,3,bert,2,25\ngpus,4,bert,3,24\nalone,5,bert,1,24\nsmall,6,bert,12,24\n"
    path = write("workloads/scale/w.csv", "name,time,application,num_replicas,batch_size\n" + jobs)
    # two: 12 a GPU, more than the 8 that were measured: two passes of 6. four: 6 a GPU.
    jobs = trace.load(path, "pollux")
    assert rows(jobs) == [("two", 1.0, 100 * (0.75 + 0.5), 2), ("four", 2.0, 300.0, 4)]
    assert jobs.dropped == {"not measured": 4} and jobs.tenants == ("bert",)
    jobs = trace.load(path, "sia", gpu="rtx", measurements=path.parents[2] / "traces")
    assert jobs.id == ["two"] and jobs.duration[0] == pytest.approx(100 * (0.15 - 0.1))
    with pytest.raises(TraceError, match="llama: there are no measurements of this application"):
        trace.load(write("w.csv", "name,time,application,num_replicas,batch_size\nx,0,llama,1,1\n"), "pollux")
    with pytest.raises(TraceError, match=r"w\.csv:2: num_replicas is 0.0; expected a whole number of 1 or more"):
        trace.load(write("w.csv", "name,time,application,num_replicas,batch_size\nx,0,bert,0,1\n"), "pollux")


def test_sacct(write):
    jobs = trace.load(write("sacct.txt", samples.SACCT), "sacct")
    assert rows(jobs, "estimate", "pods", "cpu", "memory", "priority") == [
        ("13_4", 0.0, 300.0, 3, 1e11, 0, 3000, 256_000, 0.0),
        ("12", 30.0, 93_601.0, 8, 172_800.0, 2, 64_000, 512_000, 4000.0),
    ]
    assert [jobs.type_sets[k] for k in jobs.types] == [(), ("h100",)]
    assert [jobs.tenants[k] for k in jobs.tenant] == ["bob", "chem"]
    assert jobs.dropped == {"never started": 1, "not ended": 1, "no GPU": 1}


def test_kubectl(write):
    ran = ("2024-05-01T10:01:00Z", "2024-05-01T10:02:00Z")
    restarted = pod("again", {"amd.com/gpu": 1}, ran, created="2024-05-01T10:00:05Z")
    times = {"startedAt": "2024-05-01T10:00:10Z", "finishedAt": "2024-05-01T10:00:20Z"}
    restarted["status"]["containerStatuses"][0]["lastState"] = {"terminated": times}
    items = [
        restarted,
        pod(
            "train", {"nvidia.com/gpu": "8", "cpu": "1500m", "memory": "2Gi"}, ran,
            nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, priority=1000,
            initContainers=[{"resources": {"limits": {"cpu": "4"}}}],
        ),
        node("n", {"cpu": "8", "memory": "64Gi"}), pod("runs", {"nvidia.com/gpu": "8"}, phase="Running"),
        pod("evicted", {"nvidia.com/gpu": "8"}, phase="Failed"), pod("web", {"cpu": "1"}, ran),
        pod("slice", {"nvidia.com/mig-3g.20gb": "1"}, ran), pod("share", {"nvidia.com/gpu.shared": "1"}, ran),
    ]  # fmt: skip
    jobs = trace.load(write("pods.json", {"kind": "List", "items": items}), "kubectl", {"tenant": "lab"})
    train, again = ("lab/train", 0.0, 60.0, 8, 4000, 2048, 1000.0, 1), ("lab/again", 5.0, 110.0, 1, 0, 0, 0.0, 1)
    assert rows(jobs, "cpu", "memory", "priority", "pods") == [train, ("lab/slice", 0.0, 60.0, 1, 0, 0, 0.0, 1), again]
    assert jobs.milli.tolist() == [1000, 428, 1000]
    assert [jobs.type_sets[k] for k in jobs.types] == [("NVIDIA-H100-80GB-HBM3",), (), ()]
    assert {why.split(",")[0]: n for why, n in jobs.dropped.items()} == {
        "not finished": 1, "finished without having run": 1, "no GPU": 1, "time slices of a GPU": 1,
    }  # fmt: skip
    bare = [{key: value for key, value in item.items() if key != "kind"} for item in items if item["kind"] == "Pod"]
    assert len(trace.load(write("api.json", {"kind": "PodList", "items": bare}), "kubectl")) == 3


@with_traces
@pytest.mark.parametrize(("file", "format", "count", "gpus", "dropped"), [
    ("philly/sia_pollux_philly.csv.gz", "philly", 82_247, 107_235, {}),
    ("philly/chronus_trace_job_Philly_MIX1.csv.gz", "tiresias", 30_756, 42_947, {"no GPU": 184}),
    ("swf/workload.swf", "swf", 25, None, {}), ("muri/trace2.csv.gz", "muri", 5755, None, {}),
    ("philly/chronus_trace_job_Philly_MIX1.csv.gz", "chronus", 30_756, 42_947, {"no GPU": 184}),
    ("philly/chronus_trace_job_Philly_MIX2.csv.gz", "chronus", 30_746, 43_061, {"no GPU": 194}),
    ("philly/chronus_trace_job_Philly_SLO.csv.gz", "chronus", 30_735, 42_785, {"no GPU": 205}),
    (
        "alibaba/disaggregated_DLRM_trace.csv.gz", "alibaba2025", 3218, 3218,
        {"no GPU": 16_485, "there before the window": 2277 + 846, "there after the window": 1045},
    ),
    ("gavel/physical_cluster/max_min_fairness.trace", "gavel", 96, 169, {}),
    ("gavel/physical_cluster/minimize_makespan.trace", "gavel", 100, 175, {}),
    ("gavel/msr/seed_0/23dbec.trace", "gavel", 8, 50, {"no speed on so many v100": 1}),
    ("gavel/msr/seed_0/ed69ec.trace.gz", "gavel", 951, 951, {}),
    ("pollux/workloads/workload-1.csv", "pollux", 160, 1092, {}),
    ("sia/workloads/scale/scale_32x/workload-1.csv.gz", "sia", 5120, 48_512, {}),
])  # fmt: skip
def test_real_traces(file, format, count, gpus, dropped):
    jobs = trace.load(TRACES / file, format)
    assert (len(jobs), jobs.dropped) == (count, dropped) and gpus in (None, jobs.gpus.sum())
    assert (np.diff(jobs.submit) >= 0).all()


@with_traces
def test_durations_that_are_worked_out():
    jobs = trace.load(TRACES / "gavel/physical_cluster/max_min_fairness.trace", "gavel")
    assert jobs.duration[0] == pytest.approx(13_237.671872703702)  # 925,982 steps of ResNet-18 on 4 V100s
    jobs = trace.load(TRACES / "pollux/workloads/workload-1.csv", "pollux", {"tenant": "ncf"})
    assert set(jobs.duration.tolist()) == {1548 * 0.02131553226047092}  # a batch of 32,768 on one GPU

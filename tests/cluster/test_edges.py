"""What schedulers really write: text that looks like something else, shares of GPUs, times that are none; and that what is
written from known jobs is read back exactly, whatever their names."""

import csv
import io
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_traces import node, pod
from schedules import both

from weft.cluster import Cluster, Jobs, NodeGroup, Simulator, cluster_file, simulate, trace
from weft.cluster.check import assumptions
from weft.cluster.files.text import TraceError
from weft.cluster.quota import Quota

SACCT = "JobID|JobName|User|Submit|Start|End|Elapsed|Timelimit|NNodes|ReqTRES|AllocTRES"


def sacct(*jobs: tuple[str, str, str, str]) -> str:
    """(name, elapsed, limit, allocated) of each job, all submitted and started at once."""
    begin, end = "2024-02-01T00:00:00", "2024-02-02T00:00:00"
    rows = [
        f"{k}|{name}|ann|{begin}|{begin}|{end}|{ran}|{limit}|1|{tres}|{tres}"
        for k, (name, ran, limit, tres) in enumerate(jobs)
    ]
    return "\n".join([SACCT, *rows])


def test_sacct_quotes_nothing(write):
    jobs = trace.load(write("a", sacct(
        ('the "best', "01:00:00", "2:00:00", "gres/gpu=8"), ("b", "00:10:00", "1:00:00", "gres/gpu=4"),
        ('run"', "00:00:30", "1:00:00", "gres/gpu=1"),
    )), "sacct")  # fmt: skip
    assert jobs.duration.tolist() == [3600, 600, 30] and jobs.gpus.tolist() == [8, 4, 1] and not jobs.dropped


@pytest.mark.parametrize("name", ["python x | tee log", "two\nlines"])
def test_a_row_that_free_text_breaks_is_counted_and_the_others_read(write, name):
    text = sacct((name, "01:00:00", "2:00:00", "gres/gpu=8"), ("b", "00:10:00", "1:00:00", "gres/gpu=4"))
    jobs = trace.load(write("a", text), "sacct")
    assert jobs.gpus.tolist() == [4]
    ((why, count),) = jobs.dropped.items()
    assert count == name.count("\n") + 1 and "line 2" in why and "leave out columns of free text" in why


def test_swf_numbers_of_any_length_are_exact(write):
    line = "{} 0 -1 100 4 -1 -1 4 200 -1 1 {} 1 -1 1 -1 -1 -1\n"
    jobs = trace.load(write("a", "".join(line.format(1_000_001 + k, 7_654_321 + k // 2) for k in range(3))), "swf")
    assert list(jobs.id) == ["1000001", "1000002", "1000003"] and jobs.tenants == ("user 7654321", "user 7654322")


@pytest.mark.parametrize(("text", "rows"), [
    ("id,submit,duration,gpus\n#a,0,5,1\n#b,1,6,2\n", [("#a", 0, 5, 1), ("#b", 1, 6, 2)]),
    ("# a note\nid,submit,duration,gpus\n#a,0,5,1\n", [("#a", 0, 5, 1)]),
    ("\ufeffid;submit;duration;gpus\na;0;12,5;1\nb;1,25;3;2\n", [("a", 0, 12.5, 1), ("b", 1.25, 3, 2)]),
    ("sep=;\nid;submit;duration;gpus\na;0;12.5;1\n", [("a", 0, 12.5, 1)]),
    ("id\tsubmit\tduration\tgpus\na\t0\t12.5\t1\n", [("a", 0, 12.5, 1)]),
    ("id,submit,duration,gpus\na,0,NaT,1\nb,0,N/A,1\nc,0,5,<NA>\nd,0,5,1\n", [("d", 0, 5, 1)]),
])  # fmt: skip
def test_spreadsheets(write, text, rows):
    jobs = trace.load(write("a.csv", text), "csv")
    assert list(zip(jobs.id, jobs.submit, jobs.duration, jobs.gpus, strict=True)) == rows
    assert sum(jobs.dropped.values()) == text.count("NaT") + text.count("N/A") + text.count("<NA>")


def test_thousands_are_not_guessed_at_and_lines_are_counted_from_the_first(write):
    with pytest.raises(TraceError, match=":3: duration is 'x'"):
        trace.load(write("a.csv", "sep=;\nid;submit;duration;gpus\na;0;x;1\n"), "csv")
    with pytest.raises(
        TraceError, match=r"duration is '1\.234'; expected a number; in one file either a decimal comma"
    ):
        trace.load(write("a.csv", "submit;duration;gpus\n0;12,5;1\n0;1.234;1\n"), "csv")


def test_a_guessed_code_page_is_said(write):
    jobs = trace.load(write("a.csv", "submit,duration,gpus,tenant\n0,1,1,Müller\n".encode("cp1252")), "csv")
    assert jobs.tenants == ("Müller",) and jobs.warnings == ("the file is not in UTF-8; it was read as cp1252",)


@pytest.mark.parametrize(("tres", "gpus", "milli", "dropped"), [
    ("gres/gpu:a100_1g.5gb=1,gres/gpu=1", 1, 142, ""), ("gres/gpu:3g.20gb=2", 1, 857, ""), ("gres/gpu:3g.20gb=3", 3, 428, ""),
    ("gres/gpu:a100_7g.40gb=1,gres/gpu=1", 1, 1000, ""), ("gres/gpu=1,gres/gpumem=80G", 1, 1000, ""),
    ("gres/shard=12", 0, 0, "gres/shard"), ("gres/gpu:1g.5gb=1,gres/gpu:3g.20gb=1", 0, 0, "several sizes"),
    ("gres/gpu:1g.5gb=1,gres/gpu:a100=1", 0, 0, "several sizes"),
])  # fmt: skip
def test_slices_of_slurms_are_shares_and_shards_are_named(write, tres, gpus, milli, dropped):
    jobs = trace.load(write("a", sacct(("x", "1:00", "2:00", tres), ("y", "1:00", "2:00", "gres/gpu=8"))), "sacct")
    found = list(zip(jobs.gpus.tolist(), jobs.milli.tolist(), strict=True))
    assert found == ([(gpus, milli)] if gpus else []) + [(8, 1000)]
    assert [dropped in why for why in jobs.dropped] == ([True] if dropped else [])


RAN = ("2024-05-01T10:01:00Z", "2024-05-01T10:02:00Z")
SLICED = {"nvidia.com/gpu.product": "NVIDIA-L40S-SHARED", "nvidia.com/gpu.replicas": "4"}


@pytest.mark.parametrize(("resources", "labels", "gpus"), [
    ({"nvidia.com/gpu": "4"}, SLICED, 1), ({"nvidia.com/gpu.shared": "32"}, {"nvidia.com/gpu.replicas": "4"}, 8),
    ({"nvidia.com/gpu": "7"}, {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"}, 1),
    ({"nvidia.com/mig-1g.5gb": "7", "nvidia.com/mig-3g.20gb": "2"}, {}, 2), ({"nvidia.com/gpu": "8"}, {}, 8),
    ({"nvidia.com/mig-3g.20gb": "16"}, {}, 8),
])  # fmt: skip
def test_the_gpus_of_a_node_that_shares_them_are_counted_once(write, resources, labels, gpus):
    of = node("n", {"cpu": "8", "memory": "64Gi", **resources}, **labels)
    assert cluster_file.load(write("nodes.json", {"kind": "List", "items": [of]})).gpus.tolist() == [gpus]


@pytest.mark.parametrize(("wanted", "labels", "gpus", "milli", "dropped"), [
    ({"nvidia.com/gpu": 1}, SLICED, 1, 250, ""),
    ({"nvidia.com/gpu.shared": 2}, {"nvidia.com/gpu.replicas": "10"}, 1, 200, ""),
    ({"nvidia.com/mig-2g.10gb": 1}, {}, 1, 285, ""),
    ({"nvidia.com/gpu": 1}, {"nvidia.com/gpu.product": "NVIDIA-H100-MIG-1g.10gb"}, 1, 142, ""),
    ({"nvidia.com/gpu.shared": 1}, {}, 0, 0, "unknown size"),
    ({"nvidia.com/mig-2g.10gb": 1, "nvidia.com/gpu": 1}, {}, 0, 0, "several sizes"),
], ids=str)  # fmt: skip
def test_a_pod_holds_the_share_that_its_nodes_labels_say(write, wanted, labels, gpus, milli, dropped):
    items = [node("n", {"cpu": "8", "memory": "1Gi"}, **labels), pod("p", wanted, RAN, nodeName="n")]
    items += [node("m", {"cpu": "8", "memory": "1Gi"}), pod("whole", {"nvidia.com/gpu": 1}, RAN, nodeName="m")]
    jobs = trace.load(write("pods.json", {"kind": "List", "items": items}), "kubectl")
    found = list(zip(jobs.id, jobs.gpus.tolist(), jobs.milli.tolist(), strict=True))
    assert found == ([("lab/p", gpus, milli)] if gpus else []) + [("lab/whole", 1, 1000)]
    assert [dropped in why for why in jobs.dropped] == ([True] if dropped else [])


def test_slices_fill_a_gpu_and_a_shared_product_is_its_type(write):
    """Seven slices of a seventh run side by side, and a pod that selects time slices finds their GPU."""
    items = [node("n", {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}, **SLICED)]
    where = {"nodeName": "n", "nodeSelector": {"nvidia.com/gpu.product": SLICED["nvidia.com/gpu.product"]}}
    items += [pod(f"p{k}", {"nvidia.com/gpu": 1}, RAN, **where) for k in range(4)]
    path = write("pods.json", {"kind": "List", "items": items})
    assert not simulate(trace.load(path, "kubectl"), cluster_file.load(path), "fifo").start.any()
    sevenths = trace.load(write("a", sacct(*[("x", "1:00", "2:00", "gres/gpu:1g.5gb=1")] * 7)), "sacct")
    assert not simulate(sevenths, Cluster.parse("1x1"), "fifo").start.any()


def test_a_pod_holds_its_gpus_from_when_it_was_scheduled(write):
    restarted = pod(
        "r", {"nvidia.com/gpu": 8}, ("2024-05-01T12:00:00Z", "2024-05-01T12:05:00Z"), created="2024-05-01T10:00:00Z"
    )
    restarted["status"] |= {"startTime": "2024-05-01T10:00:05Z", "conditions": [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2024-05-01T10:00:04Z"}]}  # fmt: skip
    items = [restarted, pod("s", {"nvidia.com/gpu": 8}, RAN)]
    jobs = trace.load(write("pods.json", {"kind": "List", "items": items}), "kubectl")
    assert dict(zip(jobs.id, jobs.duration, strict=True)) == {"lab/r": 2 * 3600 + 296, "lab/s": 60}


@pytest.mark.parametrize("limit", ["UNLIMITED", "Partition_Limit"])
def test_a_job_without_a_limit_does_not_backfill(write, limit):
    """It could run beyond the reservation of the job that waits before it, which it would delay."""
    text = sacct(
        ("a", "10:00:00", "10:00:00", "gres/gpu=6"),
        ("b", "1:00:00", "2:00:00", "gres/gpu=8"),
        ("c", "1:00:00", limit, "gres/gpu=2"),
    )
    jobs = trace.load(write("a", text), "sacct")
    assert simulate(jobs, Cluster.parse("1x8"), "fifo-easy").start.tolist() == [0, 36000, 39600]
    assert "1 job without a limit of time: such a job never backfills, and may run for ever" in assumptions(jobs)
    jobs.estimate[2] = 7200
    assert simulate(jobs, Cluster.parse("1x8"), "fifo-easy").start.tolist() == [0, 36000, 0]


def test_phillys_machine_list_is_a_cluster(write):
    nodes = cluster_file.load(
        write("machines.csv", "machineId,number of GPUs, single GPU mem\nm1,2, 12GB\nm2,8, 24GB\n")
    )
    assert nodes.gpus.tolist() == [2, 8] and nodes.gpu_memory.tolist() == [12, 24] and nodes.names == ("m1", "m2")
    why = simulate(Jobs([0], [1], [1], gpu_memory=[24.5]), nodes).unschedulable
    assert why == {0: "the closest node, m2, lacks 24.5 GB a GPU (it has 24)"}
    wrong = (
        ("m1,2,big", "single GPU mem is 'big'; expected a size such as 24GB"),
        ("m1,,24GB", ":2: number of GPUs is nan"),
    )
    for row, words in wrong:
        with pytest.raises(TraceError, match=words):
            cluster_file.load(write("machines.csv", f"machineId,number of GPUs, single GPU mem\n{row}\n"))


def test_requests_of_more_memories_than_a_mask_has_bits():
    """141 sizes, which three kinds of nodes tell apart into four."""
    nodes = Cluster.of([NodeGroup(2, 8, gpu_memory_gb=size) for size in (16, 40, 80)])
    jobs = Jobs(np.arange(141.0), np.full(141, 50.0), np.full(141, 2), gpu_memory=np.arange(141) / 2 + 1)
    result = both(jobs, nodes)
    assert not result.unschedulable and result.start.max() > 141


ANY = st.text(
    st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp"), blacklist_characters="\x85"), min_size=1, max_size=12
)
WORD = ANY.map(str.strip).filter(bool)  # what no format can tell from its surroundings: blanks at either end
HOSTILE = st.sampled_from(
    [
        '"',
        "'a",
        'say ""hi""',
        "#x",
        "[red]:boom:",
        "a,b;c\td",
        "=1+1",
        "NULL",
        "nan",
        "Unknown",
        "\\N",
        "Köln 𝕏",
        "%s{}",
        "; x",
    ]
)
LINES = st.sampled_from(
    ["two\nlines", '"a\r\nb', "tab\there\n# x", "a|b", "x\n\ny"]
)  # where a format can tell them apart


def rows_of(names):
    """Name, submission, duration, GPUs."""
    row = st.tuples(names, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 4096))
    return st.lists(row, min_size=1, max_size=6)


ROWS = rows_of(WORD | HOSTILE | LINES)
often = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def same(jobs, rows, tenants=True) -> None:
    order = sorted(range(len(rows)), key=lambda k: rows[k][1])
    first = rows[order[0]][1]
    assert jobs.duration.tolist() == [rows[k][2] for k in order] and jobs.gpus.tolist() == [rows[k][3] for k in order]
    assert (jobs.submit - jobs.submit[0]).tolist() == [rows[k][1] - first for k in order]
    if tenants:
        assert [jobs.tenants[k] for k in jobs.tenant] == [rows[k][0] for k in order]
    assert not jobs.dropped


def stamp(seconds: int) -> str:
    return str(np.datetime64("2024-02-01T00:00:00") + np.timedelta64(seconds, "s"))


@often
@given(rows=ROWS)
def test_csv(write, rows):
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    out.writerow(["tenant", "submit", "duration", "gpus", "id"])
    out.writerows([*row, f"#{k}"] for k, row in enumerate(rows))
    jobs = trace.load(write("a.csv", file.getvalue()), "csv")
    same(jobs, rows)
    assert {str(id) for id in jobs.id} == {f"#{k}" for k in range(len(rows))}


@often
@given(rows=rows_of((WORD | HOSTILE).filter(lambda name: "|" not in name)))
def test_sacct(write, rows):
    lines = ["JobID|Account|Submit|Start|End|Elapsed|AllocTRES"]
    for k, (name, submit, ran, gpus) in enumerate(rows):
        clock = f"{ran // 86400}-{ran % 86400 // 3600:02}:{ran % 3600 // 60:02}:{ran % 60:02}"
        lines.append(f"{k}|{name}|{stamp(submit)}|{stamp(submit)}|{stamp(submit + ran)}|{clock}|cpu=1,gres/gpu={gpus}")
    same(trace.load(write("a", "\n".join(lines)), "sacct"), rows)


@often
@given(rows=ROWS)
def test_swf(write, rows):
    lines = [
        f"{10**9 + k} {submit} -1 {ran} {gpus} -1 -1 {gpus} -1 -1 1 {2**40 + k} 1 -1 1 -1 -1 -1"
        for k, (_, submit, ran, gpus) in enumerate(rows)
    ]
    jobs = trace.load(write("a.swf", "; a comment\n" + "\n".join(lines)), "swf")
    same(jobs, rows, tenants=False)
    assert {jobs.tenants[k] for k in jobs.tenant} == {f"user {2**40 + k}" for k in range(len(rows))}


@often
@given(rows=ROWS)
def test_kubectl(write, rows):
    items = []
    for k, (name, submit, ran, gpus) in enumerate(rows):
        made = pod(
            f"p{k}", {"nvidia.com/gpu": gpus}, (stamp(submit) + "Z", stamp(submit + ran) + "Z"),
            created=stamp(submit) + "Z",
        )  # fmt: skip
        made["metadata"]["namespace"] = name
        items.append(made)
    same(trace.load(write("a.json", json.dumps({"kind": "List", "items": items})), "kubectl"), rows)


def test_check_says_what_was_read_dropped_and_assumed(tmp_path, weft):
    path = tmp_path / "trace.csv"
    path.write_text("id,submit,duration,gpus,tenant\na,0,60,1,x\nb,3600,7200,4,y\nc,5,,1,x\nd,9,30,64,x\n")
    found = json.loads(weft("check", path, "--format", "csv", "--nodes", "2x8", "--json")[1])
    assert (found["jobs"], found["submitted_over_s"], found["gpus"]["most"]) == (3, 3600.0, 64.0)
    assert found["dropped"] == {"no submission or duration": 1} and found["tenants"] == {"x": 2, "y": 1}
    assert found["gpu_hours"] == pytest.approx((60 + 4 * 7200 + 64 * 30) / 3600)
    assert any(text.startswith("no estimates") for text in found["assumed"])
    assert [never["job"] for never in found["never_run"]] == ["d"]
    shown = weft("check", path, "--format", "csv")[1]
    assert "dropped: 1 row, no submission or duration" in shown and "1 h" in shown


@pytest.mark.parametrize(("order", "start"), [("fifo", 2000), ("fifo-skip", 2)])
def test_a_strict_head_keeps_its_nominal_quota_from_borrowers(order, start):
    """Kueue's issue 4809: guaranteed2 waits for a GPU of its tenant's own; besteffort1 borrows it only under BestEffortFIFO."""
    names = ("guaranteed", "besteffort")
    jobs = Jobs(
        np.array([0.0, 1, 2]),
        np.array([1000.0, 1000, 100]),
        np.array([1, 2, 1]),
        tenant=np.array([0, 0, 1]),
        tenants=names,
    )
    found = both(jobs, Cluster.parse("1x2"), order, quotas={"guaranteed": Quota(2), "besteffort": Quota(0)})
    assert found.start[2] == start


def test_a_gang_stops_no_job_that_it_does_not_need():
    """The third job takes the nodes that the second one leaves; the first goes on."""
    jobs = Jobs(np.array([0.0, 1, 900]), np.array([30000.0, 1000, 12]), np.array([32, 128, 128]))
    found = both(jobs, Cluster.parse("20x8"), "srtf", restart_s=60.0)
    assert found.stops.tolist() == [0, 1, 0] and found.start[2] == 900


def test_an_option_given_twice_is_refused_and_a_name_is_no_emoji(tmp_path, weft):
    path = tmp_path / "trace.csv"
    path.write_text("id,submit,duration,gpus,tenant\na,0,60,1,root:x:0\nb,0,60,1,[red]\n")
    code, _, err = weft(path, "--format", "csv", "--nodes", "1x2", "--nodes", "2x8")
    assert code == 2 and "--nodes is given twice" in err
    shown = weft("check", path, "--format", "csv")[1]
    assert "root:x:0 1" in shown and "[red] 1" in shown


def test_types_of_gpus_on_the_command_line_in_any_case():
    jobs = Jobs(np.zeros(2), np.ones(2), np.array([4, 8]), types=np.array([1, 1]), type_sets=((), ("a100",)))
    found = both(jobs, Cluster.parse("2xH100:8,1xA100:8"))
    assert found.start.tolist() == [0, 1] and found.cluster.types == ("H100", "A100")
    with pytest.raises(ValueError, match=r"COUNTx\[TYPE:\]GPUS"):
        Cluster.parse("2xH100")


def test_a_job_added_by_hand_has_all_that_a_trace_says():
    sim = Simulator("priority")
    sim.add_node("a", gpus=4, gpu_type="A100")
    sim.add_job("x", gpus=4, duration=5)
    sim.add_job("y", gpus=4, duration=1, submit=1)
    sim.add_job("z", gpus=4, duration=1, submit=2, priority=3, types=["a100"], pods=2, estimate=9)
    with pytest.raises(ValueError, match="H100"):
        sim.add_job("w", gpus=1, types=["H100"])
    while sim.step():
        pass
    assert [sim.jobs[name].start for name in "xyz"] == [0, 6, 5] and sim.jobs["z"].estimate == 9

"""Trace formats and cluster files: small files in each public schema, the real ones where they are, and malformed ones."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import sys
import tarfile
from datetime import datetime, timedelta
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from where import ROOT  # noqa: E402

from weft.cluster import cluster_file, trace  # noqa: E402
from weft.cluster.file import TraceError  # noqa: E402
from weft.definition import UnknownName  # noqa: E402

TRACES = Path(os.environ.get("WEFT_TRACES") or "/nonexistent")
with_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="WEFT_TRACES names no folder of traces")


@pytest.fixture
def write(tmp_path):
    """Writes a file: text, bytes, or anything else as JSON."""

    def file(name: str, content) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, str | bytes):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return file


def tar(**members: str) -> bytes:
    """A gzip'd tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(f"{name}.csv")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def rows(jobs, *columns: str) -> list[tuple]:
    """The jobs in order of submission: id, submit, duration, gpus and the named columns."""
    picked = [jobs.id, jobs.submit, jobs.duration, jobs.gpus, *(getattr(jobs, name) for name in columns)]
    return [tuple(row) for row in zip(*(list(column) for column in picked), strict=True)]


# ---- weft's own columns ----------------------------------------------------------------------------------------------

OWN = "name,at,s,gpu_num,types\nb,5,10,2,H100|A100\na,1,20.5,8,\n"
MAPPING = {"id": "name", "submit": "at", "duration": "s", "gpus": "gpu_num"}


@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode()), lambda text: tar(t=text)])
def test_csv_by_its_own_names(write, pack):
    jobs = trace.load(write("t.csv", pack(OWN)), "csv", columns=MAPPING)
    assert rows(jobs, "types") == [("a", 1.0, 20.5, 8, 0), ("b", 5.0, 10.0, 2, 1)]
    assert jobs.type_sets == ((), ("H100", "A100"))


def test_an_empty_cell_is_what_is_usual(write):
    jobs = trace.load(write("t.csv", "submit,duration,gpus,cpu,estimate,milli\n0,5,1,,,\n1,6,1,500,9,250\n"), "csv")
    assert rows(jobs, "cpu", "estimate", "milli") == [(0, 0.0, 5.0, 1, 0, 5.0, 1000), (1, 1.0, 6.0, 1, 500, 9.0, 250)]


def test_a_column_that_is_not_read_is_told(write, tmp_path):
    text = "submit,duration,gpus,prioritys,Milli,colour,time\n0,5,1,2,500,red,7\n"
    told = (
        "columns of the trace that are not read: prioritys (did you mean 'priority'?), Milli (did you mean 'milli'?), "
        "colour, time"
    )
    jobs = trace.load(write("t.csv", text), "csv")
    assert jobs.warnings == (told,) and jobs.take([0]).warnings == (told,)
    assert trace.load(write("t.csv", text), "csv", columns={"submit": "time"}).warnings[0].endswith("colour")
    assert trace.load(write("t.csv", OWN), "csv", columns=MAPPING).warnings == ()
    pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    parquet.write_table(csv.read_csv(write("t.csv", text)), tmp_path / "t.parquet")
    assert trace.load(tmp_path / "t.parquet", "parquet").warnings == (told,)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            "submit,durations,gpus",
            "column duration is missing; did you mean 'durations'? (there are: submit, durations",
        ),
        (
            "submit,time,GPUS",
            "columns duration, gpus are missing; did you mean 'GPUS'? (there are: submit, time, GPUS); called "
            "otherwise: --columns duration=…,gpus=…",
        ),
        ("begin,time,gpu_num", "columns submit, duration, gpus are missing (there are"),
        (
            "submit;duration;gpus",
            "columns submit, duration, gpus are missing; ';' stands between them, expected commas",
        ),
        ("submit,duration,gpus,gpus", "column gpus is there 2 times; expected it once"),
    ],
)
def test_a_column_that_is_missing_or_there_twice_is_named(write, header, words):
    with pytest.raises(TraceError, match=re.escape(words)):
        trace.load(write("t.csv", f"{header}\n{','.join('1' for _ in header.split(','))}\n"), "csv")


def test_requests_beyond_any_cluster_are_refused(write):
    with pytest.raises(TraceError, match=r"pods of job 0 .row 0. is 4,000,000,000; expected at most 1,000,000"):
        trace.load(write("t", "submit,duration,gpus,pods,cpu\n0,1,0,4000000000,4\n"), "csv")
    with pytest.raises(TraceError, match=r"gpus of job 0 .row 0. is 1,000,000,000,000; expected at most 10,000,000"):
        trace.load(write("t", "submit,duration,gpus\n0,1,1e12\n"), "csv")


def test_a_column_that_nobody_wants_may_be_there_twice(write):
    assert len(trace.load(write("t.csv", "submit,duration,gpus,x,x\n0,1,1,a,b\n"), "csv")) == 1


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ("cpu", (8, 96), "cpu: the most that a job asks is 96 thousandths of a core; is the column in another unit?"),
        ("cpu", (8, 128), "cpu: the most that a job asks is 128 thousandths of a core; is"),
        ("memory", (64, 512), "memory: the most that a job asks is 512 MiB; is"),
        ("memory", (1, 2**36), "memory: the most that a job asks is 68,719,476,736 MiB; is"),
        ("gpu_memory", (1, 81920), "gpu_memory: the most that a job asks is 81,920.0 GB of each GPU; is"),
        ("milli", (1, 1), "milli: the most that a job asks is 1 thousandths of each GPU; is"),
        ("cpu", (0, 500), ""),
        ("memory", (0, 65536), ""),
    ],
)
def test_a_column_in_another_unit_is_told(write, column, values, told):
    text = f"submit,duration,gpus,{column}\n" + "".join(f"0,1,1,{value}\n" for value in values)
    warnings = trace.load(write("t.csv", text), "csv").warnings
    assert len(warnings) == bool(told) and all(warning.startswith(told) for warning in warnings)


def test_a_fraction_of_a_thousandth_names_the_unit(write):
    with pytest.raises(
        TraceError, match=r"t:2: cpu is 0.5; expected a whole number of 0 or more .thousandths of a core"
    ):
        trace.load(write("t", "submit,duration,gpus,cpu\n0,1,1,0.5\n"), "csv")


def test_each_job_has_an_id_of_its_own(write):
    jobs = trace.load(write("t", "id,submit,duration,gpus\nz,0,1,0\n,0,1,1\nb,1,1,1\n,2,1,1\n"), "csv")
    assert list(jobs.id) == ["0", "b", "2"]  # the first row, without a GPU, is no job
    for text in ("a,0,1,1\nb,0,1,1\na,1,1,1\n", "0,0,1,1\nb,0,1,1\n,1,1,1\n2,1,1,1\n"):
        with pytest.raises(
            TraceError, match=r"t:\d: id '[a2]' is there already .line \d.; expected another for each job"
        ):
            trace.load(write("t", f"id,submit,duration,gpus\n{text}"), "csv")
    alike = [philly("j", "2017-10-08 07:00:00", attempt("2017-10-08 07:01:00", "2017-10-08 07:02:00", 1))] * 2
    with pytest.raises(TraceError, match="t: id 'j' is there already; expected another for each job"):
        trace.load(write("t", alike), "philly")


def test_parquet_is_csv(write, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    table = csv.read_csv(write("t.csv", OWN))
    for name in ("t.parquet", "t.parquet.gz"):
        parquet.write_table(table, tmp_path / name)
    (tmp_path / "t.parquet.gz").write_bytes(gzip.compress((tmp_path / "t.parquet.gz").read_bytes()))
    for name in ("t.parquet", "t.parquet.gz"):
        jobs = trace.load(tmp_path / name, "parquet", columns=MAPPING)
        assert rows(jobs, "types") == rows(trace.load(tmp_path / "t.csv", "csv", columns=MAPPING), "types")
    parquet.write_table(
        pyarrow.table({"submit": [0, 1], "duration": [None, 2.0], "gpus": [1, 1]}), tmp_path / "n.parquet"
    )
    assert trace.load(tmp_path / "n.parquet", "parquet").dropped == {"no submission or duration": 1}

    with pytest.raises(TraceError, match=r"column gpu_num \(for gpus\) is missing"):
        trace.load(tmp_path / "n.parquet", "parquet", columns={"gpus": "gpu_num"})
    parquet.write_table(pyarrow.table({"submit": [0], "duration": [1], "gpus": ["many"]}), tmp_path / "w.parquet")
    with pytest.raises(TraceError, match="column gpus is of type string; expected double"):
        trace.load(tmp_path / "w.parquet", "parquet")
    parquet.write_table(pyarrow.table({"submit": [0], "duration": [1], "gpus": [-1]}), tmp_path / "w.parquet")
    with pytest.raises(TraceError, match=r"w\.parquet:1: the number of GPUs is -1"):
        trace.load(tmp_path / "w.parquet", "parquet")
    with pytest.raises(TraceError, match="no Parquet file"):
        trace.load(write("x.parquet", OWN), "parquet")


def test_dates_count_from_the_first(write):
    """Half past one in +01:00 is half past twelve in UTC, which a date without a zone is in."""
    dates = "2024-03-01T12:00:00Z", "2024-03-01T13:30:00+01:00", "2024-03-01 13:00:00.5", "2024-03-02"
    cells = "\n".join(f"{date},5,1" for date in ("", *dates))
    jobs = trace.load(write("t", "submit,duration,gpus\n" + cells), "csv")
    assert jobs.submit.tolist() == [0, 1800, 3600.5, 43200] and jobs.dropped == {"no submission or duration": 1}
    renamed = trace.load(write("t", "when,duration,gpus\n2024-03-01,5,1"), "csv", columns={"submit": "when"})
    assert renamed.submit.tolist() == [0]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (("2024-03-01", "2024-13-01"), ":3: submit is '2024-13-01'; expected a date, such as 2024-03-01 12:00:00"),
        (("5", "2024-03-01"), ":3: submit is '2024-03-01'; expected a number; all of the column are dates, or seconds"),
        (("2024-03-01", "5"), ":3: submit is '5'; expected a date"),
        (("soon",), ":2: submit is 'soon'; expected a date, such as 2024-03-01 12:00:00; all"),
    ],
)
def test_a_column_of_times_is_dates_or_seconds(write, cells, words):
    with pytest.raises(TraceError, match=re.escape(words)):
        trace.load(write("t", "submit,duration,gpus\n" + "\n".join(f"{cell},5,1" for cell in cells)), "csv")


def test_dates_in_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    at = datetime(2024, 3, 1, 12)
    for unit, zone in (("ns", None), ("ms", "Europe/Berlin")):
        submit = pyarrow.array([at, None, at + timedelta(seconds=90)], pyarrow.timestamp(unit, zone))
        parquet.write_table(
            pyarrow.table({"submit": submit, "duration": [1, 1, 1], "gpus": [1, 1, 1]}), tmp_path / unit
        )
        assert trace.load(tmp_path / unit, "parquet").submit.tolist() == [0, 90]


def test_a_file_that_is_missing_is_told_with_the_nearest_name(write):
    path = write("t", "submit,duration,gpus\n0,5,1")
    for wrong, words in (
        (path.parent / "tt", f"there is no file {path.parent / 'tt'}; did you mean 't'?"),
        (
            path.parent / "other",
            f"there is no file {path.parent / 'other'}; nothing in {path.parent} has a name like it",
        ),
        (path.parent / "no" / "t", f"there is no file {path.parent / 'no' / 't'}, nor a folder {path.parent / 'no'}"),
    ):
        for read in (lambda wrong=wrong: trace.load(wrong, "csv"), lambda wrong=wrong: cluster_file.load(wrong)):
            with pytest.raises(FileNotFoundError) as caught:
                read()
            assert str(caught.value) == words
    with pytest.raises(TraceError, match="is a folder; expected a file"):
        trace.load(path.parent, "csv")


@pytest.mark.parametrize(("format", "library"), [("parquet", "pyarrow"), ("yaml", "yaml")])
def test_a_missing_library_names_the_install_line(monkeypatch, write, format, library):
    monkeypatch.setitem(sys.modules, library, None)
    read = trace.load if format == "parquet" else cluster_file.load
    with pytest.raises(ImportError, match=r"pip install 'weft\["):
        read(write("t", "x"), format)


def test_an_option_that_a_format_has_not_is_named(write):
    with pytest.raises(UnknownName, match="unknown option of trace format 'csv' 'column'; did you mean 'columns'"):
        trace.load(write("t.csv", OWN), "csv", column={})
    with pytest.raises(UnknownName, match="unknown column 'gpu'; did you mean 'gpus'"):
        trace.load(write("t.csv", OWN), "csv", columns={"gpu": "gpu_num"})
    with pytest.raises(UnknownName, match="unknown trace format 'phily'; did you mean 'philly'"):
        trace.load("t.csv", "phily")


# ---- published formats -----------------------------------------------------------------------------------------------


def attempt(start, end, *gpus: int) -> dict:
    detail = [{"ip": f"m{k}", "gpus": [f"gpu{g}" for g in range(n)]} for k, n in enumerate(gpus)]
    return {"start_time": start, "end_time": end, "detail": detail}


def philly(jobid: str, submitted: str, *attempts: dict) -> dict:
    return {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": jobid,
        "attempts": attempts,
        "submitted_time": submitted,
        "user": "u",
    }


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
    head = "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    jobs = trace.load(
        write(
            "cluster_log.csv",
            head + "7,u,vcA,x,16,48,2,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:11,2020-06-09 18:42:01,50,10\n"
            "8,u,vcB,x,0,1,1,COMPLETED,2020-06-09 18:41:02,2020-06-09 18:41:11,2020-06-09 18:42:01,50,10\n"
            "9,u,vcB,x,1,1,1,CANCELLED,2020-06-09 18:41:03,None,None,,\n",
        ),
        "helios",
    )
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


PAI = """\
a,worker,2.0,Terminated,100.0,160.0,400.0,29.296875,50.0,T4
a,ps,1.0,Terminated,100.0,160.0,600.0,10.0,,
b,tensorflow,3.0,Failed,50.0,55.0,600.0,1.0,200.0,V100M32
c,worker,1.0,Running,70.0,,600.0,1.0,100.0,MISC
d,worker,1.0,Terminated,70.0,80.0,600.0,1.0,150.0,MISC
e,worker,,Terminated,70.0,80.0,600.0,1.0,100.0,MISC
f,worker,1.0,Terminated,20.0,30.0,,,25.0,
"""
PAI_HEAD = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
PAI_JOBS = "a,i1,u1,Terminated,90.0,160.0\nb,i2,u2,Failed,48.0,55.0\n"


@pytest.mark.parametrize("content", [PAI, PAI_HEAD + PAI, tar(pai_task_table=PAI)])
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
    jobs = trace.load(
        write(
            "t.csv",
            head
            + row.format("i0", "HN", 1, "10,12.5,100")
            + row.format("i1", "HN", 1, ",,100")
            + row.format("i2", "HN", 1, "10,12,")
            + row.format("i3", "HN", 1, ",,")
            + row.format("i4", "CN", 0, "10,12,100"),
        ),
        "alibaba2025",
    )
    assert rows(jobs, "pods", "cpu", "memory") == [("i0", 10.0, 87.5, 1, 1, 12_000, 122_880)]
    assert jobs.dropped == {"there before the window": 2, "there after the window": 1, "no GPU": 1}


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


SPEEDS = {"v100": {"('LM', 2)": {"null": 4.0}, "('LM', 1)": {"null": 0.0}}, "k80": {"('LM', 2)": {"null": 0.5}}}


@pytest.mark.parametrize(
    "line",
    [
        "{model}\tcmd\tfolder\t-n\t1\t{steps}\t{gpus}\t2\t-1.0\t{at}\n",
        "{model}\tcmd\t-n\t1\t{steps}\t{gpus}\t2\t-1.0\t{at}\n",
        "{model}\tcmd\t-n\t1\t{steps}\t{at}\t{gpus}\n",
    ],
)
def test_gavel_divides_steps_by_their_speed(write, line):
    write("simulation_throughputs.json.gz", gzip.compress(json.dumps(SPEEDS).encode()))
    text = "".join(
        line.format(model=model, steps=steps, gpus=gpus, at=at)
        for model, steps, gpus, at in (("LM", 100, 2, 7.5), ("LM", 100, 1, 8), ("LM", 100, 4, 9), ("GPT", 100, 2, 9))
    )
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
    write(
        "traces/bert/scalability.csv",
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n4,4,4,7,7\n4,4,8,7,7\n1,4,4,2,1\n1,4,8,4,1\n",
    )
    path = write(
        "workloads/scale/w.csv",
        "name,time,application,num_replicas,batch_size\nfour,2,bert,4,24\ntwo,1,bert,2,24\nbatch,3,bert,2,25\ngpus,4,bert,3,24\n"
        "alone,5,bert,1,24\nsmall,6,bert,12,24\n",
    )
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


SACCT = """\
JobID|User|Account|Partition|Submit|Start|End|Elapsed|Timelimit|State|AllocTRES|ReqTRES|NNodes|Priority
12|ann|chem|gpu|2024-05-01T10:00:30|2024-05-01T11:00:00|2024-05-02T13:00:01|1-02:00:01|2-00:00:00|COMPLETED|\
billing=9,cpu=64,gres/gpu:h100=8,gres/gpu=8,mem=500G,node=2|cpu=64,gres/gpu:h100=8,mem=500G|2|4000
12.batch||chem||2024-05-01T11:00:00|2024-05-01T11:00:00|2024-05-02T13:00:01|1-02:00:01||COMPLETED|cpu=32,node=1||1|
12.0||chem||2024-05-01T11:00:00|2024-05-01T11:00:00|2024-05-02T13:00:01|1-02:00:01||COMPLETED|cpu=32,node=1||1|
13_4|bob||gpu|2024-05-01T10:00:00|2024-05-01T10:00:00|2024-05-01T10:05:00|05:00|UNLIMITED|CANCELLED by 7|\
cpu=3,gres/gpu:a100=1,gres/gpu:h100=2,mem=256000M|gres/gpu=3|2|
14|bob||gpu|2024-05-01T10:00:00|Unknown|Unknown|00:00:00|1:00:00|PENDING||gres/gpu=8|1|1
15|bob||gpu|2024-05-01T10:00:00|2024-05-01T10:00:00|Unknown|00:10:00|1:00:00|RUNNING|gres/gpu=8|gres/gpu=8|1|1
16|bob||cpu|2024-05-01T10:00:00|2024-05-01T10:00:00|2024-05-01T10:00:09|00:00:09|1:00:00|COMPLETED|cpu=1,mem=1G||1|1
"""


def test_sacct(write):
    jobs = trace.load(write("sacct.txt", SACCT), "sacct")
    assert rows(jobs, "estimate", "pods", "cpu", "memory", "priority") == [
        ("13_4", 0.0, 300.0, 3, 300.0, 0, 3000, 256_000, 0.0),
        ("12", 30.0, 93_601.0, 8, 172_800.0, 2, 64_000, 512_000, 4000.0),
    ]
    assert [jobs.type_sets[k] for k in jobs.types] == [(), ("h100",)]
    assert [jobs.tenants[k] for k in jobs.tenant] == ["bob", "chem"]
    assert jobs.dropped == {"never started": 1, "not ended": 1, "no GPU": 1}


def pod(
    name: str, requests: dict, *runs: tuple, phase: str = "Succeeded", created: str = "2024-05-01T10:00:00Z", **spec
):
    states = [{"state": {"terminated": {"startedAt": start, "finishedAt": end}}} for start, end in runs]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "lab", "creationTimestamp": created},
        "spec": {"containers": [{"name": "main", "resources": {"requests": requests}}], **spec},
        "status": {"phase": phase, "containerStatuses": states},
    }


def node(name: str, resources: dict, **labels: str) -> dict:
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}, "status": {"allocatable": resources}}


def test_kubectl(write):
    ran = ("2024-05-01T10:01:00Z", "2024-05-01T10:02:00Z")
    restarted = pod("again", {"amd.com/gpu": 1}, ran, created="2024-05-01T10:00:05Z")
    restarted["status"]["containerStatuses"][0]["lastState"] = {
        "terminated": {"startedAt": "2024-05-01T10:00:10Z", "finishedAt": "2024-05-01T10:00:20Z"}
    }
    items = [
        restarted,
        pod(
            "train", {"nvidia.com/gpu": "8", "cpu": "1500m", "memory": "2Gi"}, ran,
            nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, priority=1000,
            initContainers=[{"resources": {"limits": {"cpu": "4"}}}],
        ),
        node("n", {"cpu": "8", "memory": "64Gi"}),
        pod("runs", {"nvidia.com/gpu": "8"}, phase="Running"),
        pod("evicted", {"nvidia.com/gpu": "8"}, phase="Failed"),
        pod("web", {"cpu": "1"}, ran),
        pod("slice", {"nvidia.com/mig-1g.10gb": "1"}, ran),
    ]  # fmt: skip
    jobs = trace.load(write("pods.json", {"kind": "List", "items": items}), "kubectl", {"tenant": "lab"})
    assert rows(jobs, "cpu", "memory", "priority", "pods") == [
        ("lab/train", 0.0, 60.0, 8, 4000, 2048, 1000.0, 1),
        ("lab/again", 5.0, 110.0, 1, 0, 0, 0.0, 1),
    ]
    assert [jobs.type_sets[k] for k in jobs.types] == [("NVIDIA-H100-80GB-HBM3",), ()]
    assert jobs.dropped == {"not finished": 1, "finished without having run": 1, "no GPU": 1, "slices of a GPU": 1}
    bare = [{key: value for key, value in item.items() if key != "kind"} for item in items if item["kind"] == "Pod"]
    assert len(trace.load(write("api.json", {"kind": "PodList", "items": bare}), "kubectl")) == 2


# ---- malformed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "text", "words"),
    [
        ("csv", "submit,duration,gpus,pods\n0,1,2,0.5\n", "t:2: pods is 0.5; expected a whole number of 0 or more"),
        ("csv", "submit,duration,gpus,cpu\n0,1,2,inf\n", "t:2: cpu is inf; expected a whole number"),
        ("csv", "submit,duration,gpus\n0,1,inf\n", "t:2: inf GPUs; expected a whole number"),
        ("csv", "submit,duration,gpus,pods\n0,1,3,2\n", "t: jobs: job 0 (row 0) has 3 GPUs in 2 pods; expected equal pods"),
        ("csv", "", "columns submit, duration, gpus are missing (there are: none)"),
        ("philly", "[{]", "t:1: no JSON at column 3"),
        ("philly", "{}", "a JSON dict; expected a list of jobs"),
        ("philly", '[{"jobid": "x"}]', "job 1 (x): KeyError: 'submitted_time'; expected submitted_time"),
        ("philly", "[3]", "job 1 (no object): TypeError"),
        ("philly", json.dumps([philly("x", "yesterday")]), "job 1 (x): ValueError"),
        ("philly", "timestamp,duration,num_gpus,gpu_time,cluster\nnoon,1,1,1,c\n", "t:2: timestamp is 'noon'; expected"),
        ("pai", "a,b,1,T,1,2,1,1,100\n", "t:1: 9 columns; expected 10"),
        ("pai", "a,b,1.5,T,1,2,1,1,100,T4\n", "t:1: inst_num is 1.5; expected a whole number of 1 or more"),
        ("pai", "a,b,1,T,9,2,1,1,100,T4\n", "t:1: the duration is -7"),
        ("gavel", "LM\tcmd\t-n\t1\t100\t0\t1\n", "it needs simulation_throughputs.json, which is neither in its folder"),
        ("sacct", SACCT.replace("1-02:00:01", "1:2:3:4"), "t:2: Elapsed is '1:2:3:4'; expected [days-][hours:]minutes:sec"),
        ("sacct", SACCT.replace("gpu=8", "gpu=x"), "t:2: 'gres/gpu=x'"),
        ("sacct", SACCT.replace("mem=500G", "mem=big"), "t:2: mem=big; expected a size such as 64G"),
        ("sacct", SACCT.replace("T10:00:30", " half past ten"), "t:2: Submit is '2024-05-01 half past ten'; expected"),
        ("sacct", SACCT.replace("AllocTRES", "TRES"), "column AllocTRES is missing"),
        ("kubectl", "[]", "no Kubernetes objects; expected what 'kubectl get … -o json' writes"),
        ("kubectl", json.dumps(pod("p", {"nvidia.com/gpu": "two"})), "pod lab/p: ValueError: 'two' is no quantity"),
        ("kubectl", json.dumps({"kind": "Pod"}), "pod default/: KeyError"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_named(write, format, text, words):
    with pytest.raises(TraceError) as caught:
        trace.load(write("t", text), format)
    assert str(caught.value).startswith(str(write("t", text).parent)) and words in str(caught.value)


@pytest.mark.parametrize("format", sorted(set(trace.formats()) - {"parquet"}))
def test_an_empty_file_has_no_jobs(write, format):
    with pytest.raises(TraceError):
        trace.load(write("t", ""), format)


def test_damage_and_encodings(write):
    whole = gzip.compress(OWN.encode())
    with pytest.raises(TraceError, match="it is not whole"):
        trace.load(write("t", whole[:-9]), "csv")
    with pytest.raises(TraceError, match=r"an archive of 2 files \(a.csv, b.csv\); expected one"):
        trace.load(write("t", tar(a=OWN, b=OWN)), "csv")
    text = "submit,duration,gpus,tenant\n0,1,1,Köln\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "cp1252"):
        assert trace.load(write("t", text.encode(encoding)), "csv").tenants == ("Köln",)
    assert trace.load(write("t", codecs.BOM_UTF16_BE + text.encode("utf-16-be")), "csv").tenants == ("Köln",)
    for content, line in ((text.encode("utf-16-le"), 1), (text.encode() + b"0,1,\0,a\n", 3)):
        with pytest.raises(
            TraceError, match=f"t:{line}: a zero byte, .* UTF-16 without a mark; expected text in UTF-8"
        ):
            trace.load(write("t", content), "csv")


# ---- cluster files ---------------------------------------------------------------------------------------------------

YAML = """\
# two kinds of nodes
nodes:
  - count: 2
    gpus: 8
    gpu_type: H100
    gpu_memory_gb: 80
    cpu: 96
    memory_gb: 1024.5
    rack: a
    name: big
  - {count: 1, gpus: 0, gpu_type: none}
"""


def test_a_yaml_cluster(write):
    pytest.importorskip("yaml")
    cluster = cluster_file.load(write("c.yaml", YAML))
    assert cluster.names == ("big-0", "big-1", "node-0") and cluster.types == ("H100", "none")
    assert cluster.gpus.tolist() == [8, 8, 0] and cluster.rack.tolist() == [0, 0, 1]
    assert cluster.gpu_memory.tolist() == [80, 80, -1] and cluster.cpu.tolist() == [96_000, 96_000, -1]
    assert cluster.memory.tolist() == [1_049_088, 1_049_088, -1]
    assert cluster_file.load(write("c.yml.gz", gzip.compress(YAML.encode()))).names == cluster.names


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gpu_type: H100", "gpu_typ: H100", "c.yaml:5: unknown key 'gpu_typ'; did you mean 'gpu_type'?"),
        ("nodes:", "node:", "c.yaml:2: unknown key 'node'; did you mean 'nodes'?"),
        ("count: 2", "count: two", "c.yaml:3: count is 'two'; expected a whole number of 0 or more"),
        ("gpus: 8", "gpus: 7.5", "c.yaml:4: gpus is 7.5; expected a whole number"),
        ("gpus: 8", "gpus: yes", "c.yaml:4: gpus is True; expected a whole number"),
        ("gpus: 8", "gpus: -8", "c.yaml:4: gpus is -8; expected a whole number of 0 or more"),
        ("gpus: 8", "count: 8", "c.yaml:4: count is there already (line 3)"),
        ("gpus: 8", "gpus: [8", "c.yaml:5: no YAML"),
        ("cpu: 96", "cpu: .inf", "c.yaml:7: cpu is inf; expected a number of 0 or more"),
        ("cpu: 96", "cpu: !!python/name:os.system 1", "c.yaml:7: cpu: "),
        ("rack: a", "rack: 7", "c.yaml:9: rack is 7; expected a word"),
        ("count: 1, ", "", "c.yaml:11: count is missing"),
        ("{count: 1, gpus: 0, gpu_type: none}", "20x8", "c.yaml:11: a group of nodes is a scalar; expected 'key: value' of"),
        (YAML, "nodes: 20x8", "c.yaml:1: nodes is no list"),
        (YAML, "- count: 1", "c.yaml:1: the file is a sequence; expected 'key: value' of nodes"),
        (YAML, "", "it is empty; expected groups of nodes under 'nodes:'"),
        (YAML, "{}", "c.yaml:1: 'nodes' is missing"),
        (YAML, "nodes: []", "it has no nodes"),
        (YAML, "nodes: \x01", "no YAML"),
        (YAML, "nodes: \x00", "c.yaml:1: a zero byte"),
    ],
)  # fmt: skip
def test_a_yaml_mistake_is_named_with_its_line(write, old, new, words):
    pytest.importorskip("yaml")
    assert old in YAML
    with pytest.raises(TraceError) as caught:
        cluster_file.load(write("c.yaml", YAML.replace(old, new, 1)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes: &a [*a]", "c.yaml:1: a group of nodes is a sequence; expected 'key: value'"),
        ("nodes:\n  - &a {count: 1, name: *a}", "c.yaml:2: name is a mapping; expected a word"),
        ("nodes:\n  - {count: 1, name: &a [*a]}", "c.yaml:2: name is a sequence; expected a word"),
        ("nodes: " + "[" * 5000, "c.yaml: no YAML: lists within lists"),
    ],
)
def test_a_yaml_file_that_holds_itself_is_named(write, text, words):
    pytest.importorskip("yaml")
    with pytest.raises(TraceError, match=re.escape(words)):
        cluster_file.load(write("c.yaml", text))


def test_a_few_lines_of_aliases_make_no_gigabytes(write):
    pytest.importorskip("yaml")
    value = "&a0 [x]"
    for level in range(1, 12):
        value = f"&a{level} [{value}{f', *a{level - 1}' * 9}]"
    with pytest.raises(TraceError, match=re.escape("c.yaml:2: name is a sequence; expected a word")):
        cluster_file.load(write("c.yaml", f"nodes:\n  - {{count: 1, name: {value}}}\n"))
    cluster = cluster_file.load(write("c.yaml", "nodes:\n  - &a {count: 1, gpus: &g 4}\n  - *a\n  - {count: *g}\n"))
    assert cluster.gpus.tolist() == [4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("text", ["[" * 100_000, '[{"jobid": ' + "1" * 10_000 + "}]"])
def test_json_that_no_reader_takes_is_named(write, text):
    with pytest.raises(TraceError, match="t: no JSON"):
        trace.load(write("t", text), "philly")


def test_published_cluster_files(write):
    tiresias = "num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n2,3,4,40,256\n"
    cluster = cluster_file.load(write("cluster_spec.csv", tiresias))
    assert len(cluster) == 6 and cluster.total_gpus == 24 and cluster.rack.tolist() == [0, 0, 0, 1, 1, 1]
    assert set(cluster.cpu.tolist()) == {40_000} and set(cluster.memory.tolist()) == {262_144}

    openb = "sn,cpu_milli,memory_mib,gpu,model\nopenb-node-0000,64000,262144,2,P100\nopenb-node-0009,32000,1000,0,\n"
    cluster = cluster_file.load(write("nodes.csv", openb))
    assert cluster.names == ("openb-node-0000", "openb-node-0009") and cluster.types == ("P100", "none")
    assert cluster.cpu.tolist() == [64_000, 32_000] and cluster.memory.tolist() == [262_144, 1000]

    pai = "7399a7,CPU,96,512,0\n75c536,V100M32,96,384,8\n"
    for content in (pai, "machine,gpu_type,cap_cpu,cap_mem,cap_gpu\n" + pai, tar(pai_machine_spec=pai)):
        cluster = cluster_file.load(write("spec", content))
        assert cluster.names == ("7399a7", "75c536") and cluster.types == ("CPU", "V100M32")
        assert cluster.gpus.tolist() == [0, 8] and cluster.memory.tolist() == [524_288, 393_216]

    labels = {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.memory": "81559",
        "topology.example.com/rack": "r1",
    }
    nodes = [
        node("a", {"cpu": "95500m", "memory": "1056Mi", "nvidia.com/gpu": "8"}, **labels),
        node("b", {"cpu": 4, "memory": "1Gi", "amd.com/gpu": "2"}),
        node("c", {"cpu": "4", "memory": "1073741824"}),
        pod("p", {}),
    ]
    cluster = cluster_file.load(write("nodes.json", {"apiVersion": "v1", "kind": "List", "items": nodes}))
    assert cluster.names == ("a", "b", "c") and cluster.gpus.tolist() == [8, 2, 0]
    assert cluster.types == ("NVIDIA-H100-80GB-HBM3", "amd.com/gpu", "none") and cluster.rack.tolist() == [0, 1, 1]
    assert cluster.gpu_memory.tolist() == [80, -1, -1]
    assert cluster.cpu.tolist() == [95_500, 4000, 4000] and cluster.memory.tolist() == [1056, 1024, 1024]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sn,cpu_milli,memory_mib,gpu,model\na,1,1,1,T4\na,1,1,1,T4\n", "c:3: node 'a' is there already (line 2)"),
        ("sn,cpu_milli,memory_mib,gpu,model\na,1,1,,T4\n", "c:2: gpu is nan; expected a number of 0 or more"),
        ("sn,cpu_milli,memory_mib,gpu,model\n", "it has no nodes"),
        ("machine,gpu_type,cap_cpu,cap_mem,cap_gpu\na,T4,-1,1,1\n", "c:2: cap_cpu is -1.0; expected a number of 0 or more"),
        ("num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n1,1.5,1,1,1\n", "c:2: num_node_p_switch is"),
        ("num_switch,num_node_p_switch\n1,1\n", "columns num_gpu_p_node, num_cpu_p_node, mem_p_node are missing"),
        (json.dumps({"kind": "List", "items": [node("a", {"cpu": "4"})]}), "node 'a': KeyError: 'memory'"),
        (json.dumps({"kind": "List", "items": [node("a", {"cpu": "1", "memory": "1"})] * 2}), "c: node 'a' is there already"),
        ("20x8", "it looks like no cluster file that weft knows; expected one of\n  kubectl: kubectl get nodes -o json"),
        ("", "it looks like no cluster file"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_cluster_file_is_named(write, text, words):
    with pytest.raises(TraceError) as caught:
        cluster_file.load(write("c", text))
    assert words in str(caught.value)


def test_the_example_of_the_documentation_is_read(write):
    pytest.importorskip("yaml")
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert len(cluster_file.load(write("c.yaml", page.split("```yaml\n")[1].split("```")[0]))) == 20


def test_a_cluster_files_format_may_be_named(write):
    pytest.importorskip("yaml")
    assert len(cluster_file.load(write("cluster.conf", YAML), "yaml")) == 3
    with pytest.raises(UnknownName, match="unknown cluster file format 'yml'; did you mean 'yaml'"):
        cluster_file.load(write("cluster.conf", YAML), "yml")


# ---- damaged at random -----------------------------------------------------------------------------------------------

PHILLY = [philly("a", "2017-10-07 01:11:39", attempt("2017-10-07 01:12:09", "2017-10-07 01:13:23", 8))]
PODS = {
    "kind": "List",
    "items": [
        pod(
            "p", {"nvidia.com/gpu": "1", "cpu": "1"}, ("2024-05-01T10:01:00Z", "2024-05-01T10:02:00Z"), nodeSelector={}
        ),
        node("n", {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}, **{"nvidia.com/gpu.memory": "81559"}),
    ],
}
SAMPLES = {
    "csv": OWN.replace("name,at,s,gpu_num", "id,submit,duration,gpus"),
    "pai": PAI,
    "philly": json.dumps(PHILLY),
    "sacct": SACCT,
    "kubectl": json.dumps(PODS),
    "gavel": "LM\tcmd\tfolder\t-n\t1\t100\t2\t2\t-1.0\t0\n",
    "gavel speeds": json.dumps(SPEEDS),
    "yaml cluster": YAML,
    "kubectl cluster": json.dumps(PODS),
    "openb cluster": "sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,P100\nb,32000,1000,0,\n",
    "pai cluster": "7399a7,CPU,96,512,0\n75c536,V100M32,96,384,8\n",
    "tiresias cluster": "num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n2,3,4,40,256\n",
}


def damaged(text: str, g: np.random.Generator) -> str:
    """A JSON text with one value replaced; another text with one to three characters replaced, dropped or doubled."""
    if text[0] in "{[" and g.random() < 0.8:
        places, tree = [], json.loads(text)
        stack = [tree]
        while stack:
            here = stack.pop()
            for key in here if isinstance(here, dict) else range(len(here)):
                places.append((here, key))
                if isinstance(here[key], dict | list):
                    stack.append(here[key])
        here, key = places[g.integers(len(places))]
        here[key] = [None, 3, -1.5, "", "x", [], {}, [None], {"a": 1}, True][g.integers(10)]
        return json.dumps(tree)
    letters = list(text)
    for _ in range(g.integers(1, 4)):
        k = int(g.integers(len(letters)))
        letters[k] = ["", letters[k] * 2, *'0-.|,"\n\t:=e x{'][g.integers(15)]
    return "".join(letters)


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_damaged_file_is_read_or_named_as_wrong(write, sample):
    """Whatever is changed in a file, it is read, or refused by an error that names it; nothing else is ever raised."""
    g = np.random.default_rng(len(sample))
    write("simulation_throughputs.json", SPEEDS)
    format, _, kind = sample.partition(" ")
    if format == "yaml":
        pytest.importorskip("yaml")
    refused = 0
    for _ in range(200):
        path = write("simulation_throughputs.json" if kind == "speeds" else "t", damaged(SAMPLES[sample], g))
        try:
            if kind == "cluster":
                cluster_file.load(path, format)
            else:
                trace.load(write("x.trace", SAMPLES["gavel"]) if kind == "speeds" else path, format)
        except (TraceError, UnknownName) as error:
            refused += 1
            assert str(path.parent) in str(error)
    assert 0 < refused < 200


# ---- real files ------------------------------------------------------------------------------------------------------


@with_traces
@pytest.mark.parametrize(
    ("file", "format", "count", "gpus", "dropped"),
    [
        ("philly/sia_pollux_philly.csv.gz", "philly", 82_247, 107_235, {}),
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
    ],
)  # fmt: skip
def test_real_traces(file, format, count, gpus, dropped):
    jobs = trace.load(TRACES / file, format)
    assert (len(jobs), int(jobs.gpus.sum()), jobs.dropped) == (count, gpus, dropped)


@with_traces
def test_durations_that_are_worked_out():
    jobs = trace.load(TRACES / "gavel/physical_cluster/max_min_fairness.trace", "gavel")
    assert jobs.duration[0] == pytest.approx(13_237.671872703702)  # 925,982 steps of ResNet-18 on 4 V100s
    jobs = trace.load(TRACES / "pollux/workloads/workload-1.csv", "pollux", {"tenant": "ncf"})
    assert set(jobs.duration.tolist()) == {1548 * 0.02131553226047092}  # a batch of 32,768 on one GPU


@with_traces
@pytest.mark.parametrize(
    ("file", "nodes", "gpus"),
    [
        ("muri/cluster_spec/n8g8.csv", 8, 64),
        ("tiresias/n32g4.csv", 32, 128),
        ("openb/openb_node_list_gpu_node.csv", 1213, 6212),
        ("openb/openb_node_list_all_node.csv", 1523, 6212),
        ("alibaba/pai_machine_spec.tar.gz", 1897, 6742),
    ],
)
def test_real_cluster_files(file, nodes, gpus):
    cluster = cluster_file.load(TRACES / file)
    assert (len(cluster), cluster.total_gpus) == (nodes, gpus)

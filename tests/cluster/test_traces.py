"""Reading traces: weft's own columns, and files that are malformed or damaged."""

import codecs
import gzip
import json
import sys
from datetime import datetime, timedelta

import numpy as np
import pytest
import slurm_files as slurm
from sample_traces import HELIOS, OWN, PAI, SACCT, SPEEDS, YAML, attempt, node, philly, pod, rows, tar

from weft.cluster import cluster_file, trace
from weft.cluster.files.text import TraceError
from weft.definition import UnknownName

TIRESIAS = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n"
SUBMITTED, BEGUN = "submit,duration,gpus\n", "submit,start,end,gpus\n"
MAPPING = {"id": "name", "submit": "at", "duration": "s", "gpus": "gpu_num"}


@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode()), lambda text: tar(t=text)])
def test_csv_by_its_own_names(write, pack):
    jobs = trace.load(write("t.csv", pack(OWN)), "csv", columns=MAPPING)
    assert rows(jobs, "types") == [("a", 1.0, 20.5, 8, 0), ("b", 5.0, 10.0, 2, 1)]
    assert jobs.type_sets == ((), ("H100", "A100"))


def test_an_empty_cell_is_what_is_usual(write):
    jobs = trace.load(write("t.csv", "submit,duration,gpus,cpu,estimate,milli\n0,5,1,,,\n1,6,1,500,9,250\n"), "csv")
    assert rows(jobs, "cpu", "estimate", "milli") == [(0, 0.0, 5.0, 1, 0, 5.0, 1000), (1, 1.0, 6.0, 1, 500, 9.0, 250)]


def test_a_column_that_is_not_read_is_reported(write, tmp_path):
    text = "submit,duration,gpus,prioritys,Milli,colour,time\n0,5,1,2,500,red,7\n"
    told = "columns of the trace that are not read: prioritys (did you mean 'priority'?), "
    told += "Milli (did you mean 'milli'?), colour, time"
    jobs = trace.load(write("t.csv", text), "csv")
    assert jobs.warnings == (told,) and jobs.take([0]).warnings == (told,)
    assert trace.load(write("t.csv", text), "csv", columns={"submit": "time"}).warnings[0].endswith("colour")
    assert trace.load(write("t.csv", OWN), "csv", columns=MAPPING).warnings == ()
    pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    parquet.write_table(csv.read_csv(write("t.csv", text)), tmp_path / "t.parquet")
    assert trace.load(tmp_path / "t.parquet", "parquet").warnings == (told,)


@pytest.mark.parametrize(
    "name", ["workers", "num_workers", "worker_num", "inst_num", "num_inst", "num_instances", "replicas"]
)
def test_gpus_of_each_worker_make_a_gang(write, tmp_path, name):
    text = f"submit,duration,gpus,cpu,memory,{name}\n0,5,2,3000,6400,4\n1,5,1,500,7,\n2,5,0,500,7,2\n"
    jobs = trace.load(write("t", text), "csv")
    found = [(0, 0, 5, 8, 4, 12_000, 25_600), (1, 1, 5, 1, 1, 500, 7), (2, 2, 5, 0, 2, 1000, 14)]
    assert rows(jobs, "pods", "cpu", "memory") == found
    assert [
        w.startswith(f"{name} is taken for a job's workers, each a pod with the GPUs, cores") for w in jobs.warnings
    ] == [True]
    named = trace.load(write("t", text), "csv", columns={"workers": name})
    assert rows(named, "pods", "cpu", "memory") == found and not named.warnings
    total = trace.load(write("t", text.replace("0,5,2,", "0,5,8,")), "csv", columns={"pods": name})
    assert rows(total.take([0, 1]), "pods", "cpu") == [(0, 0, 5, 8, 4, 3000), (1, 1, 5, 1, 0, 500)]
    pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    parquet.write_table(csv.read_csv(write("t", text)), tmp_path / "p")
    assert rows(trace.load(tmp_path / "p", "parquet"), "pods", "cpu", "memory") == found


def test_workers_that_are_no_number_or_two_columns_are_named(write):
    head = "submit,duration,gpus,workers"
    for text, words in (
        (f"{head}\n0,5,1,0\n", "t:2: workers is 0.0; expected a whole number of 1 or more"),
        (f"{head}\n0,5,1,1.5\n", "t:2: workers is 1.5"), (f"{head}\n0,5,inf,2\n", "t:2: gpus is inf"),
        (f"{head}\n0,5,1,9999999\n", "pods of job 0 .row 0. is 9,999,999; expected at most"),
        ("submit,duration,gpus,num_workers,inst_num\n0,5,1,1,1\n",
         "num_workers and inst_num may both be workers; expected one: --columns workers=num_workers"),
    ):  # fmt: skip
        with pytest.raises(TraceError, match=words):
            trace.load(write("t", text), "csv")
    both = f"{head},pods\n0,5,4,2,4\n"
    jobs = trace.load(write("t", both), "csv")
    assert (jobs.gpus[0], jobs.pods[0]) == (4, 4) and jobs.warnings == (
        "columns of the trace that are not read: workers",
    )
    with pytest.raises(TraceError, match="there are both pods and workers; expected one of them"):
        trace.load(write("t", both), "csv", columns={"workers": "workers"})


def test_a_column_that_is_not_read_may_appear_twice(write):
    assert len(trace.load(write("t.csv", "submit,duration,gpus,x,x\n0,1,1,a,b\n"), "csv")) == 1


@pytest.mark.parametrize(("column", "values", "told"), [
    ("cpu", (8, 96), "the largest request of a job is 96 thousandths of a core; is the column in another unit?"),
    ("cpu", (8, 128), "the largest request of a job is 128 thousandths of a core; is"),
    ("memory", (64, 512), "the largest request of a job is 512 MiB; is"),
    ("memory", (1, 2**36), "the largest request of a job is 68,719,476,736 MiB; is"),
    ("gpu_memory", (1, 81920), "the largest request of a job is 81,920.0 GB of each GPU; is"),
    ("milli", (1, 1), "the largest request of a job is 1 thousandths of each GPU; is"), ("cpu", (0, 500), ""),
    ("memory", (0, 65536), ""),
])  # fmt: skip
def test_a_column_in_another_unit_is_reported(write, column, values, told):
    text = f"submit,duration,gpus,{column}\n" + "".join(f"0,1,1,{value}\n" for value in values)
    warnings = trace.load(write("t.csv", text), "csv").warnings
    assert len(warnings) == bool(told) and all(warning.startswith(f"{column}: {told}") for warning in warnings)


def test_each_job_has_an_id_of_its_own(write):
    jobs = trace.load(write("t", "id,submit,duration,gpus\nz,0,1,0\n,0,1,1\nb,1,1,1\n,2,1,1\n"), "csv")
    assert list(jobs.id) == ["0", "b", "2"]  # the first row, without a GPU, is no job
    for text in ("a,0,1,1\nb,0,1,1\na,1,1,1\n", "0,0,1,1\nb,0,1,1\n,1,1,1\n2,1,1,1\n"):
        words = r"t:\d: id '[a2]' already exists .line \d.; expected another for each job"
        with pytest.raises(TraceError, match=words):
            trace.load(write("t", f"id,submit,duration,gpus\n{text}"), "csv")
    alike = [philly("j", "2017-10-08 07:00:00", attempt("2017-10-08 07:01:00", "2017-10-08 07:02:00", 1))] * 2
    with pytest.raises(TraceError, match="t: id 'j' already exists; expected another for each job"):
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
    table = pyarrow.table({"submit": [0, 1], "duration": [None, 2.0], "gpus": [1, 1]})
    parquet.write_table(table, tmp_path / "n.parquet")
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
    jobs = trace.load(write("t", "submit,duration,gpus\n" + "\n".join(f"{date},5,1" for date in ("", *dates))), "csv")
    assert jobs.submit.tolist() == [0, 1800, 3600.5, 43200] and jobs.dropped == {"no submission or duration": 1}
    renamed = trace.load(write("t", "when,duration,gpus\n2024-03-01,5,1"), "csv", columns={"submit": "when"})
    assert renamed.submit.tolist() == [0]


def test_a_quote_that_is_not_closed_swallows_no_jobs(write):
    text = 'submit,duration,gpus,id\n0,5,1,"a ""b"", c"\n1,5,1,"d\n2,5,1,e\n'
    with pytest.raises(trace.TraceError, match=r"t:3: unexpected end of data; expected cells, where quoted from"):
        trace.load(write("t", text), "csv")
    assert list(trace.load(write("closed", text.replace('"d', '"d"')), "csv").id) == ['a "b", c', "d", "e"]


def test_a_time_may_be_unknown_before_the_first_that_is_not(write):
    rows = [f"{submit},None,NULL,1\n{submit},5,9,1\n" for submit in ("NULL", "None")]
    jobs = trace.load(write("t", "submit,start,end,gpus\n" + rows[0] + rows[1] + "3,5,9,1\n"), "csv")
    assert jobs.submit.tolist() == [3] and jobs.dropped == {"no submission or duration": 4}


def test_long_lists_of_columns_that_are_not_read_are_cut(write):
    names = ["submit", "duration", "gpus", "", *(f"more{k}" for k in range(99))]
    (told,) = trace.load(write("t", f"{','.join(names)}\n{','.join('1' * len(names))}\n"), "csv").warnings
    assert told.startswith("columns of the trace that are not read: one without a name, more0, more1, ")
    assert told.endswith("more28, and 70 more")


def test_a_duration_that_is_called_otherwise_is_not_start_and_end(write):
    with pytest.raises(trace.TraceError, match=r"column took \(for duration\) is missing"):
        trace.load(write("t", "submit,start,end,gpus\n0,0,5,1\n"), "csv", columns={"duration": "took"})


def test_start_and_end_stand_for_a_duration(write, tmp_path):
    """A row that has not ended is left out; where there is a duration, the other columns are not read."""
    text = "submit,start,finish,gpus\n2024-03-01,2024-03-01 00:01,2024-03-01 00:03,1\n2024-03-01,2024-03-01 00:01,,1\n"
    jobs = trace.load(write("t", text), "csv", columns={"end": "finish"})
    assert jobs.duration.tolist() == [120] and jobs.dropped == {"no submission or duration": 1} and not jobs.warnings
    jobs = trace.load(write("t", "submit,start,end,duration,gpus\n0,Unknown,Unknown,7,1\n"), "csv")
    assert jobs.duration.tolist() == [7] and jobs.warnings == ("columns of the trace that are not read: start, end",)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"submit": [0], "start": [4], "end": [9.5], "gpus": [1]}), tmp_path / "p")
    assert trace.load(tmp_path / "p", "parquet").duration.tolist() == [5.5]


def test_dates_in_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    at = datetime(2024, 3, 1, 12)
    for unit, zone in (("ns", None), ("ms", "Europe/Berlin")):
        submit = pyarrow.array([at, None, at + timedelta(seconds=90)], pyarrow.timestamp(unit, zone))
        table = pyarrow.table({"submit": submit, "duration": [1, 1, 1], "gpus": [1, 1, 1]})
        parquet.write_table(table, tmp_path / unit)
        assert trace.load(tmp_path / unit, "parquet").submit.tolist() == [0, 90]


def test_a_missing_file_suggests_the_nearest_name(write):
    path = write("t", "submit,duration,gpus\n0,5,1")
    folder = path.parent
    for wrong, words in (
        (folder / "tt", "; did you mean 't'?"),
        (folder / "other", f"; nothing in {folder} has a name like it"),
        (folder / "no" / "t", f", nor a folder {folder / 'no'}"),
    ):
        for read in (lambda wrong=wrong: trace.load(wrong, "csv"), lambda wrong=wrong: cluster_file.load(wrong)):
            with pytest.raises(FileNotFoundError) as caught:
                read()
            assert str(caught.value) == f"there is no file {wrong}{words}"
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


@pytest.mark.parametrize(("format", "text", "words"), [
    ("csv", "submit,duration,gpus,pods\n0,1,2,0.5\n", "t:2: pods is 0.5; expected a whole number of 0 or more"),
    ("csv", "submit,duration,gpus,cpu\n0,1,1,0.5\n", "cpu is 0.5; expected a whole number of 0 or more (thousandths"),
    ("csv", "submit,duration,gpus,pods,cpu\n0,1,0,4e9,4\n", "pods of job 0 (row 0) is 4,000,000,000; expected at most"),
    ("csv", "submit,duration,gpus\n0,1,1e12\n", "gpus of job 0 (row 0) is 1,000,000,000,000; expected at most 10,000,000"),
    ("csv", "submit,duration,gpus,cpu\n0,1,2,inf\n", "t:2: cpu is inf; expected a whole number"),
    ("csv", "submit,duration,gpus\n0,1,inf\n", "t:2: inf GPUs; expected a whole number"),
    ("csv", "submit,duration,gpus,pods\n0,1,3,2\n", "t: jobs: job 0 (row 0) has 3 GPUs in 2 pods; expected equal pods"),
    ("csv", "", "columns submit, duration, gpus are missing (there are: none)"),
    ("csv", "submit,durations,gpus\n1,1,1\n",
     "column duration is missing; did you mean 'durations'? (there are: submit, duration"),
    ("csv", "submit,time,GPUS\n1,1,1\n", "columns duration, gpus are missing; did you mean 'GPUS'? "
     "(there are: submit, time, GPUS); called otherwise: --columns duration=…,gpus=…"),
    ("csv", "begin,time,gpu_num\n1,1,1\n", "columns submit, duration, gpus are missing (there are"),
    ("csv", "submit,duration,gpus,gpus\n1,1,1,1\n", "column gpus is there 2 times; expected it once"),
    ("csv", SUBMITTED + "2024-03-01,5,1\n2024-13-01,5,1", 
     ":3: submit is '2024-13-01'; expected a date, such as 2024-03-01 12:00:00"),
    ("csv", SUBMITTED + "5,5,1\n2024-03-01,5,1", 
     ":3: submit is '2024-03-01'; expected a number; all of the column are dates, or seconds"),
    ("csv", SUBMITTED + "2024-03-01,5,1\n5,5,1", "t:3: submit is '5'; expected a date"),
    ("csv", SUBMITTED + "soon,5,1", "t:2: submit is 'soon'; expected a date, such as 2024-03-01 12:00:00; all"),
    ("csv", BEGUN + "0,5,3,1\n", "t:2: the duration is -2; expected 0 or more"),
    ("csv", BEGUN + "0,inf,inf,1\n", "t:2: start is inf; expected seconds or a date"),
    ("csv", BEGUN + "0,2024-03-01,3,1\n", "one of start and end is dates, the other seconds; expected both alike"),
    ("csv", BEGUN + "0,soon,3,1\n", "t:2: start is 'soon'; expected a date"),
    ("csv", "submit,start,gpus\n0,1,1\n", "column duration is missing"),
    ("tiresias", TIRESIAS, "no jobs are left to simulate (the file has none)"),
    ("tiresias", TIRESIAS + "0,1,0,5,x,10\n", "t:2: 6 columns; expected 7"),
    ("tiresias", TIRESIAS + "0,1,0,5,x,10,0\n1,one,0,5,x,10,0\n", "t:3: num_gpu is 'one'; expected a number"),
    ("tiresias", TIRESIAS + "0,1,-5,5,x,10,0\n", "t:2: the submission is -5; expected 0 or more"),
    ("tiresias", TIRESIAS + "0,1.5,0,5,x,10,0\n", "t:2: 1.5 GPUs; expected a whole number"),
    ("tiresias", TIRESIAS + "0,0,0,5,x,10,0\n0,1,0,5,x,,0\n", "dropped: no submission or duration, 1 dropped: no GPU"),
    ("tiresias", TIRESIAS + "0,1,inf,5,x,10,0\n", "submit of job '0' (row 0) is inf"),
    ("helios", HELIOS.replace("09 18:41:01", "09 18:41:0x"), "t:2: submit_time is '2020-06-09 18:41:0x'; expected"),
    ("philly", "[{]", "t:1: no JSON at column 3"),
    ("philly", "[" * 100_000, "t: no JSON"),
    ("philly", '[{"jobid": ' + "1" * 10_000 + "}]", "t: no JSON"),
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
])  # fmt: skip
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
        words = f"t:{line}: a zero byte, .* UTF-16 without a mark; expected text in UTF-8"
        with pytest.raises(TraceError, match=words):
            trace.load(write("t", content), "csv")


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
CLAIM = {"devices": {"requests": [{"name": "g", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 2}}]}}
CLAIMS = {
    "kind": "List",
    "items": [
        pod("p", {"nvidia.com/gpumem": 4096}, ("2024-05-01T10:01:00Z", "2024-05-01T10:02:00Z"), nodeName="n"),
        pod(
            "q",
            {},
            ("2024-05-01T10:01:00Z", "2024-05-01T10:02:00Z"),
            resourceClaims=[{"name": "x", "resourceClaimName": "c"}],
        ),
        {"kind": "ResourceClaim", "metadata": {"name": "c", "namespace": "lab"}, "spec": CLAIM},
        node("n", {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}, **{"nvidia.com/gpu.memory": "81559"}),
    ],
}
SLURM_JOB = {
    "id": "7_1", "user": "ann", "account": "lab", "submit": 0, "eligible": 9, "start": 60, "end": 90, "elapsed": 30, "limit": 5,
    "nodes": 1, "priority": 4, "reservation": "", "tres": {"cpu": 2, "mem": 1024, "gres/gpu": 2},
}  # fmt: skip
SLURM_NODE = {
    "name": "cn1",
    "gres": "gpu:h100:8(S:0-1),shard:4",
    "state": "IDLE",
    "cpus": 8,
    "memory": 1024,
    "text": "none",
}
SAMPLES = {
    "csv": OWN.replace("name,at,s,gpu_num", "id,submit,duration,gpus"), "pai": PAI, "philly": json.dumps(PHILLY),
    "sacct": SACCT, "kubectl": json.dumps(PODS), "gavel": "LM\tcmd\tfolder\t-n\t1\t100\t2\t2\t-1.0\t0\n",
    "gavel speeds": json.dumps(SPEEDS), "yaml cluster": YAML, "kubectl cluster": json.dumps(PODS),
    "openb cluster": "sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,P100\nb,32000,1000,0,\n",
    "pai cluster": "7399a7,CPU,96,512,0\n75c536,V100M32,96,384,8\n",
    "tiresias cluster": "num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n2,3,4,40,256\n",
    "spot": "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type\n"
    "a,1,T4,8,1,3,0,9,HP\n",
    "pai-simulator": "job_id,num_inst,submit_time,num_cpu,num_gpu,gpu_type,duration,user\n7,2,10,6,0.5,T4,30,u\n",
    "spot cluster": "gpu_model,gpu_capacity_num,cpu_num,node_name\nA10,1,128,0\n",
    "sacct-json": slurm.as_json([SLURM_JOB], "object"), "sacct-json plain": slurm.as_json([SLURM_JOB], "plain"),
    "scontrol cluster": slurm.scontrol([SLURM_NODE]), "scontrol cluster json": slurm.scontrol([SLURM_NODE], "json"),
    "sinfo cluster": slurm.sinfo([SLURM_NODE]), "sinfo cluster json": slurm.sinfo([SLURM_NODE], "json"),
    "kubectl claims": json.dumps(CLAIMS), "kubectl cluster claims": json.dumps(CLAIMS),
    "kubernetes-yaml cluster": "apiVersion: v1\nkind: Node\nmetadata: {name: a}\nstatus:\n"
    "  capacity: {cpu: 4, memory: 1Gi, x/gpu: 2}\n",
}  # fmt: skip


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


@pytest.mark.share(3)
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_damaged_file_is_read_or_named_as_wrong(write, sample):
    """Whatever is changed in a file, it is read, or refused by an error that names it; nothing else is ever raised."""
    g = np.random.default_rng(len(sample))
    write("simulation_throughputs.json", SPEEDS)
    format, kind = [*sample.split(), ""][:2]
    if format.endswith("yaml"):
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


DATED = (
    "submit,duration,gpus\n2024-03-01 00:00,10,1\n2024-03-01 12:00,10,1\n2024-03-02 00:00,10,1\n2024-03-05 06:00,10,1\n"
)


@pytest.mark.parametrize(("since", "until", "kept", "left_out"), [
    ("", "", [0, 0.5, 1, 4.25], {}), ("12h", "", [0.5, 1, 4.25], {"submitted before 12h": 1}),
    ("", "1 d", [0, 0.5], {"submitted from 1 d on": 2}), ("720min", "86401", [0.5, 1], None),
    ("2024-03-02", "2024-03-05T06:00:00", [1], {"submitted before 2024-03-02": 2, "submitted from 2024-03-05T06:00:00 on": 1}),
])  # fmt: skip
def test_jobs_outside_a_span_are_left_out_and_counted(write, since, until, kept, left_out):
    found = trace.load(write("t.csv", DATED), "csv", since=since, until=until)
    assert (found.submit / 86400).tolist() == kept
    assert left_out is None or found.dropped == left_out
    undated = write("u.csv", "submit,duration,gpus\n0,10,1\n43200,10,1\n86400,10,1\n367200,10,1\n")
    if "-" not in since:
        assert (trace.load(undated, "csv", since=since, until=until).submit / 86400).tolist() == kept


@pytest.mark.parametrize(("since", "until", "words"), [
    ("2 weeks", "", "time '2 weeks'; expected a time after the first submission, such as 2d, .*, or a date"),
    ("2024-03-01", "", "time '2024-03-01'; the trace has no dates; expected a time after"),
    ("2d", "1d", "jobs from '2d' until '1d'; expected an end after"), ("-1d", "", "time '-1d'"),
    ("9d", "", "no jobs are left to simulate .1 dropped: submitted before 9d"),
])  # fmt: skip
def test_a_malformed_span_is_refused(write, since, until, words):
    with pytest.raises(ValueError, match=words):
        trace.load(write("t.csv", "submit,duration,gpus\n0,10,1\n"), "csv", since=since, until=until)

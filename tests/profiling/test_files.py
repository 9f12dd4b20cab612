"""Traces that PyTorch, Nsight Systems and Nsight Compute wrote, and files that are damaged."""

import gzip
import json
import sqlite3
from decimal import Decimal
from random import Random

import pytest
from made_traces import ELEMENTWISE, GEMM, MadeTrace

from weft.profiling import bounded, kineto, ncu, read
from weft.profiling.analysis import analyse


def times(value) -> list[float]:
    """All numbers of a profile."""
    if isinstance(value, dict):
        return [n for v in value.values() for n in times(v)]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in times(v)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("base", [0.0, 4833904309043.721, 1790857026000000.123])
def test_kernels_of_a_fifth_of_a_microsecond_have_no_negative_time(tmp_path, base):
    """As text, since a float of 1970's microseconds has lost the nanoseconds already."""
    rows = []
    for i in range(50):
        whole, part = int(base), round((base - int(base)) * 1000) + 317 * i
        ts = f"{whole + part // 1000}.{part % 1000:03d}"
        args = f'{{"device": 0, "stream": 7, "correlation": {i}}}'
        rows.append(
            f'{{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": {ts}, "dur": 0.2, "args": {args}}}'
        )
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + ",".join(rows) + "]}")
    p = analyse(read(path))
    assert p.rows[0].time_us == pytest.approx(50 * 0.2, rel=1e-12)
    assert p.idle[0].time_us == pytest.approx(49 * 0.117, rel=1e-12)
    assert min(times(p.to_dict())) >= 0


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_list_of_events_gzipped_or_not_without_rank_device_or_launches(tmp_path, suffix):
    t = MadeTrace()
    t.span("kernel", GEMM, 0, 5, 7)
    text = json.dumps(t.events).encode()
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(gzip.compress(text) if suffix == "json.gz" else text)
    p = analyse(read(path))
    assert (p.rank, p.gpu, p.rows[0].time_us) == (None, "", 5)


def test_events_that_cannot_be_used_are_counted_and_the_rest_is_read(tmp_path):
    t = MadeTrace()
    t.kernel(0, 10, 5)
    good = t.events[-1]
    t.events += [
        good | {"dur": float("nan")},
        good | {"dur": float("inf")},
        good | {"dur": -3},
        good | {"dur": "long"},
        {k: v for k, v in good.items() if k != "dur"},
        {k: v for k, v in good.items() if k != "ts"},
        {k: v for k, v in good.items() if k != "name"},
        good | {"name": 5},
        good | {"ts": 1e300},
        "no event",
        None,
        good | {"args": [1], "ts": 100},  # usable
        good | {"args": {"correlation": {"a": 1}, "device": [0], "stream": None}, "ts": 120},  # usable
        {"ph": "i", "name": "[memory]", "ts": 1},
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "tid": {},
            "ts": 3,
            "dur": 9,
            "args": {"Input Dims": [[-1], 3], "Input type": 4},
        },
    ]
    p = analyse(read(t.write(tmp_path / "t.json")))
    assert p.dropped == {
        "without a duration": 4,
        "with a negative duration": 1,
        "without a start": 2,
        "without a name": 2,
        "no object": 2,
        "memory without a time or size": 1,
    }
    assert sum(r.time_us for r in p.rows) == 15
    assert min(times(p.to_dict())) >= 0


ODD = [
    None,
    True,
    -1,
    0,
    1e30,
    -1e30,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    {},
    [1],
    {"a": 1},
    2**70,
    Decimal("1e25"),
]


def test_any_value_in_any_place_is_read_without_a_negative_or_infinite_time():
    for seed in range(150):
        random = Random(seed)
        t = MadeTrace()
        for i in range(3):
            t.step(i, 1000 * i, 1000)
            t.op(
                "aten::convolution",
                1000 * i,
                20,
                [(2, 3, 8, 8), (4, 3, 3, 3)],
                **{"Concrete Inputs": ["", "", "", "[1, 1]"]},
            )
            t.op("autograd::engine::evaluate_function: X", 1000 * i + 50, 50, tid=2, **{"Sequence number": 3})
            t.kernel(1000 * i + 5, 1000 * i + 10, 30, ELEMENTWISE)
            t.copy(1000 * i + 20, 1000 * i + 500, 100)
            t.memory(1000 * i + 7, 64, i, 64 * i)
        for _ in range(random.randint(1, 6)):
            event = random.choice(t.events)
            inside = (
                event["args"] if random.random() < 0.5 and event.get("args") and type(event["args"]) is dict else event
            )
            inside[random.choice(list(inside))] = random.choice(ODD)
        try:
            p = analyse(kineto.parse(t.data(), "t.json"))
        except ValueError:
            continue
        found = p.to_dict()
        json.dumps(found, allow_nan=False)
        del found["memory"]  # whose bytes and times are the trace's
        assert min(times(found)) >= 0


def test_spans_that_overlap_on_a_thread_give_no_negative_own_time():
    t = MadeTrace()
    t.op("a", 0, 10)
    t.op("b", 5, 20)  # ends after a, in which it began
    t.op("c", 6, 1)
    t.op("d", 8, 0)
    p = t.profile()
    assert min(r.time_us for r in p.rows) >= 0
    assert {r.operator: r.time_us for r in p.rows} == {"a": 10, "b": 19, "c": 1}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b'{"traceEvents": [{"ph": "X", "na', "cut short or damaged at byte"),
        (b'{"traceEvents": 5}', "traceEvents"),
        (b"[]", "no kernel, operator or call"),
        (b"5", "traceEvents"),
        (b"\xff\xfe\x00", "JSON"),
        (gzip.compress(b'{"traceEvents": []}' * 100, mtime=0)[:-20], "cut short"),
        (b"\x1f\x8bnothing", "gzip"),
        (b"[" * 100_000, "JSON"),
        (b"SQLite format 3\x00" + b"x" * 200, "damaged"),
        (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 0}]', "nothing that takes time"),
        (
            json.dumps([{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]).encode(),
            "1 events dropped: without a duration",
        ),
    ],
)
def test_damaged_files_are_refused_with_the_reason(tmp_path, content, says):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says) as error:
        read(path)
    assert "t.json" in str(error.value)


def test_a_sequence_number_may_be_anything():
    t = MadeTrace()
    t.op("autograd::engine::evaluate_function: X", 0, 50, **{"Sequence number": [3]})
    assert [r.phase for r in analyse(kineto.parse(t.data(), "t.json")).rows] == ["backward"]


def test_other_paths_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "a.nsys-rep").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match="nsys export --type sqlite"):
        read(tmp_path / "a.nsys-rep")
    with pytest.raises(ValueError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.json")


def test_a_written_trace_stays_within_its_size_and_keeps_what_matters_longest(tmp_path):
    t = MadeTrace()
    for step in range(4):
        t.step(step, 10_000 * step, 9_000)
        for i in range(50):
            at = 10_000 * step + 100 * i
            t.span("python_function", f"train.py({i}): f", at, 90)
            t.op("aten::mm", at, 50, [(64, 64), (64, 64)])
            t.kernel(at + 1, at + 10, 20)
            t.memory(at + 2, 64, i, 64)
    whole = len(json.dumps(t.data()))
    seen = []
    for share in (1.2, 0.9, 0.5, 0.2, 0.1):
        path = tmp_path / f"{share}.json.gz"
        seen.append(bounded.write(kineto.load(t.write(tmp_path / "raw.json")), path, int(whole * share) + 4096))
        assert len(gzip.decompress(path.read_bytes())) <= whole * share + 4096
        assert any(s.kind == "kernel" for s in read(path).device)
    assert seen[0] == [] and seen[1] == ["Python functions"]
    assert [len(s) for s in seen] == sorted(len(s) for s in seen)
    assert "steps after the first" in seen[3]


def nsys_export(path, *, kernels=True):
    with sqlite3.connect(path) as file:
        file.executescript(
            """CREATE TABLE StringIds (id INTEGER, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
                correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
                correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER,
                nameId INTEGER);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, globalTid INTEGER);
            CREATE TABLE TARGET_INFO_GPU (name TEXT);
            INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA Test');
            INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel_v7000'), (2, 'void gemm<float>(int)'),
                (3, 'cudaMemcpyAsync_v3020');"""
        )
        pid, tid = 5 << 24, (5 << 24) + 9
        file.execute("INSERT INTO NVTX_EVENTS VALUES (0, 100000, 'step 1', ?)", [tid])
        file.execute("INSERT INTO NVTX_EVENTS VALUES (1000, 9000, 'aten::mm, op_id = 5', ?)", [tid])
        file.execute("INSERT INTO NVTX_EVENTS VALUES (1000, NULL, 'mark', ?)", [tid])
        file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (2000, 7000, ?, 1, 1)", [tid])
        file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (12000, 17000, ?, 2, 3)", [tid])
        file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10000, 10200, 0, 7, 1, ?, 2, 2)", [pid])
        file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10400, 10300, 0, 7, 1, ?, 2, 2)", [pid])
        file.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (30000, 30500, 0, 7, 1, ?, 2, 2)", [6 << 24]
        )  # another process
        file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (20000, 21000, 0, 7, 2, ?, 4000, 1, 0, 2)", [pid])
        if not kernels:
            file.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
    file.close()
    return path


def test_an_export_of_nsight_systems(tmp_path):
    p = analyse(read(nsys_export(tmp_path / "report.sqlite")))
    assert p.gpu == "NVIDIA Test" and p.dropped == {"with a negative duration": 1} and len(p.steps) == 1
    assert {(r.operator, r.calls, r.time_us) for r in p.rows} == {
        ("aten::mm", 1, 0.2),
        ("gemm", 1, 0.5),  # the launch of another process
        ("Memcpy HtoD", 1, 1.0),
    }
    (c,) = p.copies
    assert (c.kind, c.host_memory, c.bytes, c.exposed_us) == ("HtoD", "pageable", 4000, 1.0)
    analyse(read(nsys_export(tmp_path / "without.sqlite", kernels=False)))
    with sqlite3.connect(tmp_path / "other.sqlite") as file:
        file.execute("CREATE TABLE t (a)")
    file.close()
    with pytest.raises(ValueError, match="nsys profile --trace cuda"):
        read(tmp_path / "other.sqlite")


LONG = """==PROF== Connected to process 1
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","void gemm<float>(int)","SOL","Duration","us","1,000.5"
"0","void gemm<float>(int)","SOL","DRAM Throughput","%","20"
"0","void gemm<float>(int)","SOL","Compute (SM) Throughput","%","90"
"1","void add(int)","SOL","Duration","ns","500"
"1","void add(int)","SOL","DRAM Throughput","%","10"
"1","void add(int)","SOL","Compute (SM) Throughput","%","5"
"2","void lost(int)","SOL","Duration","ns","n/a"
"""
WIDE = (
    ",".join(
        f'"{c}"'
        for c in (
            "ID",
            "Kernel Name",
            "gpu__time_duration.sum",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
            "sm__throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__bytes.sum.per_second",
        )
    )
    + """
"","","us","%","%","Gbyte/second"
"0","copy","10","95","5","3000"
"1","copy","30","85","5","2000"
"""
)


def test_the_output_of_nsight_compute_in_both_forms(tmp_path):
    for name, text in (("long", LONG), ("wide", WIDE)):
        (tmp_path / f"{name}.csv").write_text(text)
    gemm, add = ncu.read(tmp_path / "long.csv")
    assert (gemm.name, gemm.time_us, gemm.compute_share, gemm.limited_by) == (
        "gemm",
        pytest.approx(1000.5),
        0.9,
        "compute",
    )
    assert (add.name, add.time_us, add.limited_by) == ("add", pytest.approx(0.5), "latency")
    (copy,) = ncu.read(tmp_path / "wide.csv")
    assert (copy.calls, copy.time_us, copy.limited_by) == (2, pytest.approx(40), "memory")
    assert copy.memory_share == pytest.approx((0.95 * 10 + 0.85 * 30) / 40)
    assert copy.bytes_per_s == pytest.approx((3000 * 10 + 2000 * 30) / 40 * 1e9)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="ncu --csv"):
        ncu.read(tmp_path / "bad.csv")
    (tmp_path / "untimed.csv").write_text('"ID","Kernel Name","x"\n"","","%"\n"0","k","5"\n')
    with pytest.raises(ValueError, match="no launch has a duration"):
        ncu.read(tmp_path / "untimed.csv")


def test_shares_of_the_limit_come_from_the_newest_record_of_the_trace_s_gpu(tmp_path, monkeypatch):
    from weft import records

    monkeypatch.setenv("WEFT_RESULTS", str(tmp_path))
    store = records.Store()
    for time, rate in (("2026-01-01T00:00:00Z", 1e12), ("2026-02-01T00:00:00Z", 2e12)):
        about = {"gpu": "NVIDIA Test", "device": "cuda", "time": time, "run": time}
        store.append("NVIDIA Test", "ceiling", records.ceiling("memory 1:1", "bandwidth", rate, "B/s", **about))
    t = MadeTrace()
    t.op("aten::relu", 0, 10, [(1000, 1000)])
    t.kernel(2, 10, 8, ELEMENTWISE)
    p = t.profile()
    assert p.ceilings == "NVIDIA Test, measured 2026-02-01"
    assert p.rows[0].share_of_ceiling == pytest.approx(8e6 / 2e12 / 8e-6)
    t.gpu = "another"
    assert t.profile().rows[0].share_of_ceiling is None

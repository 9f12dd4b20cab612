"""GPU hours and money: of sacct's output, of a simulation, of a real Prometheus; against sums by hand."""

import csv
import html
import json
import shutil
import subprocess
import time
import urllib.request

import pytest
from slurm_daemons import free_ports
from where import ROOT

from weft.cluster.files.text import TraceError
from weft.deploy import rendering
from weft.deploy.cost import files, prometheus, sacct, simulation, table
from weft.deploy.cost.usage import report

MADE = rendering.load(ROOT / "examples/cluster.yaml")
HEAD = sacct.FIELDS.replace(",", "|") + "\n"
DAY = "2026-11-01T"
ROWS = [
    f"1|a|ada|vision|h100|COMPLETED|{DAY}00:00:00|{DAY}10:00:00|cpu=8,gres/gpu:h100=8,gres/gpu=8",
    f"1.batch|batch||vision||COMPLETED|{DAY}00:00:00|{DAY}10:00:00|cpu=8,gres/gpu=8",
    f"2|b|ben|vision|h100|FAILED|{DAY}00:00:00|{DAY}01:00:00|gres/gpu=4",
    f"3|c|eli|robotics|serve|CANCELLED by 100|{DAY}00:00:00|{DAY}01:00:00|gres/mps=24",
    f"4|d|eli|course|desks|TIMEOUT|{DAY}00:00:00|{DAY}01:00:00|gres/shard=2",
    f"5|d|chen|language|slices|RUNNING|{DAY}05:00:00|Unknown|gres/gpu:1g.10gb=7,gres/gpu=7",
    "6|d|chen|language|slices|PENDING|Unknown|Unknown|",
    f"7|cpu|chen|language|h100|COMPLETED|{DAY}00:00:00|{DAY}01:00:00|cpu=8",
]


def of_sacct(tmp_path, rows=ROWS, made=MADE, **more):
    (tmp_path / "sacct.txt").write_text(HEAD + "".join(f"{row}\n" for row in rows))
    return sacct.load(tmp_path / "sacct.txt", made, **more)


def test_sacct_against_sums_by_hand(tmp_path):
    found = report(of_sacct(tmp_path))
    vision = found["by_team"]["vision"]
    assert vision["gpu_hours"] == 80 + 4 and vision["cost"] == pytest.approx(84 * 2.6)
    assert (
        vision["goodput"] == pytest.approx(80 / 84)
        and vision["badput_hours"] == {"failed": 4}
        and vision["used_hours"] is None
    )
    assert found["by_user"]["eli"]["gpu_hours"] == pytest.approx(
        0.24 + 2 / 4
    )  # percent of MPS, and time slices of a quarter
    assert (
        found["by_job"]["5"]["gpu_hours"] == found["by_job"]["5"]["open_hours"] == 5
    )  # seven sevenths until the last end
    assert found["capacity_hours"] == 576 * 10 and found["unallocated_hours"] == pytest.approx(5760 - 89.74)
    total = found["total"]
    assert total["goodput_hours"] + sum(total["badput_hours"].values()) + total["open_hours"] == pytest.approx(
        total["gpu_hours"]
    )
    assert list(found["by_team"]) == ["vision", "language", "course", "robotics"]
    assert any("1 job left out: never started" in note for note in found["notes"])


def test_a_time_clips_jobs(tmp_path):
    begin, end = table.span("2026-11-01T02:00:00", "2026-11-01T06:00:00")
    found = report(of_sacct(tmp_path, begin=begin, end=end))
    assert {name: each["gpu_hours"] for name, each in found["by_job"].items()} == {"1": 32, "5": 1}
    assert report(of_sacct(tmp_path, made=None, price=2.0))["by_team"]["vision"]["cost"] == 168


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("JobID|User\n1|a\n", "sacct.txt:1: columns Account, State, Start, End, AllocTRES are missing"),
        (HEAD + "1|a|b\n", "sacct.txt:2: 3 columns; expected 9"),
        (HEAD + "1|a|u|x|p|FAILED|yesterday|Unknown|gres/gpu=1\n", "sacct.txt:2: 'yesterday' is no time"),
        ("", "are missing"),
        ("\0", "a zero byte"),
    ],
)
def test_what_is_not_sacct(tmp_path, text, words):
    (tmp_path / "sacct.txt").write_text(text)
    with pytest.raises(TraceError, match=words):
        sacct.load(tmp_path / "sacct.txt")


def test_nothing_is_a_report_too(tmp_path):
    found = report(of_sacct(tmp_path, []))
    assert found["total"]["gpu_hours"] == 0 and found["total"]["goodput"] is None and found["allocation"] is None
    files.write_html(tmp_path / "a.html", of_sacct(tmp_path, []))
    assert report(prometheus.usage({"data": {"result": []}}))["total"]["jobs"] == 0


def test_csv_and_html_escape_hostile_names(tmp_path):
    name = "<script>alert(1)</script>"
    rows = [ROWS[0].replace("|ada|", f"|{name}|").replace("|vision|", "|=cmd()|")]
    period = of_sacct(tmp_path, rows)
    files.write_csv(tmp_path / "a.csv", period)
    files.write_html(tmp_path / "a.html", period)
    (row,) = csv.DictReader((tmp_path / "a.csv").read_text().splitlines())
    assert (
        row["team"] == "'=cmd()" and row["user"] == name and float(row["gpu_hours"]) == 80 and row["cost"] == "208.00"
    )
    page = (tmp_path / "a.html").read_text()
    assert name not in page and html.escape(name) in page and "http" not in page.replace("http-equiv", "")


def test_a_simulation_with_preemptions(tmp_path):
    pytest.importorskip("pyarrow")
    import numpy as np

    from weft.cluster import Cluster, Jobs, metrics, save, simulate
    from weft.cluster.quota import Quota

    jobs = Jobs(
        np.array([0.0, 100.0]),
        np.array([3600.0, 3600.0]),
        np.array([8, 8]),
        tenant=np.array([0, 1]),
        tenants=("a", "b"),
    )
    quotas = {"a": Quota(0), "b": Quota(8)}
    result = simulate(
        jobs, Cluster.parse("1x8"), order="reclaim", quotas=quotas, restart_s=60, checkpoint_s=3600, plain=True
    )
    save.write(tmp_path / "run", result, metrics.summary(result))
    found = report(simulation.load(tmp_path / "run", price=2.0))
    assert result.stops.tolist() == [1, 0] and result.lost[0] == pytest.approx(160)  # a borrowed, b took it back
    lost = found["by_team"]["a"]["badput_hours"]
    assert lost == {
        "work lost at a preemption": pytest.approx(8 * 100 / 3600),
        "restarts": pytest.approx(8 * 60 / 3600),
    }
    assert found["total"]["goodput_hours"] == pytest.approx(16)  # two hours of eight GPUs were wanted
    summary = metrics.summary(result)
    assert found["total"]["gpu_hours"] == pytest.approx((summary["gpu_s"] + summary["lost_gpu_s"]) / 3600)
    assert found["total"]["cost"] == pytest.approx(found["total"]["gpu_hours"] * 2)
    with pytest.raises(TraceError, match="no saved run"):
        simulation.load(tmp_path)


def series(labels, values, begin=1_000_000, step=60):
    return {"metric": {"UUID": "g0", **labels}, "values": [[begin + k * step, str(v)] for k, v in enumerate(values)]}


def test_a_shared_gpu_counts_once():
    held = {"namespace": "vision", "pool": "h100"}
    answer = [series({**held, "pod": "p"}, [100] * 60), series({**held, "pod": "q"}, [50] * 60)]
    found = report(prometheus.usage({"data": {"result": answer}}, MADE))
    assert found["by_team"]["vision"]["gpu_hours"] == pytest.approx(1) and found["capacity_hours"] == pytest.approx(1)
    assert found["by_job"]["vision/p"]["used_hours"] == pytest.approx(0.5)
    assert found["total"]["badput_hours"] == {"held idle": pytest.approx(0.25)}


def test_slices_and_idle_gpus():
    whole = series({}, [0] * 60)  # of a cut GPU, beside its slices
    cut = [
        series(
            {"GPU_I_ID": str(k), "GPU_I_PROFILE": "1g.10gb", "namespace": "a" if k else "", "pod": "p" if k else ""},
            [100] * 60,
        )
        for k in range(7)
    ]
    idle = series({"UUID": "g1"}, [0] * 30)
    found = report(prometheus.usage({"data": {"result": [whole, *cut, idle]}}))
    assert found["total"]["gpu_hours"] == pytest.approx(6 / 7) and found["capacity_hours"] == pytest.approx(1 + 0.5)


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Prometheus: apt-get install prometheus")
def test_a_real_prometheus(tmp_path):
    """An hour of samples: a pod holds GPU 0 for half of it at 80 %, a Slurm job GPU 1 for all of it at 25 %."""
    begin = int(time.time()) // 3600 * 3600 - 7200
    lines = ["# TYPE DCGM_FI_DEV_GPU_UTIL gauge"]
    for k in range(60):
        at = begin + 30 + 60 * k
        pod = ',namespace="vision",pod="p",pool="h100"' if k < 30 else ""
        lines.append(f'DCGM_FI_DEV_GPU_UTIL{{UUID="g0",gpu="0"{pod}}} {80 if k < 30 else 0} {at}')
        lines.append(f'DCGM_FI_DEV_GPU_UTIL{{UUID="g1",gpu="1",hpc_job="17",pool="h100"}} 25 {at}')
    (tmp_path / "samples").write_text("\n".join([lines[0], *sorted(lines[1:])]) + "\n# EOF\n")
    create = ["promtool", "tsdb", "create-blocks-from", "openmetrics", tmp_path / "samples", tmp_path / "data"]
    subprocess.run(create, check=True, capture_output=True)
    (tmp_path / "prometheus.yml").write_text("{}\n")
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    words = [
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = subprocess.Popen(["prometheus", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{address}/-/ready", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        answer = prometheus.fetch(address, begin, begin + 3600, 60)
        with pytest.raises(ConnectionError, match="404"):
            prometheus.fetch(f"{address}/nowhere", begin, begin + 3600, 60)
        with pytest.raises(ValueError, match="expected 1 or more"):
            prometheus.fetch(address, begin, begin + 3600, 0.1)
    finally:
        process.terminate()
        process.wait(timeout=20)
    found = report(prometheus.usage(answer, MADE))
    assert found["by_team"]["vision"]["gpu_hours"] == pytest.approx(0.5)
    assert found["by_team"]["vision"]["used_hours"] == pytest.approx(0.4)
    assert found["by_job"]["17"]["gpu_hours"] == pytest.approx(1) and found["by_job"]["17"]["goodput"] == pytest.approx(
        0.25
    )
    assert found["capacity_hours"] == pytest.approx(2) and found["unallocated_hours"] == pytest.approx(0.5)
    assert found["by_job"]["17"]["cost"] == pytest.approx(2.6)
    with pytest.raises(ConnectionError, match="does not answer"):
        prometheus.fetch(address, begin, begin + 3600, 60)
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    assert report(prometheus.load(tmp_path / "answer.json", MADE))["total"] == found["total"]
    (tmp_path / "answer.json").write_text('{"data": []}')
    with pytest.raises(TraceError, match="expected what /api/v1/query"):
        prometheus.load(tmp_path / "answer.json")

"""Slurm's files: a real Slurm takes them and runs jobs on fake GPUs; scripts with shellcheck; quotas in accounts."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from rendered_slurm import slurm
from slurm_cluster import missing
from slurm_daemons import wait
from where import ROOT, plain_environment

from weft.cluster.files.text import TraceError
from weft.deploy import rendering, slurm_job
from weft.train.launch import read

SMALL = """\
name: tiny
nodes:
  - {name: h100, count: 2, gpus: 4, cpu: 8, memory_gb: 16, rack_nodes: 1}
  - {name: desks, count: 1, gpus: 2, cpu: 8, memory_gb: 16, sharing: {mode: time-slicing, replicas: 4}}
  - {name: serve, count: 1, gpus: 2, cpu: 8, memory_gb: 16, sharing: {mode: mps, replicas: 4}}
  - {name: cpu, count: 1, gpus: 0, cpu: 4, memory_gb: 8}
"""


def rendered(tmp_path, text):
    (tmp_path / "cluster.yaml").write_text(text)
    return rendering.render(rendering.load(tmp_path / "cluster.yaml"), "slurm")


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.skipif(os.geteuid() != 0, reason="a prolog runs as root")
def test_a_real_slurm_takes_the_files_and_runs_jobs_on_fake_gpus(tmp_path):
    with slurm(rendered(tmp_path, SMALL)) as running:
        folder = running.folder
        out = folder / "out"
        script = f"echo $SLURM_JOB_ID $CUDA_VISIBLE_DEVICES; cat {folder}/jobs/$CUDA_VISIBLE_DEVICES"
        number = running.command(
            "sbatch", "--parsable", f"--output={out}", "--partition=h100", "--gres=gpu:h100:1", f"--wrap={script}"
        ).strip()
        assert running.ended(number)["JobState"] == "COMPLETED", out.read_text() + running.logs()
        first, of_prolog = out.read_text().split("\n")[:2]
        assert first == f"{number} 0" and of_prolog == number  # the prolog said which GPU the job has
        wait(lambda: not list((folder / "jobs").iterdir()), 10, running.logs)  # and the epilog that it has none

        gang = running.command(
            "sbatch", "--parsable", f"--output={folder}/gang", "--partition=h100", "--nodes=2", "--gres=gpu:h100:4",
            "--wrap=srun sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE'",
        ).strip()  # fmt: skip
        assert running.ended(gang)["JobState"] == "COMPLETED"
        assert sorted((folder / "gang").read_text().split("\n")[:2]) == ["h100-0 0,1,2,3 8", "h100-1 0,1,2,3 8"]
        for partition, gres in (("desks", "shard:1"), ("serve", "mps:25")):
            shared = running.command(
                "sbatch",
                "--parsable",
                "--output=/dev/null",
                f"--partition={partition}",
                f"--gres={gres}",
                "--wrap=true",
            ).strip()
            assert running.ended(shared)["JobState"] == "COMPLETED"
        topology = running.command("scontrol", "show", "topology")
        assert "SwitchName=h100-rack-1" in topology and "Switches=h100-rack-0" in topology

        # A check that fails in the prolog drains the node, and the job runs elsewhere.
        bad = folder / "bin/weft"
        bad.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\ncase $SLURMD_NODENAME in h100-0) exit 1 ;; esac\n')
        bad.chmod(0o755)
        moved = running.command(
            "sbatch", "--parsable", "--output=/dev/null", "--partition=h100", "--gres=gpu:h100:1", "--wrap=true"
        ).strip()
        wait(lambda: running.state("h100-0").startswith("drain"), 20, running.logs, pause=0.2)
        assert "health check --level quick --prolog" in (folder / "asked").read_text()
        assert "rolog" in running.command("sinfo", "--noheader", "--list-reasons", "--format=%E")
        wait(lambda: running.job(moved)["JobState"] == "PENDING", 20, running.logs, pause=0.2)
        assert running.job(moved)["Priority"] != "0"  # not held; Slurm waits two minutes by itself
        running.command("scontrol", "update", f"JobId={moved}", "StartTime=now")
        assert running.ended(moved)["NodeList"] == "h100-1"


@pytest.mark.long
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.skipif(os.geteuid() != 0, reason="a prolog runs as root")
def test_weft_launch_on_a_real_slurm(tmp_path):
    """A gang of two nodes meets, one rank fails, torchrun starts all again, and the log is followed to the end."""
    pytest.importorskip("torch")
    with slurm(rendered(tmp_path, SMALL)) as running:
        program = (
            "import os, sys, time; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True); "
        )
        program += (
            "first = not os.path.exists('failed'); first and time.sleep(60 if os.environ['RANK'] == '0' else 2); "
        )
        program += "first and open('failed', 'w'); sys.exit(first)"  # the other one waits, as in a collective
        (tmp_path / "program.py").write_text(program)
        (tmp_path / "job.yaml").write_text(
            f"command: {sys.executable} {tmp_path}/program.py\n"
            "id: gang\nprocesses: 1\nnodes: 2\nretries: 1\npool: h100\ngpus: 4\n"
        )
        torchrun = running.folder / "bin/torchrun"
        torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        torchrun.chmod(0o755)
        words = [sys.executable, "-m", "weft", "launch", "job.yaml", "--to", "slurm", "--cluster", "cluster.yaml"]
        environment = plain_environment(**{**running.environment, "OMP_NUM_THREADS": "1"})
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(set(re.findall(r"rank \d of \d", done.stdout))) == ["rank 0 of 2", "rank 1 of 2"]
        assert "exitcode  : 1" in done.stdout or "failed (exitcode: 1)" in done.stdout  # it did fail once
        (tmp_path / "job.yaml").write_text("command: 'false'\nid: bad\npool: h100\n")
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "ended as FAILED, exit code 1:0" in done.stderr


def test_quotas_are_limits_of_accounts(tmp_path):
    text = (ROOT / "examples/cluster.yaml").read_text()
    files = rendered(tmp_path, text)
    ran = []
    (tmp_path / "sacctmgr").write_text('#!/bin/sh\nprintf "%s\\n" "$*"\nexit 1\n')  # as where nothing is new
    (tmp_path / "sacctmgr").chmod(0o755)
    (tmp_path / "accounts.sh").write_text(files["accounts.sh"])
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", tmp_path / "accounts.sh"], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    ran = done.stdout.splitlines()
    vision = next(line for line in ran if "modify account vision" in line)
    assert "gres/gpu:h100=288" in vision and "gres/gpu:a100=128" in vision and "QOS=vision,borrow-institute" in vision
    owned = next(line for line in ran if "modify qos vision" in line)
    assert "gres/gpu:h100=192" in owned and owned.endswith("Preempt=borrow-institute") and "gres/gpu=256" in owned
    assert "gres/mps=3072" in next(line for line in ran if "modify qos robotics" in line)  # 256 shares of 12 %
    assert "borrow" not in next(line for line in ran if "modify qos course" in line)
    assert sum("add user" in line for line in ran) == 6
    tres = re.search(r"AccountingStorageTRES=(\S+)", files["slurm.conf"])[1].split(",")
    assert set(re.findall(r"(gres/[^=,]+)=", owned)) <= set(tres)  # a limit of what is not counted is no limit


def test_the_prolog_says_nothing_of_its_own(tmp_path):
    prolog = rendered(tmp_path, (ROOT / "examples/cluster.yaml").read_text())["prolog.sh"]
    script = prolog.replace("/run/weft/jobs", str(tmp_path / "jobs"))
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env={})
    assert done.stdout == done.stderr == ""


def test_scripts_with_shellcheck(tmp_path):
    tool = shutil.which("shellcheck")
    if not tool:
        pytest.skip("needs shellcheck")
    for name, text in rendered(tmp_path, (ROOT / "examples/cluster.yaml").read_text()).items():
        if name.endswith(".sh"):
            (tmp_path / name).write_text(text)
            subprocess.run([tool, tmp_path / name], check=True)


@pytest.mark.parametrize(("old", "new", "words"), [
    (", cpu: 8", "", ":3: pool 'h100' states no cpu or memory_gb; Slurm needs both"),
    ("rack_nodes: 1", "dra: true", ":3: pool 'h100' has dra, which is Kubernetes'"),
])  # fmt: skip
def test_what_slurm_cannot_have_is_named(tmp_path, old, new, words):
    with pytest.raises(TraceError) as raised:
        rendered(tmp_path, SMALL.replace(old, new, 1))
    assert words in str(raised.value)


@pytest.mark.long
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.skipif(os.geteuid() != 0, reason="a prolog runs as root")
def test_a_requeued_job_goes_on_from_its_checkpoint(tmp_path):
    """One that a preemption or a lost node has ended starts again as this one does."""
    pytest.importorskip("torch")
    (tmp_path / "words.txt").write_text("a quick brown fox jumps over a dog. " * 200)
    given = {
        "text": f"{tmp_path}/words.txt", "out": f"{tmp_path}/run", "steps": 40, "checkpoint_every": 5, "length": 32, "batch": 4,
        "layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "operators": "torch", "optimizer": "adamw", "device": "cpu",
    }  # fmt: skip
    (tmp_path / "program.py").write_text(
        "import os, time\n"
        "from weft.train.loop import train\n"
        "from weft.train.settings import GptSettings\n"
        "def stepped(done, steps, figures):\n"
        "    print('step', done, flush=True)\n"
        "    if done > 7 and 'SLURM_RESTART_COUNT' not in os.environ: time.sleep(1)\n"
        f"train(GptSettings(**{given}), on_step=stepped)\n"
    )
    text = f"command: {sys.executable} {tmp_path}/program.py\nid: again\nretries: 1\npool: h100\ngpus: 1\n"
    (tmp_path / "job.yaml").write_text(text)
    with slurm(rendered(tmp_path, SMALL)) as running:
        script = slurm_job.script(read(str(tmp_path / "job.yaml"), scheduler=True), None, str(tmp_path))
        (tmp_path / "job.sh").write_text(script)
        variables = {**running.environment, "OMP_NUM_THREADS": "1", "WEFT_CACHE": f"{tmp_path}/cache"}
        running.environment = plain_environment(**variables)
        number = running.command("sbatch", "--parsable", str(tmp_path / "job.sh")).strip()
        log = tmp_path / f"again-{number}.log"
        wait(lambda: log.exists() and "step 8\n" in log.read_text(), 60, running.logs, pause=0.2)
        running.command("scontrol", "requeue", number)
        wait(lambda: running.job(number)["JobState"] == "PENDING", 20, running.logs, pause=0.2)
        running.command("scontrol", "update", f"JobId={number}", "StartTime=now")
        assert running.ended(number)["JobState"] == "COMPLETED", log.read_text()
    steps = list(map(int, re.findall(r"^step (\d+)$", log.read_text(), re.MULTILINE)))
    assert steps == list(range(1, 41))  # SIGTERM came first, so no step is lost

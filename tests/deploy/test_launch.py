"""A job file as sbatch script and as each kind of Kubernetes object; following with a kubectl that plays a cluster."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import schemas
from where import ROOT, plain_environment

from weft.definition import UnknownName
from weft.deploy import kubernetes_job, rendering, slurm_job
from weft.deploy.manifests import yaml_text
from weft.train.launch import KINDS, read

JOB = """\
command: weft train gpt --text 'my texts'
id: gpt-1
processes: 8
nodes: 4
retries: 2
team: vision
pool: h100
priority: scavenger
time_limit: 36h
env: {A: "it's $HOME"}
volume: runs:/runs
"""
MADE = rendering.load(ROOT / "examples/cluster.yaml")


def job(tmp_path, text=JOB):
    (tmp_path / "job.yaml").write_text(text)
    return read(str(tmp_path / "job.yaml"), scheduler=True)


@pytest.mark.parametrize(
    "text", [JOB, JOB.replace("nodes: 4", "nodes: 1").replace("processes: 8", "processes: 1"), "command: a\nteam: x\n"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_valid(tmp_path, kind, text):
    made = MADE if "vision" in text else None
    found = kubernetes_job.manifests(job(tmp_path, text + f"kind: {kind}\n"), made)
    for each in found:
        assert each["metadata"]["labels"]["weft.dev/team"] == each["metadata"]["namespace"]
        assert each["kind"] == "Service" or each["spec"]["suspend"]  # Kueue starts it
        if each["apiVersion"] in schemas.CORE or schemas.FOLDER.is_dir():
            schemas.validate(each)
    assert found[-1]["metadata"]["name"] == ("gpt-1-submit" if kind == "raycluster" else "gpt-1") or made is None


def test_the_head_of_ray_runs_the_command_with_its_variables_and_volume(tmp_path):
    cluster, submitted = kubernetes_job.manifests(job(tmp_path, JOB + "kind: raycluster\n"), MADE)
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    (head,) = pod["containers"]
    assert {"A": "it's $HOME", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}.items() <= {
        v["name"]: v["value"] for v in head["env"]
    }.items()
    assert {"name": "work", "mountPath": "/runs"} in head["volumeMounts"] and pod["securityContext"] == {
        "fsGroup": 1000
    }
    assert "nvidia.com/gpu" not in head["resources"]["limits"] and "resourceClaims" not in pod
    assert submitted["spec"]["template"]["spec"]["containers"][0]["command"][-5:-1] == [
        "weft",
        "train",
        "gpt",
        "--text",
    ]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_reads_each_word_of_a_command_as_text(tmp_path):
    """Its YAML knows numbers and truth values that PyYAML's does not, so a --lr of 1e-3 was refused."""
    text = "1e-3 1E+3 .5e1 12e5 1. 0o7 0X1F 0b1 +1 y N on ~ 1_000 1:30 .inf 2001-01-01 = 1e 2.49.0 16Gi"
    words = ["weft", *text.split(), ""]
    given = job(tmp_path, f"command: {words}\nteam: x\nkind: job\nenv: {{A: 1e-3}}\n")
    (tmp_path / "made.yaml").write_text(yaml_text(kubernetes_job.manifests(given)))
    command = ["kubectl", "label", "--local", "--filename", str(tmp_path / "made.yaml"), "a=b", "--output", "json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["command"] == words and {"name": "A", "value": "1e-3"} in container["env"]


@pytest.mark.parametrize(("pool", "name", "gres"), [
    ("h100", "nvidia.com/gpu", "gpu:h100:2"), ("slices", "nvidia.com/mig-1g.10gb", "gpu:1g.10gb:2"),
    ("desks", "nvidia.com/gpu.shared", "shard:2"), ("serve", "nvidia.com/gpu.shared", "mps:24"),
])  # fmt: skip
def test_gpus_are_called_as_the_pool_offers_them(tmp_path, pool, name, gres):
    made = job(tmp_path, JOB.replace("h100", pool).replace("processes: 8", "processes: 2"))
    (jobset,) = kubernetes_job.manifests(made, MADE)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"][name] == "2" and pod["nodeSelector"] == {"weft.dev/pool": pool}
    assert f"--gres={gres}\n" in slurm_job.script(made, MADE)


def test_elastic_jobs(tmp_path):
    elastic = job(tmp_path, JOB + "min_nodes: 2\nkind: job\n")
    service, found = kubernetes_job.manifests(elastic, MADE)
    assert found["metadata"]["annotations"] == {"kueue.x-k8s.io/job-min-parallelism": "2"}
    assert (
        found["spec"]["backoffLimitPerIndex"] == 2
        and found["spec"]["maxFailedIndexes"] == 2
        and "backoffLimit" not in found["spec"]
    )
    assert "--nnodes=2:4" in found["spec"]["template"]["spec"]["containers"][0]["command"]
    assert service["spec"]["clusterIP"] == "None"
    script = slurm_job.script(elastic, MADE)
    assert "--nodes=2-4\n" in script and "#SBATCH --no-kill\n" in script and "--nnodes=2:4 " in script
    with pytest.raises(ValueError, match="expected kind: job"):
        kubernetes_job.manifests(job(tmp_path, JOB + "min_nodes: 2\n"), MADE)


def test_the_sbatch_script(tmp_path):
    script = slurm_job.script(job(tmp_path), MADE, "/logs")
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE))
    assert options["qos"] == options["account"] == "vision" and options["partition"] == "h100"
    assert options["nice"] == "1000" and options["time"] == "2160" and options["output"] == "/logs/%x-%j.log"
    assert "--no-python weft train gpt --text 'my texts'" in script and "#SBATCH --requeue\n" in script
    borrowed = slurm_job.script(job(tmp_path, JOB + "borrow: true\n"), MADE)
    assert "--qos=borrow-institute\n" in borrowed
    tool = shutil.which("shellcheck")
    if tool:
        (tmp_path / "job.sh").write_text(script)
        subprocess.run([tool, "-e", "SC2016", tmp_path / "job.sh"], check=True)
    exports = "\n".join(re.findall(r"^export .*$", script, re.MULTILINE))
    words = ["bash", "-c", f"SLURM_JOB_ID=7\n{exports}\nenv"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    expected = {"A=it's $HOME", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "WEFT_JOB=slurm-7"}
    assert int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", done.stdout)[1]) < int(re.search(r"TERM@(\d+)", script)[1])
    assert expected <= set(done.stdout.splitlines())


@pytest.mark.parametrize(("line", "words"), [
    ("team: Vision", "team is 'Vision'"), ("id: 'a; reboot'", "id is 'a; reboot'"),
    ("time_limit: soon", "time_limit is 'soon'"),
    ("volume: /runs", "volume is '/runs'; expected text like claim:/runs"),
    ("kind: pod", "unknown kind"), ("gpus: -1", "gpus is -1"),
    ("borrow: 3", "borrow is 3"), ("min_nodes: 9", "min_nodes is 9 of 4 nodes"), ("image: 'a b'", "image is 'a b'"),
    ("env: {'A B': 1}", "expected names with values"),
])  # fmt: skip
def test_a_mistake_in_a_job_is_named(tmp_path, line, words):
    key = line.split(":")[0]
    text = "\n".join(each for each in JOB.splitlines() if not each.startswith(f"{key}:"))
    with pytest.raises(ValueError, match=re.escape(words)):
        job(tmp_path, f"{text}\n{line}\n")


@pytest.mark.parametrize(("old", "new", "words"), [
    ("team: vision", "team: visio", "did you mean 'vision'?"), ("pool: h100", "pool: h200", "did you mean 'h100'?"),
    ("team: vision\n", "", "team is missing"),
    ("nodes: 4", "gpus: 9", "asks for 9 GPUs of a node; expected at most 8 in 'h100'"),
])  # fmt: skip
def test_names_that_the_cluster_does_not_have(tmp_path, old, new, words):
    with pytest.raises((UnknownName, ValueError), match=re.escape(words)):
        kubernetes_job.manifests(job(tmp_path, JOB.replace(old, new)), MADE)


KUBECTL = """\
#!{python}
# Plays a cluster: a pod that fails, then the pod of a restart that succeeds; the API server is down once in between.
import json, os, sys, pathlib
here = pathlib.Path(__file__).parent
calls = here / "calls"
n = len(calls.read_text().splitlines()) if calls.exists() else 0
words = sys.argv[1:]
if words[0] == "apply":
    (here / "applied").write_text(sys.stdin.read())
    print("jobset created")
elif words[0] == "logs":
    print("[" + words[-1] + "] step 7", flush=True)
elif words[:2] == ["get", "pods"]:
    old = {{"metadata": {{"uid": "u1", "name": "p1"}}, "status": {{"phase": "Failed"}}}}
    new = {{"metadata": {{"uid": "u2", "name": "p2"}}, "status": {{"phase": "Running"}}}}
    print(json.dumps({{"items": [[], [old], [old, new], [old, new]][min(n - 1, 3)]}}))
else:
    calls.open("a").write("x\\n")
    if n == 1:
        sys.exit("The connection to the server was refused")
    last = {{"type": os.environ["ENDS"], "status": "True", "reason": "Because", "message": "of it"}}
    print(json.dumps({{"status": {{"conditions": [last] if n >= 4 else []}}}}))
"""


@pytest.mark.parametrize(("ends", "status"), [("Completed", 0), ("Failed", 1)])
def test_logs_are_followed_over_restarts(tmp_path, ends, status):
    given = job(tmp_path, JOB.replace("env: {", "env: {WEFT_JOB: mine, "))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kubectl").write_text(KUBECTL.format(python=sys.executable))
    (tmp_path / "bin/kubectl").chmod(0o755)
    script = "import sys; from weft.deploy import submission; submission.POLL_S = 0.05; "
    script += "from weft.cli import main; sys.exit(main())"
    words = ["launch", "job.yaml", "--to", "kubernetes", "--cluster", str(ROOT / "examples/cluster.yaml")]
    environment = plain_environment(PATH=f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}", ENDS=ends)
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    assert sorted(re.findall(r"\[p\d\] step 7", done.stdout)) == ["[p1] step 7", "[p2] step 7"]
    assert ("Because of it" in done.stderr) == (status == 1)
    (applied,) = schemas.documents((tmp_path / "bin/applied").read_text())
    assert applied == json.loads(json.dumps(kubernetes_job.manifests(given, MADE)[0]))

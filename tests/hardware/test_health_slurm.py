"""A real Slurm, whose nodes ``weft health`` drains and resumes, and leaves to administrators."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from cluster.slurm_cluster import missing, slurm
from followed import follows
from slurm_daemons import wait

from weft.hardware.health import slurm_node
from weft.hardware.health.event import Event
from weft.hardware.health.ledger import Ledger
from weft.hardware.health.node import Unreachable, reconcile
from weft.hardware.health.slurm_node import SlurmNode

GPU, OTHER = "0000:9b:00", "0000:01:00"
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def real():
    with slurm(4, 8, "builtin", 60.0) as cluster:
        yield cluster


@pytest.fixture
def there(real, monkeypatch, tools):
    """``scontrol`` alone runs on that Slurm's fast clock."""
    changed = {k: v for k, v in real.environment.items() if os.environ.get(k) != v}
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in changed.items())
    scontrol = shutil.which("scontrol", path=real.environment["PATH"])
    monkeypatch.setenv("PATH", tools(scontrol=f'exec env {variables} {scontrol} "$@"'))
    return real


def state(cluster, name):
    text = cluster.command("scontrol", "--oneliner", "show", "node", name)
    reason = re.search(r"Reason=(.*?) \[", text)
    flags = set(re.search(r" State=(\S+)", text)[1].split("+"))
    return flags - {"NOT_RESPONDING"}, reason[1] if reason else ""


def fail(ledger, kind="xid:95", gpu=GPU):
    ledger.take([Event(kind, gpu, time.time() - 10, "test")])


def repair(ledger, *gpus):
    now = time.time()
    ledger.take([Event("boot", "", now - 1, "test"), *(Event("passed", gpu, now, "test") for gpu in gpus)])


def test_the_daemon_drains_and_resumes(there, tmp_path):
    """From a line of the kernel's log to a drained node in less than 5 s; back after a reset and a check."""
    log, gate = tmp_path / "kmsg", tmp_path / "gate"
    log.touch()
    command = [
        sys.executable, "-m", "weft", "health", "run", "--on", "slurm", "--node", "n0", "--kernel-log", log, "--no-nvml",
        "--state", tmp_path / "state", "--repair", f"test -e {gate}", "--check", "true",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (tmp_path / "said").open("w") as said:
        daemon = subprocess.Popen([*map(str, command)], env=environment, stderr=said)
    says = (tmp_path / "said").read_text
    try:
        wait(lambda: "watching node n0" in says(), 30, says)
        wait(lambda: follows(tmp_path / "state"), 30, says)
        with log.open("a") as file:
            file.write("NVRM: Xid (PCI:0000:9b:00): 95, pid=1, name=x, Uncontained\n")
        began = time.monotonic()
        wait(lambda: "DRAIN" in state(there, "n0")[0], 5, says)
        assert time.monotonic() - began < 5
        identity = re.search(r"weft (q-\w{8}): XID 95 on GPU 0000:9b:00 \(reset\)", state(there, "n0")[1])[1]
        again = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
        assert again.returncode == 1 and "one daemon a node" in again.stderr
        wait(lambda: "reset of 0000:9b:00 ended with 1" in says(), 20, says)
        asked = [
            sys.executable,
            "-m",
            "weft",
            "health",
            "evidence",
            "reset",
            "--gpu",
            GPU,
            "--state",
            str(tmp_path / "state"),
        ]
        assert identity in subprocess.run(asked, env=environment, capture_output=True, text=True).stdout
        wait(lambda: state(there, "n0") == ({"IDLE"}, ""), 20, says)
        assert f"quarantine {identity} ends: repaired" in says()
    finally:
        daemon.terminate()
        assert daemon.wait(20) == 0


def test_a_job_ends_before_the_node_is_empty(there):
    node, ledger = SlurmNode("n1"), Ledger()
    number = there.command(
        "sbatch", "--parsable", "--output=/dev/null", "-w", "n1", "--gres=gpu:1", "--wrap=sleep 6000"
    ).strip()
    wait(lambda: there.jobs()[number]["JobState"] == "RUNNING", 20, lambda: str(there.jobs()[number]))
    fail(ledger)
    reconcile(node, ledger)
    assert (ledger.active().applied, ledger.active().drained) == (True, False) and "jobs run" in ledger.active().waiting
    there.command("scancel", number)
    wait(
        lambda: reconcile(node, ledger) is not None and ledger.active().drained,
        20,
        lambda: str(state(there, "n1")),
        pause=0.3,
    )
    fail(ledger, "xid:79", OTHER)
    reconcile(node, ledger)
    assert "XID 79" in state(there, "n1")[1] and "and 1 more" in state(there, "n1")[1]
    repair(ledger, GPU, OTHER)
    reconcile(node, ledger)
    assert state(there, "n1") == ({"IDLE"}, "")


def test_what_an_administrator_drained_is_left(there):
    node, ledger = SlurmNode("n2"), Ledger()
    there.command("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=fans: bob")
    fail(ledger)
    reconcile(node, ledger)
    assert not ledger.active().applied and "fans: bob" in ledger.active().waiting
    repair(ledger, GPU)
    reconcile(node, ledger)
    assert state(there, "n2") == ({"IDLE", "DRAIN"}, "fans: bob")
    # Drained by weft, then taken over with another reason:
    there.command("scontrol", "update", "NodeName=n2", "State=RESUME")
    fail(ledger, "xid:79")
    reconcile(node, ledger)
    there.command("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=bob looks at it")
    reconcile(node, ledger)
    assert ledger.active() is None and state(there, "n2") == ({"IDLE", "DRAIN"}, "bob looks at it")


def test_what_an_administrator_resumed_stays_in_service(there, monkeypatch):
    node, ledger = SlurmNode("n3"), Ledger()
    fail(ledger)
    reconcile(node, ledger)
    identity = ledger.active().id
    there.command("scontrol", "update", "NodeName=n3", "State=RESUME")
    reconcile(node, ledger)
    assert ledger.quarantine(identity).how == "overridden" and state(there, "n3") == ({"IDLE"}, "")
    fail(ledger)
    reconcile(node, ledger)
    assert state(there, "n3")[0] == {"IDLE"}
    fail(ledger, "xid:48", OTHER)
    reconcile(node, ledger)
    assert "DRAIN" in state(there, "n3")[0] and identity not in state(there, "n3")[1]
    # A node that is down for Slurm's own reasons comes back only when Slurm says so.
    repair(ledger, OTHER)
    there.command("scontrol", "update", "NodeName=n3", "State=DOWN", f"Reason={state(there, 'n3')[1]}")
    run, ran = node._run, []
    monkeypatch.setattr(node, "_run", lambda *words: ran.append(words[-1]) or run(*words))
    reconcile(node, ledger)
    assert "State=UNDRAIN" in ran and "DRAIN" not in state(there, "n3")[0]


def test_a_slurm_that_does_not_answer(there, monkeypatch):
    fails = Ledger()
    fail(fails)
    with pytest.raises(Unreachable, match=r"Invalid node name|not found"):
        reconcile(SlurmNode("nowhere"), fails)
    with pytest.raises(Unreachable, match="install slurm-client"):
        SlurmNode("n0", "no-such-scontrol").read()
    monkeypatch.setattr(slurm_node, "TIMEOUT_S", 0.001)
    with pytest.raises(Unreachable, match="does not answer"):
        reconcile(SlurmNode("n0"), fails)
    assert not fails.active().applied

"""Quarantines on Kubernetes: the real client against an API server on loopback that conflicts, forgets, refuses and goes
away."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from followed import follows
from kube_server import Cluster, serve

pytest.importorskip("kubernetes")

from kubernetes import client

from weft.hardware.health import daemon as daemon_module
from weft.hardware.health import kubernetes_node
from weft.hardware.health.daemon import Commands, Daemon
from weft.hardware.health.event import Event
from weft.hardware.health.kubernetes_node import DRAINS, KEY, KubernetesNode
from weft.hardware.health.ledger import Ledger
from weft.hardware.health.node import Unreachable, reconcile
from weft.hardware.health.sources import Batch

GPU, OTHER = "0000:9b:00", "0000:01:00"


@pytest.fixture
def cluster():
    cluster = Cluster()
    cluster.add_node("n1")
    return cluster


@pytest.fixture
def api(cluster):
    with serve(cluster) as url:
        configuration = client.Configuration(host=url)
        configuration.retries = False
        with client.ApiClient(configuration) as connection:
            yield client.CoreV1Api(connection)


@pytest.fixture
def node(api):
    return KubernetesNode(api, "n1")


@pytest.fixture
def ledger():
    return Ledger()


def fail(ledger, kind="xid:95", gpu=GPU, at=None):
    ledger.take([Event(kind, gpu, at or time.time() - 10, "test")])


def repair(ledger, gpu=GPU):
    ledger.take([Event("boot", "", time.time() - 1, "test"), Event("passed", gpu, time.time(), "test")])


def spec(cluster, name="n1"):
    node = cluster.nodes[name]
    taints = [t["key"] for t in node["spec"].get("taints") or ()]
    return bool(node["spec"].get("unschedulable")), taints, json.loads(node["metadata"]["annotations"].get(KEY, "null"))


def test_out_of_service_and_back(cluster, node, ledger):
    cluster.edit("n1", taints=[{"key": "other", "value": "x", "effect": "NoSchedule"}])
    reconcile(node, ledger)
    assert cluster.condition("n1", "GPUHealthy")["status"] == "True"
    fail(ledger)
    reconcile(node, ledger)
    identity = ledger.active().id
    assert spec(cluster) == (True, ["other", KEY], {"id": identity, "cordoned": True})
    condition = cluster.condition("n1", "GPUHealthy")
    assert (condition["status"], condition["reason"]) == ("False", "Xid95") and identity in condition["message"]
    assert cluster.condition("n1", "Ready")["status"] == "True"
    fail(ledger, "xid:79", OTHER)  # a second one is shown too
    reconcile(node, ledger)
    assert "XID 79" in cluster.condition("n1", "GPUHealthy")["message"] and ledger.active().id == identity
    repair(ledger)
    repair(ledger, OTHER)
    reconcile(node, ledger)
    assert spec(cluster) == (False, ["other"], None)
    assert cluster.condition("n1", "GPUHealthy")["status"] == "True"


def test_a_node_that_a_person_cordoned_stays_so(cluster, node, ledger):
    cluster.edit("n1", unschedulable=True)
    fail(ledger)
    reconcile(node, ledger)
    assert spec(cluster)[2]["cordoned"] is False
    repair(ledger)
    reconcile(node, ledger)
    assert spec(cluster) == (True, [], None)


def test_a_person_who_cordons_anew_during_a_quarantine_is_respected(cluster, node, ledger):
    """Both changes fall between two looks, so that the node seems as weft left it; the API server says who wrote the field."""
    fail(ledger)
    reconcile(node, ledger)
    cluster.edit("n1", unschedulable=False)
    cluster.edit("n1", unschedulable=True)
    repair(ledger)
    reconcile(node, ledger)
    assert spec(cluster) == (True, [], None)


@pytest.mark.parametrize("change", [{"unschedulable": False}, {"taints": None}])
def test_a_person_returns_the_node(cluster, node, ledger, change):
    """It stays in service for the faults that were shown, and not for another one, which came at the same time."""
    fail(ledger)
    reconcile(node, ledger)
    first = ledger.active().id
    cluster.edit("n1", **change)
    reconcile(node, ledger)
    assert ledger.quarantine(first).how == "overridden" and ledger.active() is None
    assert spec(cluster)[1:] == ([], None)
    fail(ledger)  # it repeats
    reconcile(node, ledger)
    assert spec(cluster)[1:] == ([], None)
    fail(ledger, "xid:79", OTHER)
    reconcile(node, ledger)
    second = ledger.active().id
    assert spec(cluster)[2]["id"] == second != first
    cluster.edit("n1", **change)
    fail(ledger, "xid:48", OTHER)  # the person could not see this one
    reconcile(node, ledger)
    assert spec(cluster)[2]["id"] == ledger.active().id not in (first, second)


def test_a_removed_annotation_is_a_persons_and_a_new_node_is_not(cluster, node, ledger):
    fail(ledger)
    reconcile(node, ledger)
    first = ledger.active().id
    cluster.add_node("n1")["metadata"]["uid"] = "another"  # registered anew, without the mark
    reconcile(node, ledger)
    assert spec(cluster)[2]["id"] == first
    cluster.nodes["n1"]["metadata"]["annotations"].clear()
    reconcile(node, ledger)
    assert ledger.active() is None and cluster.nodes["n1"]["spec"]["unschedulable"]


def test_a_stale_quarantine_never_undoes_a_newer_one(cluster, api, node, ledger):
    fail(ledger)
    reconcile(node, ledger)
    old = node.read().mark
    newer = {"id": "q-ffffffff", "cordoned": True}
    cluster.nodes["n1"]["metadata"]["annotations"][KEY] = json.dumps(newer)
    cluster.edit("n1", podCIDR="x")
    with pytest.raises(kubernetes_node.Conflict):
        node.release(old)  # what was read is no longer so
    assert spec(cluster)[2] == newer


def test_a_mark_that_the_state_does_not_know_is_adopted(cluster, node, ledger):
    """The disk was replaced: the node stays out of service until a check passes."""
    fail(ledger)
    reconcile(node, ledger)
    identity = ledger.active().id
    fresh = Ledger()
    reconcile(node, fresh)
    assert fresh.active().id == identity and spec(cluster)[0]
    fresh.take([Event("passed", "", time.time() + 1, "test")])
    reconcile(node, fresh)
    assert spec(cluster) == (False, [], None)


def test_two_daemons_with_two_states(cluster, node, ledger):
    """They do not take turns: the one whose mark was replaced says so and changes nothing."""
    fail(ledger)
    reconcile(node, ledger)
    second = Ledger()
    fail(second)
    reconcile(node, second)
    mark = spec(cluster)[2]
    for _ in range(3):
        with pytest.raises(Unreachable, match=r"another weft health with another state runs for it"):
            reconcile(node, ledger)
        reconcile(node, second)
    assert spec(cluster)[2] == mark and mark["id"] == second.active().id


def test_a_damaged_annotation_never_uncordons(cluster, node, ledger):
    cluster.edit("n1", unschedulable=True, taints=[{"key": KEY, "value": "x", "effect": "NoSchedule"}])
    cluster.nodes["n1"]["metadata"]["annotations"][KEY] = "{not json"
    reconcile(node, ledger)
    ledger.take([Event("passed", "", time.time() + 1, "test")])
    reconcile(node, ledger)
    assert spec(cluster) == (True, [], None)


def test_conflicts_are_read_again(cluster, node, ledger):
    """Somebody else changes the node between reading and writing, three times; nothing of theirs is lost."""
    count = []

    def interfere(method, path):
        if method == "PATCH" and not path.endswith("status") and len(count) < 3:
            count.append(path)
            cluster.nodes["n1"]["metadata"]["annotations"][f"other{len(count)}"] = "x"
            cluster.edit("n1", taints=[{"key": f"other{len(count)}", "effect": "NoSchedule"}])

    cluster.fail = interfere
    fail(ledger)
    reconcile(node, ledger)
    assert spec(cluster)[:2] == (True, ["other3", KEY])
    assert len([k for k in cluster.nodes["n1"]["metadata"]["annotations"] if k.startswith("other")]) == 3


@pytest.mark.parametrize(
    ("status", "says"), [(500, "500"), (403, "permission refused: see RBAC"), (401, "refused"), (429, "429")]
)
def test_refusals_are_said_and_nothing_is_lost(cluster, node, ledger, status, says):
    cluster.fail = lambda method, path: status if method == "PATCH" else None
    fail(ledger)
    with pytest.raises(Unreachable, match=says):
        reconcile(node, ledger)
    assert not ledger.active().applied
    cluster.fail = lambda method, path: None
    reconcile(node, ledger)
    assert ledger.active().applied and spec(cluster)[0]


def test_a_server_that_does_not_answer_in_time(cluster, node, ledger, monkeypatch):
    """It may even have done what was asked for: the next round finds it so."""
    monkeypatch.setattr(kubernetes_node, "TIMEOUT_S", (0.2, 0.2))
    cluster.slow = 0.5
    fail(ledger)
    with pytest.raises(Unreachable, match="cordoning node n1: no answer"):
        reconcile(node, ledger)
    assert not ledger.active().applied
    cluster.slow = 0.0
    eventually(lambda: spec(cluster)[0])
    reconcile(node, ledger)
    assert ledger.active().applied and spec(cluster)[2]["id"] == ledger.active().id


def test_an_interruption_between_patch_and_state_is_harmless(cluster, node, ledger):
    """Killed after the node was cordoned, before that was stored: the next run finds its own mark."""
    fail(ledger)
    identity = ledger.active().id
    cluster.fail = lambda method, path: 500 if path.endswith("status") else None
    with pytest.raises(Unreachable):
        reconcile(node, ledger)
    assert not ledger.active().applied and spec(cluster)[2]["id"] == identity
    cluster.fail = lambda method, path: None
    reconcile(node, ledger)
    assert ledger.active().applied and ledger.active().id == identity


# ---- pods


def test_drain(cluster, node, ledger):
    """Evicts what a controller starts again; waits for a disruption budget, for pods that end and for those of no
    controller."""
    cluster.add_pod("job", "n1", "Job")
    cluster.add_pod("service", "n1")
    cluster.add_pod("bare", "n1", None)
    cluster.add_pod("agent", "n1", "DaemonSet")
    cluster.add_pod("static", "n1", annotations={"kubernetes.io/config.mirror": "x"})
    cluster.add_pod("elsewhere", "n2")
    cluster.add_pod("over", "n1")
    cluster.pods["team", "over"]["status"]["phase"] = "Succeeded"
    cluster.protected = {"service"}
    fail(ledger)
    reconcile(node, ledger)
    assert {name for _, name in cluster.pods} == {"service", "bare", "agent", "static", "elsewhere", "over"}
    waiting = ledger.active().waiting
    assert "service: its PodDisruptionBudget allows no eviction" in waiting and "bare has no controller" in waiting
    cluster.protected = set()
    del cluster.pods["team", "bare"]
    reconcile(node, ledger)
    reconcile(node, ledger)
    assert ledger.active().drained and ("team", "service") not in cluster.pods and ("team", "agent") in cluster.pods


def test_the_budget_counts_nodes_of_the_whole_cluster(cluster, api):
    """Six nodes fail, two may be drained at once; all are cordoned at once."""
    names = [f"g{n}" for n in range(6)]
    nodes = {}
    for name in names:
        cluster.add_node(name)
        cluster.add_pod(f"pod-{name}", name)
        nodes[name] = (KubernetesNode(api, name, budget=2), Ledger())
    cluster.protected = {f"pod-{name}" for name in names}  # so that no drain ends
    threads = []
    for node, ledger in nodes.values():
        fail(ledger)
        threads.append(threading.Thread(target=reconcile, args=(node, ledger)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert all(spec(cluster, name)[0] for name in names)
    draining = [name for name, (_, ledger) in nodes.items() if "PodDisruptionBudget" in ledger.active().waiting]
    assert len(draining) <= len(cluster.maps[DRAINS]["data"]) <= 2
    for node, ledger in nodes.values():
        reconcile(node, ledger)
    waiting = [ledger.active().waiting for _, ledger in nodes.values()]
    assert sum("2 nodes are drained at once already" in text for text in waiting) == 4
    # One of the two is empty, one is deleted: their slots serve others.
    first, second = cluster.maps[DRAINS]["data"]
    cluster.protected.discard(f"pod-{first}")
    for _ in range(2):
        reconcile(*nodes[first])
    del cluster.nodes[second]
    for name in set(names) - {first, second}:
        reconcile(*nodes[name])
    assert len(cluster.maps[DRAINS]["data"]) == 2 and second not in cluster.maps[DRAINS]["data"]


# ---- the daemon


def eventually(condition, seconds=30.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


@pytest.fixture
def daemon(node, ledger, monkeypatch):
    monkeypatch.setattr(kubernetes_node, "WATCH_S", 1)
    monkeypatch.setattr(daemon_module, "LOOK_S", 0.1)
    said = []
    daemon = Daemon(ledger, node, Commands(["true"], ["true"]), said.append)
    daemon.said = said
    threads = [
        threading.Thread(target=daemon.run),
        threading.Thread(target=node.watch, args=(daemon.changed.set, daemon.stop)),
    ]
    for thread in threads:
        thread.start()
    yield daemon
    daemon.stop.set()
    daemon.changed.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def put(daemon, *events):
    daemon.batches.put(Batch(list(events)))


def test_from_fault_to_cordon_in_less_than_five_seconds_and_back_by_repair_and_check(cluster, daemon):
    began = time.monotonic()
    put(daemon, Event("xid:95", GPU, time.time(), "test"))
    eventually(lambda: spec(cluster)[0], 5.0)
    assert time.monotonic() - began < 5.0
    eventually(lambda: spec(cluster) == (False, [], None), 30.0)  # the reset and the check are commands that succeed
    assert any("reset of 0000:9b:00 ended with 0" in line for line in daemon.said)


def test_the_command(cluster, api, tmp_path):
    """``weft health run --on kubernetes`` with a kubeconfig: from a line of the log to a cordon."""
    config, log = tmp_path / "kubeconfig", tmp_path / "kmsg"
    log.touch()
    where = {"name": "x", "cluster": {"server": api.api_client.configuration.host}}
    context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
    config.write_text(
        json.dumps(
            {"clusters": [where], "contexts": [context], "users": [{"name": "x", "user": {}}], "current-context": "x"}
        )
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KUBECONFIG": str(config), "NODE_NAME": "n1"}
    command = [
        sys.executable, "-m", "weft", "health", "run", "--on", "kubernetes", "--no-nvml", "--kernel-log", str(log),
        "--state", str(tmp_path / "state"),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: cluster.condition("n1", "GPUHealthy") or process.poll() is not None, 30.0)
        eventually(lambda: follows(tmp_path / "state"), 30.0)
        with log.open("a") as file:
            file.write("NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\n")
        eventually(lambda: spec(cluster)[0], 5.0)
        shown = "XID 79 on GPU 0000:9b:00 (reboot)"
        eventually(lambda: shown in cluster.condition("n1", "GPUHealthy")["message"])
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stderr.close()


def test_an_api_server_that_is_down(cluster, daemon):
    """Nothing is lost, and the pauses grow."""
    eventually(lambda: cluster.condition("n1", "GPUHealthy"))
    cluster.down = True
    put(daemon, Event("row-remap-failure", GPU, time.time(), "test"))
    eventually(lambda: daemon.trouble)
    put(daemon, Event("xid:79", OTHER, time.time(), "test"))
    time.sleep(0.5)
    assert len([line for line in daemon.said if "no answer" in line]) <= 2 and not spec(cluster)[0]
    cluster.down = False
    eventually(lambda: spec(cluster)[0])
    assert len(daemon.ledger.active().incidents) == 2
    eventually(lambda: any("answers again" in line for line in daemon.said))


def test_a_person_is_seen_through_a_watch_that_expires(cluster, daemon):
    put(daemon, Event("row-remap-failure", GPU, time.time(), "test"))
    eventually(lambda: spec(cluster)[0])
    with cluster.lock:
        cluster.oldest = cluster.version + 1  # the watch's version is gone: 410
        cluster.bump(cluster.nodes["n1"])
    time.sleep(0.3)
    with cluster.lock:
        cluster.oldest = 0
    cluster.edit("n1", unschedulable=False)
    eventually(lambda: spec(cluster) == (False, [], None))
    assert daemon.ledger.active() is None
    listed = sum(request == ("GET", "/api/v1/nodes") for request in cluster.requests)
    assert listed >= 2

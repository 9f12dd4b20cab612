"""Every rule of weft deploy lint finds its trap, with the line, and is quiet on what is right."""

import json
import os
import subprocess
import sys

import pytest
from where import ROOT, plain_environment

from weft.deploy import lint, located, rendering

QUEUE = """\
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: q}
spec:
  cohortName: all
  queueingStrategy: BestEffortFIFO
  resourceGroups:
  - coveredResources: [nvidia.com/gpu]
    flavors:
    - name: h100
      resources:
      - {name: nvidia.com/gpu, nominalQuota: 8, borrowingLimit: 4}
"""
PLUGIN = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: plugin}
data:
  shared: |
    version: v1
    flags:
      migStrategy: none
    sharing:
      timeSlicing:
        renameByDefault: true
        resources:
        - {name: nvidia.com/gpu, replicas: 4}
"""
VALUES = "devicePlugin:\n  config:\n    name: plugin\n    default: shared\n"
POD = """\
apiVersion: v1
kind: Pod
metadata: {name: p, namespace: a}
spec:
  containers:
  - name: main
    resources:
      limits: {nvidia.com/gpu.shared: 1}
"""
COHORT = """\
apiVersion: kueue.x-k8s.io/v1beta2
kind: Cohort
metadata: {name: all}
spec:
  resourceGroups:
  - coveredResources: [nvidia.com/gpu]
    flavors: [{name: h100, resources: [{name: nvidia.com/gpu, nominalQuota: 2}]}]
"""
FLAVOR = """\
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: h100}
spec: {nodeLabels: {weft.dev/pool: h100}}
"""
LOCAL = (
    "apiVersion: kueue.x-k8s.io/v1beta2\nkind: LocalQueue\nmetadata: {name: d, namespace: a}\nspec: {clusterQueue: q}\n"
)
HARD = (
    "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: r, namespace: a}\nspec:\n  hard: "
    "{requests.nvidia.com/gpu: 12}\n"
)
GOOD = [PLUGIN, VALUES, POD, QUEUE, COHORT, FLAVOR, LOCAL, HARD]
CLUSTER = (
    "nodes: [{name: h100, count: 2, gpus: 8}, {name: desk, count: 1, gpus: 2, sharing: {mode: time-slicing, "
    "replicas: 4}}]\n"
)


def findings(tmp_path, texts, cluster=CLUSTER):
    (tmp_path / "cluster.yaml").write_text(cluster)
    (tmp_path / "all.yaml").write_text("---\n".join(texts))
    return lint.lint(located.read([tmp_path / "all.yaml"]), rendering.load(tmp_path / "cluster.yaml"))


def test_what_is_right_is_quiet(tmp_path):
    assert findings(tmp_path, GOOD) == []


@pytest.mark.parametrize("text", ["example", "plain"])
def test_what_weft_renders_is_quiet(tmp_path, text):
    (tmp_path / "cluster.yaml").write_text(
        (ROOT / "examples/cluster.yaml").read_text() if text == "example" else CLUSTER
    )
    made = rendering.load(tmp_path / "cluster.yaml")
    rendering.write(rendering.render(made, "kubernetes"), tmp_path / "out", "kubernetes")
    assert lint.lint(located.read([tmp_path / "out"]), made) == []


@pytest.mark.parametrize(
    ("old", "new", "rule", "words"),
    [
        (
            "      timeSlicing:",
            "      mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}\n      timeSlicing:",
            "time-slicing-with-mps",
            "takes only mps",
        ),
        (
            "      migStrategy: none\n    sharing:\n      timeSlicing:",
            "      migStrategy: single\n    sharing:\n      mps:",
            "mig-with-mps",
            "migStrategy single",
        ),
        (
            "timeSlicing:\n        renameByDefault: true\n        resources:\n        - {name: nvidia.com/gpu,",
            "mps:\n        resources:\n        - {name: nvidia.com/mig-1g.10gb,",
            "mig-with-mps",
            "slices of MIG",
        ),
        (
            "      migStrategy: none",
            "      renameByDefault: true",
            "ignored-key",
            "renameByDefault under flags is silently ignored; it belongs under sharing",
        ),
        ("      timeSlicing:", "      timeslicing: {}\n      timeSlicing:", "ignored-key", "timeslicing under sharing"),
        (
            "    name: plugin\n    default",
            "    name: plugins\n    default",
            "configmap-name",
            "'plugins', which is not here (there are: plugin)",
        ),
        (
            "default: shared",
            "default: exclusive",
            "configmap-name",
            "'exclusive' is not in ConfigMap 'plugin' (it has: shared)",
        ),
        ("    default: shared", "    defaults: shared", "ignored-key", "defaults under devicePlugin.config"),
        ("gpu.shared: 1", "gpu.shared: 2", "memory-not-limited", "2 of nvidia.com/gpu.shared are not 2 times"),
        (
            "nvidia.com/gpu.shared: 1",
            "nvidia.com/gpu: 9",
            "flavor-never-fits",
            "a pod asks for 9 nvidia.com/gpu, and the largest node has 8",
        ),
        ("  cohortName: all\n", "", "borrowing-without-cohort", "'q' has a borrowingLimit of h100 and no cohort"),
        ("BestEffortFIFO", "StrictFIFO", "strict-fifo-in-cohort", "blocks what others would borrow"),
        (
            "nominalQuota: 2}",
            "nominalQuota: 8}",
            "quota-counted-twice",
            "has 8 of h100/nvidia.com/gpu on top of the same 8",
        ),
        ("nominalQuota: 8,", "nominalQuota: 15,", "quota-counted-twice", "guarantee 17 of h100, which has 16"),
        ("gpu: 12}", "gpu: 4}", "quota-counted-twice", "allows 4 nvidia.com/gpu where the team's queue guarantees 8"),
        (
            "    - name: h100\n",
            "    - name: h200\n",
            "flavor-never-fits",
            "names flavor 'h200', which is not here (there are: h100)",
        ),
        (
            "nominalQuota: 8, borrowingLimit: 4",
            "nominalQuota: 0, borrowingLimit: 0",
            "flavor-never-fits",
            "has 0 of flavor 'h100' and cannot borrow",
        ),
        (
            "weft.dev/pool: h100",
            "weft.dev/pool: h10",
            "flavor-never-fits",
            "the cluster has no such pool (there are: h100, desk)",
        ),
        ("nominalQuota: 8,", "nominalQuota: lots,", "not-a-quantity", "nominalQuota of nvidia.com/gpu is 'lots'"),
        ("nominalQuota: 2}", "nominalQuota: [2]}", "not-a-quantity", "nominalQuota of nvidia.com/gpu is a list"),
        ("borrowingLimit: 4", "borrowingLimit: -4", "not-a-quantity", "borrowingLimit of nvidia.com/gpu is -4"),
        ("gpu.shared: 1", "gpu.shared: one", "not-a-quantity", "nvidia.com/gpu.shared is 'one'"),
        ("gpu: 12}", "gpu: 12 GPUs}", "not-a-quantity", "requests.nvidia.com/gpu is '12 GPUs'"),
        ("gpu.shared: 1", "gpu.shared: 0.5", "not-a-quantity", "is 0.5, and Kubernetes gives only whole ones"),
        ("gpu.shared: 1", "gpu.shared: 500m", "not-a-quantity", "is '500m', and Kubernetes gives only whole ones"),
        ("gpu: 12}", "gpu: 1n}", "not-a-quantity", "requests.nvidia.com/gpu is '1n', and Kubernetes gives only whole"),
        (
            "nominalQuota: 2}",
            "nominalQuota: 2500m}",
            "not-a-quantity",
            "nominalQuota of nvidia.com/gpu is '2500m', and",
        ),
        ("limits: {nvidia.com/gpu.shared: 1}", "limits: [1]", "not-a-quantity", "limits is a list, which Kubernetes"),
        (
            "resources:\n      limits: {nvidia.com/gpu.shared: 1}",
            "resources: 5",
            "not-a-quantity",
            "resources is 5, which Kubernetes refuses; write a mapping",
        ),
        ("hard: {requests.nvidia.com/gpu: 12}", "hard: [1, 2]", "not-a-quantity", "hard is a list, which Kubernetes"),
        (
            "- {name: nvidia.com/gpu, replicas: 4}",
            "- 5",
            "not-a-quantity",
            "'shared': a resource of timeSlicing is 5, which the plugin refuses",
        ),
        ("replicas: 4}", "replicas: four}", "not-a-quantity", "replicas of nvidia.com/gpu is 'four'"),
        ("replicas: 4}", "replicas: 1}", "not-a-quantity", "is 1, which the plugin refuses"),
        (
            "apiVersion: kueue.x-k8s.io/v1beta2\nkind: LocalQueue",
            "apiVersion: kueue.x-k8s.io/v1beta1\nkind: LocalQueue",
            "removed-api",
            "use kueue.x-k8s.io/v1beta2",
        ),
    ],
)
def test_each_trap_is_found_with_its_line(tmp_path, old, new, rule, words):
    whole = "---\n".join(GOOD)
    assert whole.count(old) == 1
    found = [each for each in findings(tmp_path, [whole.replace(old, new)]) if each.rule == rule]
    assert any(words in each.what + "; " + each.fix for each in found), findings(tmp_path, [whole.replace(old, new)])
    lines = whole.replace(old, new).split("\n")
    for each in found:
        assert 1 <= each.line <= len(lines)
    first = whole[: whole.index(old)].count("\n") + 1
    span = range(first - 4, first + new.count("\n") + 5)  # near what was changed: a key, or the mapping that holds it
    elsewhere = {
        "quota-counted-twice": "Quota",
        "configmap-name": "default",
        "borrowing-without-cohort": "borrowingLimit",
    }
    marked = elsewhere.get(rule)  # what the finding points at, where that is not what was changed
    assert any(each.line in span or (marked and marked in lines[each.line - 1]) for each in found), found


def test_what_is_no_quantity_counts_nowhere(tmp_path):
    """Neither as 0, which could not be borrowed, nor in a sum."""
    queue = QUEUE.replace("nominalQuota: 8, borrowingLimit: 4", "nominalQuota: lots, borrowingLimit: 0")
    assert [each.rule for each in findings(tmp_path, [queue, COHORT, FLAVOR, LOCAL, HARD])] == ["not-a-quantity"]


@pytest.mark.parametrize("text", ["3000m", "+1", "1e0", "1.", "4000000u", "1000000000n", "0.003k"])
def test_whole_amounts_however_written_are_quiet(tmp_path, text):
    assert findings(tmp_path, [POD.replace("gpu.shared: 1", f"gpu: '{text}'")]) == []


@pytest.mark.parametrize("text", ["1K", "1e3Ki", "1Zi", "1_000", "0x10", "1.2.3", "m", ".", "1e", "１"])
def test_what_kubernetes_cannot_read_is_found(tmp_path, text):
    (found,) = findings(tmp_path, [POD.replace("nvidia.com/gpu.shared: 1", f"memory: '{text}'")])
    assert f"memory is '{text}', which Kubernetes refuses" in found.what


@pytest.mark.parametrize(
    ("teams", "rule"),
    [
        (
            "teams: [{name: a, quota: [{pool: desk, nominal: 4}]}, {name: b, quota: [{pool: desk, nominal: 4}]}]\n",
            "memory-not-limited",
        ),
        (
            "cohorts: [{name: c}]\nteams: [{name: a, cohort: c, queueing: StrictFIFO, quota: [{pool: h100, nominal: 4}]}]\n",
            "strict-fifo-in-cohort",
        ),
    ],
)
def test_traps_in_the_cluster_file(tmp_path, teams, rule):
    assert [each.rule for each in findings(tmp_path, [FLAVOR], CLUSTER + teams)] == [rule]


def test_mig_parted_files_need_their_key(tmp_path):
    values = "migManager:\n  config: {name: mig, default: half}\n"
    config = (
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: mig}\ndata:\n  KEY: |\n    version: v1\n    "
        "mig-configs: {half: []}\n"
    )
    assert findings(tmp_path, [values, config.replace("KEY", "config.yaml")]) == []
    (wrong,) = findings(tmp_path, [values, config.replace("KEY", "config.yml")])
    assert wrong.rule == "configmap-name" and "no key config.yaml" in wrong.what
    (wrong,) = findings(tmp_path, [values.replace("half", "third"), config.replace("KEY", "config.yaml")])
    assert "'third' is not in ConfigMap 'mig' (it has: half)" in wrong.what


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "kind: {a: b}\nmetadata: 3\n",
        "- 1\n- 2\n",
        "kind: ClusterQueue\nspec: {resourceGroups: 5}\n",
        "kind: Pod\nspec: {containers: [3]}\n",
        "kind: ConfigMap\ndata: {a: 'flags: ['}\n",
        "? [a]\n: b\n",
        "kind: List\nitems: 3\n",
        "\0",
    ],
)
def test_hostile_files_are_refused_or_passed_over(tmp_path, text):
    try:
        findings(tmp_path, [text])
    except ValueError as error:
        assert "all.yaml:" in str(error)


def weft(tmp_path, *words, **variables):
    return subprocess.run(
        [sys.executable, "-m", "weft", *map(str, words)], cwd=tmp_path, env=plain_environment(**variables), capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip


def test_commands(tmp_path):
    example = ROOT / "examples/cluster.yaml"
    assert weft(tmp_path, "deploy", "render", example, "--to", "kubernetes", "--out", "out").returncode == 0
    done = weft(tmp_path, "deploy", "lint", example, "out", "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == {"findings": []}
    assert weft(tmp_path, "deploy", "diff", example, "--folder", "out").stdout == ""
    (tmp_path / "changed.yaml").write_text(example.read_text().replace("weight: 2", "weight: 3"))
    done = weft(tmp_path, "deploy", "diff", "changed.yaml", "--folder", "out")
    changed = [line for line in done.stdout.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert done.returncode == 1 and changed == ["-    weight: '2'", "+    weight: '3'"]

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kubectl").write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\necho changed\nexit $STATUS\n")
    (tmp_path / "bin/kubectl").chmod(0o755)
    path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    assert [weft(tmp_path, "deploy", "diff", example, PATH=path, STATUS=str(s)).returncode for s in (1, 2)] == [1, 2]
    kinds = {each.at("kind") for each in located.read([tmp_path / "asked"])}
    assert {"ClusterQueue", "Namespace", "PrometheusRule", "DaemonSet"} <= kinds and None not in kinds

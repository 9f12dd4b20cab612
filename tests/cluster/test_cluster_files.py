"""Cluster files: YAML, published formats, the real ones where they are, and malformed ones."""

import gzip
import json
import re

import pytest
from sample_traces import TRACES, YAML, node, pod, tar, with_traces
from where import ROOT

from weft.cluster import cluster_file
from weft.cluster.files.text import TraceError
from weft.definition import UnknownName


def test_a_yaml_cluster(write):
    pytest.importorskip("yaml")
    cluster = cluster_file.load(write("c.yaml", YAML))
    assert cluster.names == ("big-0", "big-1", "node-0") and cluster.types == ("H100", "none")
    assert cluster.gpus.tolist() == [8, 8, 0] and cluster.rack.tolist() == [0, 0, 1]
    assert cluster.gpu_memory.tolist() == [80, 80, -1] and cluster.cpu.tolist() == [96_000, 96_000, -1]
    assert cluster.memory.tolist() == [1_049_088, 1_049_088, -1]
    assert cluster_file.load(write("c.yml.gz", gzip.compress(YAML.encode()))).names == cluster.names


@pytest.mark.parametrize(("old", "new", "words"), [
    ("gpu_type: H100", "gpu_typ: H100", "c.yaml:5: unknown key 'gpu_typ'; did you mean 'gpu_type'?"),
    ("nodes:", "node:", "c.yaml:2: unknown key 'node'; did you mean 'nodes'?"),
    ("count: 2", "count: two", "c.yaml:3: count is 'two'; expected a whole number of 0 or more"),
    ("gpus: 8", "gpus: 7.5", "c.yaml:4: gpus is 7.5; expected a whole number"),
    ("gpus: 8", "gpus: yes", "c.yaml:4: gpus is True; expected a whole number"),
    ("gpus: 8", "gpus: -8", "c.yaml:4: gpus is -8; expected a whole number of 0 or more"),
    ("gpus: 8", "count: 8", "c.yaml:4: count already exists (line 3)"), ("gpus: 8", "gpus: [8", "c.yaml:5: no YAML"),
    ("cpu: 96", "cpu: .inf", "c.yaml:7: cpu is inf; expected a number of 0 or more"),
    ("cpu: 96", "cpu: !!python/name:os.system 1", "c.yaml:7: cpu: "),
    ("rack: a", "rack: 7", "c.yaml:9: rack is 7; expected a word"), ("count: 1, ", "", "c.yaml:11: count is missing"),
    ("{count: 1, gpus: 0, gpu_type: none}", "20x8", "c.yaml:11: a group of nodes is a scalar; expected 'key: value' of"),
    (YAML, "nodes: 20x8", "c.yaml:1: nodes is no list"),
    (YAML, "- count: 1", "c.yaml:1: the file is a sequence; expected 'key: value' of nodes"),
    (YAML, "", "it is empty; expected groups of nodes under 'nodes:'"), (YAML, "{}", "c.yaml:1: 'nodes' is missing"),
    (YAML, "nodes: []", "it has no nodes"), (YAML, "nodes: \x01", "no YAML"),
    (YAML, "nodes: &a [*a]", "c.yaml:1: a group of nodes is a sequence; expected 'key: value'"),
    (YAML, "nodes:\n  - &a {count: 1, name: *a}", "c.yaml:2: name is a mapping; expected a word"),
    (YAML, "nodes:\n  - {count: 1, name: &a [*a]}", "c.yaml:2: name is a sequence; expected a word"),
    (YAML, "nodes: " + "[" * 5000, "c.yaml: no YAML: lists within lists"),
    (YAML, "nodes: \x00", "c.yaml:1: a zero byte"),
])  # fmt: skip
def test_a_yaml_mistake_is_named_with_its_line(write, old, new, words):
    pytest.importorskip("yaml")
    assert old in YAML
    with pytest.raises(TraceError, match=re.escape(words)):
        cluster_file.load(write("c.yaml", YAML.replace(old, new, 1)))


def test_a_few_lines_of_aliases_make_no_gigabytes(write):
    pytest.importorskip("yaml")
    value = "&a0 [x]"
    for level in range(1, 12):
        value = f"&a{level} [{value}{f', *a{level - 1}' * 9}]"
    with pytest.raises(TraceError, match=re.escape("c.yaml:2: name is a sequence; expected a word")):
        cluster_file.load(write("c.yaml", f"nodes:\n  - {{count: 1, name: {value}}}\n"))
    cluster = cluster_file.load(write("c.yaml", "nodes:\n  - &a {count: 1, gpus: &g 4}\n  - *a\n  - {count: *g}\n"))
    assert cluster.gpus.tolist() == [4, 4, 8, 8, 8, 8]


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

    spot = "gpu_model,gpu_capacity_num,cpu_num,node_name\nA10,1,128,0\nH800,8,192,1\n"
    cluster = cluster_file.load(write("node_info_df.csv", spot))
    assert cluster.names == ("0", "1") and cluster.types == ("A10", "H800") and cluster.gpus.tolist() == [1, 8]
    assert cluster.cpu.tolist() == [128_000, 192_000] and cluster.memory.tolist() == [-1, -1]

    gpu = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    labels = {**gpu, "topology.example.com/rack": "r1"}
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


@pytest.mark.parametrize(("text", "words"), [
    ("sn,cpu_milli,memory_mib,gpu,model\na,1,1,1,T4\na,1,1,1,T4\n", "c:3: node 'a' already exists (line 2)"),
    ("sn,cpu_milli,memory_mib,gpu,model\na,1,1,,T4\n", "c:2: gpu is nan; expected a number of 0 or more"),
    ("sn,cpu_milli,memory_mib,gpu,model\n", "it has no nodes"),
    ("machine,gpu_type,cap_cpu,cap_mem,cap_gpu\na,T4,-1,1,1\n", "c:2: cap_cpu is -1.0; expected a number of 0 or more"),
    ("num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n1,1.5,1,1,1\n", "c:2: num_node_p_switch is"),
    ("node_name,gpu_model,gpu_capacity_num,cpu_num\na,T4,,1\n", "c:2: gpu_capacity_num is nan; expected a number of 0"),
    ("node_name,gpu_model,gpu_capacity_num,cpu_num\na,T4,1e11,1\n", "gpus is 100000000000; expected at most"),
    ("num_switch,num_node_p_switch\n1,1\n", "columns num_gpu_p_node, num_cpu_p_node, mem_p_node are missing"),
    (json.dumps({"kind": "List", "items": [node("a", {"cpu": "4"})]}), "node 'a': KeyError: 'memory'"),
    (json.dumps({"kind": "List", "items": [node("a", {"cpu": "1", "memory": "1Gi"})] * 2}), "c: node 'a' already exists"),
    ("20x8", "it is no cluster file that weft recognises; expected one of\n  kubectl: kubectl get nodes -o json"),
    ("", "it is no cluster file"),
])  # fmt: skip
def test_a_mistake_in_a_cluster_file_is_named(write, text, words):
    with pytest.raises(TraceError, match=re.escape(words)):
        cluster_file.load(write("c", text))


def test_the_example_of_the_documentation_is_read(write):
    pytest.importorskip("yaml")
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert len(cluster_file.load(write("c.yaml", page.split("```yaml\n")[1].split("```")[0]))) == 20


def test_a_cluster_files_format_may_be_named(write):
    pytest.importorskip("yaml")
    assert len(cluster_file.load(write("cluster.conf", YAML), "yaml")) == 3
    with pytest.raises(UnknownName, match="unknown cluster file format 'yml'; did you mean 'yaml'"):
        cluster_file.load(write("cluster.conf", YAML), "yml")


@with_traces
@pytest.mark.parametrize(("file", "nodes", "gpus"), [
    ("muri/cluster_spec/n8g8.csv", 8, 64), ("tiresias/n32g4.csv", 32, 128),
    ("openb/openb_node_list_gpu_node.csv", 1213, 6212), ("openb/openb_node_list_all_node.csv", 1523, 6212),
    ("alibaba/pai_machine_spec.tar.gz", 1897, 6742),
])  # fmt: skip
def test_real_cluster_files(file, nodes, gpus):
    cluster = cluster_file.load(TRACES / file)
    assert (len(cluster), cluster.total_gpus) == (nodes, gpus)

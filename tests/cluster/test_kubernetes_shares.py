"""Shares of GPUs on Kubernetes: memory and cores of vGPU schedulers, MPS, resource claims, other vendors' resources; YAML."""

import json
import re

import pytest
from sample_traces import node, pod

from weft.cluster import cluster_file, trace
from weft.cluster.files.text import TraceError

RAN = ("2024-05-01T10:01:00Z", "2024-05-01T10:02:00Z")
PLAIN = {"cpu": "8", "memory": "64Gi"}
HAMI = json.dumps([{"id": f"GPU-{k}", "count": 10, "devmem": 16384, "devcore": 100, "type": "T4"} for k in range(2)])
OLD = ":".join(f"GPU-{k},10,16384,100,NVIDIA-T4,0,true" for k in range(2)) + ":"


def of(resources: dict, labels: dict, notes: dict) -> dict:
    made = node("n", {**PLAIN, **resources}, **labels)
    made["metadata"]["annotations"] = notes
    return made


def load(write, *items):
    return write("a.json", {"kind": "List", "items": list(items)})


# A node's resources, labels and annotations; its GPUs and their type.
NODES = {
    "hami": ({"nvidia.com/gpu": "20"}, {}, {"hami.io/node-nvidia-register": HAMI}, 2, "nvidia.com/gpu"),
    "old hami": ({"nvidia.com/gpu": "20"}, {"nvidia.com/gpu.product": "T4"}, {"4pd.io/node-nvidia-register": OLD}, 2, "T4"),
    "labelled": ({"nvidia.com/gpu": "2"}, {"nvidia.com/gpu.memory": "16384"}, {}, 2, "nvidia.com/gpu"),
    "mps": ({"nvidia.com/gpu.shared": "8"}, {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "mps"}, {},
    2, "gpu"),
    "volcano": ({"volcano.sh/vgpu-number": "20", "volcano.sh/vgpu-memory": "32768", "volcano.sh/vgpu-cores": "200"}, {}, {},
    2, "gpu"),
    "volcano label": ({"volcano.sh/vgpu-number": "20", "volcano.sh/vgpu-memory": "32768"}, {"nvidia.com/gpu.count": "2"}, {},
    2, "gpu"),
    "volcano share": ({"volcano.sh/gpu-memory": "32768", "volcano.sh/gpu-number": "2"}, {}, {}, 2, "gpu"),
    "gpushare": ({"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2"}, {"aliyun.accelerator/nvidia_name": "T4"}, {}, 2,
    "T4"),
    "tencent": ({"tencent.com/vcuda-core": "200", "tencent.com/vcuda-memory": "120"}, {}, {}, 2, "gpu"),
    "koordinator": ({"koordinator.sh/gpu-core": "200", "koordinator.sh/gpu-memory": "32Gi", "koordinator.sh/gpu": "200",
                     "nvidia.com/gpu": "2"}, {}, {}, 2, "nvidia.com/gpu"),
    "intel": ({"gpu.intel.com/i915": "20", "gpu.intel.com/millicores": "2000", "gpu.intel.com/i915_monitoring": "1"}, {}, {}, 2,
              "gpu.intel.com/i915"),
    "neuron": ({"aws.amazon.com/neuron": "2", "aws.amazon.com/neuroncore": "4", "aws.amazon.com/neurondevice": "2"}, {}, {}, 2,
               "aws.amazon.com/neuron"),
    "fgd": ({"alibabacloud.com/gpu-count": "2", "alibabacloud.com/gpu-milli": "2000"},
    {"alibabacloud.com/gpu-card-model": "P100"},
            {}, 2, "P100"),
    "gaudi": ({"habana.ai/gaudi": "8"}, {}, {}, 8, "habana.ai/gaudi"), "i915": ({"gpu.intel.com/i915": "2"}, {}, {}, 2,
    "gpu.intel.com/i915"),
    "ascend": ({"huawei.com/Ascend910": "8", "nvidia.com/gpu": "0"}, {}, {}, 8, "huawei.com/Ascend910"),
    "mig shared": ({"nvidia.com/mig-1g.5gb.shared": "28"}, {"nvidia.com/mig-1g.5gb.replicas": "4"}, {}, 1, "gpu"),
    "amd": ({"amd.com/gpu": "4", "rdma/hca_shared": "9"}, {}, {}, 4, "amd.com/gpu"), "none": ({}, {}, {}, 0, "none"),
}  # fmt: skip


@pytest.mark.parametrize("name", NODES)
def test_the_gpus_of_a_node_are_its_cards(write, name):
    *made, gpus, kind = NODES[name]
    cluster = cluster_file.load(load(write, of(*made)))
    assert (cluster.gpus.tolist(), cluster.types, cluster.dropped) == ([gpus], (kind,), {})
    assert cluster.gpu_memory.tolist() == [16 if name in ("hami", "old hami", "labelled") else -1]


@pytest.mark.parametrize(("resources", "words"), [
    ({"volcano.sh/vgpu-number": "20"}, "volcano.sh/vgpu-number: parts of GPUs, and nothing says of how many"),
    ({"aliyun.com/gpu-mem": "30"}, "aliyun.com/gpu-mem: parts"), ({"amd.com/cpx_nps4": "8"},
    "amd.com/cpx_nps4: parts of an accelerator"),
    ({"nvidia.com/gpu.shared": "8"}, "label nvidia.com/gpu.replicas"), ({"nvidia.com/gpu": 2, "amd.com/gpu": 2},
    "several kinds"),
    ({"huawei.com/Ascend910-16c": "2"}, "huawei.com/Ascend910-16c: parts of an accelerator of unknown size"),
])  # fmt: skip
def test_a_node_with_parts_of_unknown_size_is_left_out_and_counted(write, resources, words):
    cluster = cluster_file.load(load(write, of(resources, {}, {}), node("m", {**PLAIN, "nvidia.com/gpu": 1})))
    ((why, count),) = cluster.dropped.items()
    assert words in why and count == 1 and cluster.names == ("m",)


# The node, what a container requests, the GPUs and thousandths that its pod holds; or why it is left out.
PODS = [
    ("hami", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4096}, 1, 250), ("old hami", {"nvidia.com/gpu": 2,
    "nvidia.com/gpumem": 8192}, 2, 500),
    ("hami", {"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 30, "nvidia.com/gpucores": 60}, 1, 600),
    ("hami", {"nvidia.com/gpu": 2, "nvidia.com/gpucores": 10}, 2, 100), ("hami", {"nvidia.com/gpu": 2}, 2, 1000),
    ("labelled", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1}, 1, 1), ("labelled", {"nvidia.com/gpumem-percentage": 100}, 1,
    1000),
    ("none", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4096}, "nvidia.com/gpumem: shares of a GPU of unknown size", 0),
    ("hami", {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 20_000}, "nvidia.com/gpumem: more than one GPU has", 0),
    ("mps", {"nvidia.com/gpu.shared": 1}, 1, 250), ("mps", {"nvidia.com/gpu.shared": 6}, 6, 250), ("none",
    {"nvidia.com/gpu.shared": 1}, "time slices", 0),
    ("volcano", {"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": 8192}, 2, 500), ("volcano",
    {"volcano.sh/vgpu-number": 1}, 1, 1000),
    ("volcano label", {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 4096}, 1, 250),
    ("volcano share", {"volcano.sh/gpu-memory": 1024}, 1, 62), ("volcano share", {"volcano.sh/gpu-number": 2}, 2, 1000),
    ("gpushare", {"aliyun.com/gpu-mem": 3}, 1, 200), ("none", {"aliyun.com/gpu-mem": 3},
    "aliyun.com/gpu-mem: shares of a GPU of unknown", 0),
    ("tencent", {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 30}, 1, 500), ("none",
    {"tencent.com/vcuda-core": 200}, 2, 1000),
    ("none", {"tencent.com/vcuda-core": 150}, "tencent.com/vcuda-core: more than one GPU has", 0),
    ("koordinator", {"koordinator.sh/gpu": 50}, 1, 500), ("koordinator", {"koordinator.sh/gpu-core": 25,
    "koordinator.sh/gpu-memory": "8Gi"}, 1, 500),
    ("koordinator", {"koordinator.sh/gpu.shared": 2, "koordinator.sh/gpu-core": 50}, 2, 500),
    ("intel", {"gpu.intel.com/i915": 1, "gpu.intel.com/millicores": 300}, 1, 300), ("i915", {"gpu.intel.com/i915": 1}, 1, 1000),
    ("neuron", {"aws.amazon.com/neuroncore": 1}, 1, 500), ("neuron", {"aws.amazon.com/neuroncore": 4}, 2, 1000),
    ("none", {"aws.amazon.com/neuroncore": 1}, "aws.amazon.com/neuroncore: shares", 0), ("neuron",
    {"aws.amazon.com/neuron": 1}, 1, 1000),
    ("fgd", {"alibabacloud.com/gpu-count": 1, "alibabacloud.com/gpu-milli": 460}, 1, 460), ("mig shared",
    {"nvidia.com/mig-1g.5gb.shared": 2}, 1, 71),
    ("gaudi", {"habana.ai/gaudi": 8}, 8, 1000), ("ascend", {"huawei.com/Ascend910": 4}, 4, 1000), ("amd", {"amd.com/gpu": 1},
    1, 1000),
    ("none", {"huawei.com/Ascend910-16c": 1}, "huawei.com/Ascend910-16c: parts of an accelerator of unknown size", 0),
    ("none", {"amd.com/cpx_nps4": 1}, "amd.com/cpx_nps4: parts", 0), ("intel", {"gpu.intel.com/i915_monitoring": 1},
    "no GPU", 0),
    ("none", {"cambricon.com/mlu370.smlu.vcore": 30}, "cambricon.com/mlu370.smlu.vcore: parts", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wanted", "gpus", "milli"), PODS, ids=str)
def test_a_pod_holds_the_share_that_it_requests(write, name, wanted, gpus, milli):
    items = [of(*NODES[name][:3]), pod("p", wanted, RAN, nodeName="n"), pod("whole", {"nvidia.com/gpu": 1}, RAN)]
    jobs = trace.load(load(write, *items), "kubectl")
    if isinstance(gpus, str):
        ((why, count),) = jobs.dropped.items()
        assert gpus in why and count == 1 and list(jobs.id) == ["lab/whole"]
    else:
        assert (jobs.id[0], jobs.gpus[0], jobs.milli[0]) == ("lab/p", gpus, milli) and not jobs.dropped


def test_shares_of_kai_are_annotations(write):
    made = pod("p", {}, RAN)
    made["metadata"]["annotations"] = {"gpu-fraction": "0.3", "gpu-fraction-num-devices": "2"}
    jobs = trace.load(load(write, made), "kubectl")
    assert (jobs.gpus.tolist(), jobs.milli.tolist()) == ([2], [300])


def claim(name: str, *requests: dict, results=(), **more) -> dict:
    status = {"allocation": {"devices": {"results": list(results)}}} if results else {}
    return {"kind": "ResourceClaim", "metadata": {"name": name, "namespace": "lab"},
    "spec": {"devices": {"requests": list(requests)}},
            "status": {**status, **more}}  # fmt: skip


GPU = {"name": "g", "deviceClassName": "gpu.nvidia.com"}
MIG = {
    "name": "m",
    "exactly": {"deviceClassName": "mig.nvidia.com", "selectors": [{"cel": {"expression": "profile == '3g.20gb'"}}]},
}


@pytest.mark.parametrize(("made", "gpus", "milli"), [
    (claim("c", GPU), 1, 1000), (claim("c", {**GPU, "count": 4}), 4, 1000), (claim("c", {"name": "g", "exactly": {**GPU,
    "count": 2}}), 2, 1000),
    (claim("c", {**GPU, "allocationMode": "All"}, results=[{"request": "g", "device": f"gpu-{k}"} for k in range(8)]), 8, 1000),
    (claim("c", {**GPU, "allocationMode": "All"}), "all devices", 0), (claim("c", MIG), 1, 428),
    (claim("c", {"name": "m", "deviceClassName": "mig.nvidia.com"}), "MIG slices of unknown size", 0),
    (claim("c", MIG, results=[{"request": "m", "device": "gpu-0-mig-1g5gb-0-1"}] * 2), 1, 285),
    (claim("c", {"name": "g", "firstAvailable": [GPU]}), "first available of several", 0),
    (claim("c", {"name": "r", "deviceClassName": "rdma.example.com"}), "device class 'rdma.example.com', which is no known", 0),
    (claim("c", GPU, {**GPU, "name": "admin", "adminAccess": True}), 1, 1000), (claim("c", GPU, MIG), "several sizes", 0),
    (claim("c", GPU, reservedFor=[{}, {}]), "that several pods share", 0), (claim("d", GPU), "not in the file", 0),
    (claim("c", {"name": "g", "exactly": {**GPU, "capacity": {"requests": {"memory": "1Gi"}}}}),
    "part of a device's capacity", 0),
    (claim("c"), "no GPU", 0),
], ids=str)  # fmt: skip
def test_a_pod_holds_the_devices_that_it_claims(write, made, gpus, milli):
    asks = pod("p", {"cpu": 1}, RAN, resourceClaims=[{"name": "x", "resourceClaimName": "c"}])
    jobs = trace.load(load(write, made, asks, pod("whole", {"nvidia.com/gpu": 1}, RAN)), "kubectl")
    if isinstance(gpus, str):
        ((why, count),) = jobs.dropped.items()
        assert gpus in why and count == 1
    else:
        assert (jobs.id[0], jobs.gpus[0], jobs.milli[0]) == ("lab/p", gpus, milli) and not jobs.dropped


def test_claims_from_a_template_and_claims_that_pods_share(write):
    template = {
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t", "namespace": "lab"},
        "spec": {"spec": claim("", GPU)["spec"]},
    }
    asks = {"resourceClaims": [{"name": "x", "resourceClaimTemplateName": "t"}]}
    one, gone = pod("one", {}, RAN, **asks), pod("gone", {}, RAN, **asks)
    one["status"]["resourceClaimStatuses"] = [{"name": "x", "resourceClaimName": "one-x"}]
    shares = [pod(f"s{k}", {}, RAN, resourceClaims=[{"name": "x", "resourceClaimName": "both"}]) for k in range(2)]
    items = [template, claim("one-x", {**GPU, "count": 2}), claim("both", GPU), one, gone, *shares]
    jobs = trace.load(load(write, *items), "kubectl")
    assert dict(zip(jobs.id, jobs.gpus.tolist(), strict=True)) == {"lab/one": 2, "lab/gone": 1}
    assert jobs.dropped == {"a resource claim that several pods share": 2}


def sliced(node: str, driver: str, generation: int, *devices: dict) -> dict:
    pool = {"name": node, "generation": generation}
    return {"kind": "ResourceSlice", "metadata": {"name": "s"}, "spec": {"nodeName": node, "driver": driver, "pool": pool,
            "devices": list(devices)}}  # fmt: skip


def test_a_node_has_the_devices_of_its_resource_slices(write):
    def gpu(name: str, **said) -> dict:
        attributes = {"productName": {"string": "H100"}, **{key: {"string": text} for key, text in said.items()}}
        return {"name": name, "attributes": attributes, "capacity": {"memory": {"value": "80Gi"}}}

    slices = [
        sliced("n", "gpu.nvidia.com", 2, gpu("gpu-0"), {"name": "gpu-1", "basic": gpu("gpu-1")}),
        sliced("n", "gpu.nvidia.com", 1, *(gpu(f"old-{k}") for k in range(8))), sliced("n", "nic.example.com", 1, gpu("nic")),
        sliced("m", "gpu.nvidia.com", 1, *(gpu(f"mig-{k}", parentUUID=f"GPU-{k // 7}") for k in range(14))),
    ]  # fmt: skip
    items = [node("n", PLAIN), node("m", PLAIN), node("c", PLAIN), node("p", {**PLAIN, "nvidia.com/gpu": 4})]
    cluster = cluster_file.load(load(write, *items, *slices, sliced("p", "gpu.nvidia.com", 1, gpu("gpu-0"))))
    assert cluster.gpus.tolist() == [2, 2, 0, 4] and cluster.gpu_memory.tolist() == [80, -1, -1, -1]
    assert [cluster.types[k] for k in cluster.gpu_type] == ["H100", "H100", "none", "nvidia.com/gpu"]
    for wrong in ({"devices": [3]}, {"pool": None}, {"devices": [{"name": "a", "attributes": {"x": 3}}]}):
        broken = sliced("n", "gpu.nvidia.com", 1)
        broken["spec"] |= wrong
        with pytest.raises(TraceError, match="resource slice 's': "):
            cluster_file.load(load(write, *items, broken))


@pytest.mark.parametrize(("item", "words"), [
    (of({"nvidia.com/gpu": "two"}, {}, {}), "node 'n': ValueError: 'two' is no quantity"), ({"kind": "Node"},
    "node '': KeyError: 'metadata'"),
    (of({"nvidia.com/gpu": ["1"]}, {}, {}), "'list' is no quantity"), (of({"nvidia.com/gpu": 1},
    {"nvidia.com/gpu.replicas": "x"}, {}), "'x' is no"),
    (of({}, {}, {"hami.io/node-nvidia-register": "[{"}), "node 'n': "), (of({}, {}, {"hami.io/node-nvidia-register": "[3]"}),
    "node 'n': TypeError"),
    (of({"nvidia.com/gpu": "1" + "0" * 400}, {}, {}), "is more than any cluster has"), (of({"nvidia.com/gpu": "1e30"}, {},
    {}), "more than any"),
])  # fmt: skip
def test_what_is_wrong_in_a_node_is_named_in_traces_and_cluster_files(write, item, words):
    path = load(write, item, pod("p", {"nvidia.com/gpu": 1}, RAN, nodeName="n"))
    with pytest.raises(TraceError, match=re.escape(words)):
        cluster_file.load(path)
    if "more than" not in words and "'two'" not in words and "'list'" not in words:
        with pytest.raises(TraceError, match=re.escape(words.replace("'x' is no", "is no"))):
            trace.load(path, "kubectl")


@pytest.mark.parametrize(
    "wrong", [{"resourceClaims": 3}, {"resourceClaims": [3]}, {"resourceClaims": [{}]}, {"containers": [3]}]
)
def test_what_is_wrong_in_a_pod_is_named(write, wrong):
    with pytest.raises(TraceError, match=r"TypeError|KeyError|AttributeError"):
        trace.load(load(write, pod("p", {}, RAN, **wrong)), "kubectl")


FGD = """\
apiVersion: v1
kind: Node
metadata:
  labels:
    alibabacloud.com/gpu-card-model: {model}
  name: {name}
status:
  allocatable: {{alibabacloud.com/gpu-count: '{gpus}', alibabacloud.com/gpu-milli: '{gpus}000', cpu: 64000m, memory: 262144Mi}}

---

"""


def test_nodes_of_fgd_in_a_file_and_in_a_folder(write):
    pytest.importorskip("yaml")
    text = FGD.format(model="P100", name="a", gpus=2) + FGD.format(model="T4", name="b", gpus=4)
    for path in (write("nodes.yaml", text.replace("\n", "\r\n").encode("utf-8-sig")),
                 write("test/node/b.yaml", text).parents[1], write("list.yml",
                 json.dumps({"kind": "List"}) and text)):  # fmt: skip
        cluster = cluster_file.load(path)
        assert cluster.names == ("a", "b") and cluster.types == ("P100", "T4") and cluster.gpus.tolist() == [2, 4]
        assert cluster.cpu.tolist() == [64_000] * 2 and cluster.memory.tolist() == [262_144] * 2
    listed = "apiVersion: v1\nitems:\n" + "".join(f"- {line}" if line.startswith("api") else f"  {line}" for line in
                                                  FGD.format(model="A", name="n",
                                                  gpus=1).splitlines(True)[:-3]) + "kind: List\n"  # fmt: skip
    assert cluster_file.load(write("list.yaml", listed)).names == ("n",)


@pytest.mark.parametrize(("text", "words"), [
    (FGD.format(model="T4", name="a", gpus=1) * 2, "node 'a' already exists"), ("kind: Pod\n", "it has no nodes"),
    ("apiVersion: v1\nkind: Node\nstatus: {", "no YAML"), ("kind: Node\nmetadata: !!python/name:os.system 1\n", "no YAML"),
    ("kind: Node\nmetadata: " + "[" * 9000, "no YAML"), ("kind: Node\n\x01", "no YAML"), ("kind: List\nitems: [1]\n",
    "no Kubernetes objects"),
    ("kind: Node\nmetadata: 2024-13-45\n", "no YAML"),
    ("kind: Node\nmetadata: {name: &a [*a]}\nstatus: {capacity: {cpu: *a}}\n", "quantity"),
    ("kind: Node\nmetadata: {}\nstatus: {capacity: {cpu: 1}}\n", "KeyError: 'memory'"), ("kind:\n---\n- 1\n",
    "no Kubernetes objects"),
])  # fmt: skip
def test_what_is_wrong_in_nodes_in_yaml_is_named(write, text, words):
    pytest.importorskip("yaml")
    with pytest.raises(TraceError, match=re.escape(words)):
        cluster_file.load(write("nodes.yaml", text))
    with pytest.raises(TraceError, match="is a folder; expected a file, or a folder of nodes in YAML"):
        cluster_file.load(write("empty/x.txt", "").parent)

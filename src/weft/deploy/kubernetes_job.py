"""A job file as Kubernetes objects: Job, JobSet, TrainJob or RayCluster, admitted by Kueue."""

import math
from typing import Any

from weft.cluster.specification import Pool, Specification
from weft.deploy import kueue
from weft.deploy.manifests import JOB, POOL, TAINT, TEAM, Manifest, manifest, pool_of
from weft.train.launch import GRACE_S, JobFile
from weft.words import seconds

PORT = 29400
RUNTIME = "torch-distributed"  # Kubeflow Trainer's ClusterTrainingRuntime
RAY_VERSION = "2.49.0"
DISRUPTED = {"type": "DisruptionTarget", "status": "True"}  # preempted, evicted, its node gone
RAY_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}


def manifests(job: JobFile, made: Specification | None = None) -> list[Manifest]:
    """The objects of the job's kind, in the team's namespace.

    Args:
        made: the cluster file, which says how the pool's GPUs are called.

    Raises:
        ValueError: no team, whose namespace it is; an elastic job of another kind than ``job``; a node has fewer GPUs.
        UnknownName: a pool or team that the cluster file does not have.
    """
    if not job.team:
        raise ValueError("team is missing in the job file; expected the team whose namespace and quota the job has")
    if made and job.team not in [team.name for team in made.teams]:
        from weft.definition import UnknownName

        raise UnknownName("team", job.team, [team.name for team in made.teams])
    if job.min_nodes and job.kind != "job":
        raise ValueError(
            f"min_nodes is {job.min_nodes} with kind {job.kind}; expected kind: job, whose pods fail one by one"
        )
    build = {"job": _job, "jobset": _jobset, "trainjob": _trainjob, "raycluster": _raycluster}[job.kind]
    return build(job, pool_of(job, made), made)


def _labels(job: JobFile) -> dict[str, str]:
    priority = {"kueue.x-k8s.io/priority-class": job.priority} if job.priority else {}
    return {TEAM: job.team, JOB: job.id, "kueue.x-k8s.io/queue-name": kueue.QUEUE, **priority}


def _annotations(job: JobFile, pool: Pool | None) -> dict[str, str]:
    """Within one rack where the pool states racks: as many nodes as fit, but no promise that a job waits for."""
    racked = pool is not None and (pool.nodes.rack or pool.nodes.rack_nodes) and job.nodes > 1
    from weft.deploy.manifests import RACK

    return {"kueue.x-k8s.io/podset-preferred-topology": RACK} if racked else {}


def _resources(job: JobFile, pool: Pool | None) -> dict[str, Any]:
    """Of one node. Limits of GPUs are their requests; cores are not limited, memory is."""
    name = pool.resource if pool else "nvidia.com/gpu"
    requests: dict[str, str] = {}
    if pool and pool.gpus and not (job.cpus and job.memory_gb):  # the share that goes with the GPUs
        share = pool.nodes.count / pool.units * job.gpus_per_node
        requests = {
            "cpu": str(math.floor(pool.nodes.cpu * share * 0.9)),
            "memory": f"{math.floor(pool.nodes.memory_gb * share * 0.9)}Gi",
        }
    if job.cpus:
        requests["cpu"] = str(job.cpus)
    if job.memory_gb:
        requests["memory"] = f"{job.memory_gb}Gi"
    requests = {key: value for key, value in requests.items() if value not in ("0", "0Gi")}
    limits = {key: value for key, value in requests.items() if key == "memory"}
    if job.gpus_per_node:
        if pool and pool.dra:
            return {
                "requests": requests,
                "limits": limits,
                "claims": [{"name": f"gpu-{k}"} for k in range(job.gpus_per_node)],
            }
        requests = {**requests, name: str(job.gpus_per_node)}
        limits = {**limits, name: str(job.gpus_per_node)}
    return {"requests": requests, "limits": limits}


def _pod(job: JobFile, pool: Pool | None, made: Specification | None, command: list[str]) -> dict[str, Any]:
    """The specification of a node's pod."""
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]  # NCCL's and the data loaders'
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.volume:
        claim, _, path = job.volume.partition(":")
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "work", "mountPath": path})
    container = {
        "name": "main",
        "image": _image(job, made),
        "command": command,
        "env": [{"name": name, "value": value} for name, value in job.scheduled.items()],
        "resources": _resources(job, pool),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False, "runAsNonRoot": True, "runAsUser": 1000,
            "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    found: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": volumes,
        "automountServiceAccountToken": False,
    }
    if job.volume:
        found["securityContext"] = {"fsGroup": 1000}
    if job.gpus_per_node:
        found["tolerations"] = [TAINT]
    if job.pool:
        found["nodeSelector"] = {POOL: job.pool}  # by which Kueue takes the pool's flavor
    if job.priority:
        found["priorityClassName"] = job.priority
    if pool and pool.dra:
        found["resourceClaims"] = [
            {"name": f"gpu-{k}", "resourceClaimTemplateName": pool.name} for k in range(job.gpus_per_node)
        ]
    return found


def _image(job: JobFile, made: Specification | None) -> str:
    return job.image or (made.software.image if made else "weft:latest")


def _command(job: JobFile, endpoint: str) -> list[str]:
    if job.nodes == 1 and job.processes == 1:
        return job.command
    nodes = f"{job.min_nodes}:{job.nodes}" if job.min_nodes else str(job.nodes)
    return [
        "torchrun", f"--nnodes={nodes}", f"--nproc-per-node={job.processes}", f"--max-restarts={job.retries}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job.id}",
        f"--rdzv-conf=join_timeout={job.wait_s}", "--no-python", *job.command,
    ]  # fmt: skip


def _deadline(job: JobFile) -> dict[str, int]:
    return {"activeDeadlineSeconds": math.ceil(seconds(job.time_limit))} if job.time_limit else {}


def _template(job: JobFile, pool: Pool | None, made: Specification | None, endpoint: str) -> dict[str, Any]:
    about: dict[str, Any] = {"labels": {TEAM: job.team, JOB: job.id}}
    if annotations := _annotations(job, pool):
        about["annotations"] = annotations
    return {"metadata": about, "spec": _pod(job, pool, made, _command(job, endpoint))}


def _job(job: JobFile, pool: Pool | None, made: Specification | None) -> list[Manifest]:
    """An indexed Job: pod 0 is where the others meet, under a service. A pod that is preempted or whose node goes is no
    failure of the job; of an elastic one each pod has retries of its own."""
    template = _template(job, pool, made, f"{job.id}-0.{job.id}:{PORT}")
    template["spec"]["subdomain"] = job.id
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "suspend": True,  # until Kueue admits it
        **_deadline(job),
        "template": template,
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [DISRUPTED]}]},
    }
    if job.min_nodes:
        spec |= {"backoffLimitPerIndex": job.retries, "maxFailedIndexes": job.nodes - job.min_nodes}
    else:
        spec["backoffLimit"] = job.retries
    found = manifest("batch/v1", "Job", job.id, job.team, _labels(job), spec=spec)
    if job.min_nodes:
        found["metadata"]["annotations"] = {"kueue.x-k8s.io/job-min-parallelism": str(job.min_nodes)}
    service = manifest(
        "v1", "Service", job.id, job.team, {TEAM: job.team, JOB: job.id},
        spec={"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB: job.id},
              "ports": [{"name": "rendezvous", "port": PORT}]},
    )  # fmt: skip
    return [service, found] if job.nodes > 1 else [found]


def _jobset(job: JobFile, pool: Pool | None, made: Specification | None) -> list[Manifest]:
    """A JobSet of one replicated job: when a pod fails, all start again together, up to ``retries`` times."""
    template = _template(job, pool, made, f"{job.id}-workers-0-0.{job.id}:{PORT}")
    workers = {
        "name": "workers",
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed", "completions": job.nodes, "parallelism": job.nodes, "backoffLimit": 0,
                **_deadline(job), "template": template,
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [DISRUPTED]}]},
            }
        },
    }  # fmt: skip
    # A preempted pod, or one whose node goes, starts the set again and is not counted as a failure of the program.
    rules = [
        {
            "name": "disrupted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    spec = {
        "suspend": True,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.id},
        "failurePolicy": {"maxRestarts": job.retries, "rules": rules},
        "replicatedJobs": [workers],
    }
    return [manifest("jobset.x-k8s.io/v1alpha2", "JobSet", job.id, job.team, _labels(job), spec=spec)]


def _trainjob(job: JobFile, pool: Pool | None, made: Specification | None) -> list[Manifest]:
    """A TrainJob on Kubeflow's torch runtime, which sets torchrun's variables; the runtime restarts by its own policy."""
    trainer = {
        "image": _image(job, made),
        "command": ["torchrun", "--no-python", *job.command],
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        "resourcesPerNode": {key: value for key, value in _resources(job, pool).items() if value},
        "env": [{"name": name, "value": value} for name, value in job.scheduled.items()],
    }
    pod = {
        key: value for key, value in _pod(job, pool, made, []).items()
        if key in ("nodeSelector", "tolerations", "volumes", "resourceClaims", "securityContext")
    }  # fmt: skip
    mounts = _pod(job, pool, made, [])["containers"][0]["volumeMounts"]
    pod["containers"] = [{"name": "node", "volumeMounts": mounts}]
    replicated = {
        "name": "node",
        "template": {"spec": {"template": {"metadata": {"labels": {TEAM: job.team, JOB: job.id}}, "spec": pod}}},
    }
    patch = {
        "manager": "weft.dev/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
    }
    spec = {
        "suspend": True, "runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [patch], **_deadline(job),
    }  # fmt: skip
    return [manifest("trainer.kubeflow.org/v1alpha1", "TrainJob", job.id, job.team, _labels(job), spec=spec)]


def _raycluster(job: JobFile, pool: Pool | None, made: Specification | None) -> list[Manifest]:
    """A RayCluster of one worker a node, and a Job that submits the command to it; the command runs in the head's container."""
    worker = _pod(job, pool, made, [])
    worker["restartPolicy"] = "Always"
    (container,) = worker["containers"]
    del container["command"]  # the operator starts Ray
    shared = ("volumes", "securityContext", "automountServiceAccountToken")
    head: dict[str, Any] = {key: worker[key] for key in shared if key in worker}
    head["containers"] = [{
        **container, "name": "head", "ports": [{"name": name, "containerPort": port} for name, port in RAY_PORTS.items()],
        "resources": {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}},
    }]  # fmt: skip
    labels = {"labels": {TEAM: job.team, JOB: job.id}}
    spec = {
        "suspend": True,
        "rayVersion": RAY_VERSION,
        "headGroupSpec": {"rayStartParams": {"num-gpus": "0"}, "template": {"metadata": labels, "spec": head}},
        "workerGroupSpecs": [{
            "groupName": "workers", "replicas": job.nodes, "minReplicas": job.nodes, "maxReplicas": job.nodes,
            "rayStartParams": {}, "template": {"metadata": labels, "spec": worker},
        }],
    }  # fmt: skip
    submit = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [{
            "name": "main", "image": _image(job, made),
            "command": ["ray", "job", "submit", "--address", f"http://{job.id}-head-svc:8265", "--", *job.command],
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        }],
    }  # fmt: skip
    cluster = manifest("ray.io/v1", "RayCluster", job.id, job.team, _labels(job), spec=spec)
    submitted = manifest(
        "batch/v1", "Job", f"{job.id}-submit", job.team, _labels(job),
        spec={"suspend": True, "backoffLimit": job.retries, "template": {"metadata": labels, "spec": submit}},
    )  # fmt: skip
    return [cluster, submitted]

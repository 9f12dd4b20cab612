"""Small files in the schemas of public traces, and the folder of real ones."""

import io
import os
import tarfile
from pathlib import Path

import pytest

TRACES = Path(os.environ.get("WEFT_TRACES") or "/nonexistent")
with_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="WEFT_TRACES names no folder of traces")

OWN = "name,at,s,gpu_num,types\nb,5,10,2,H100|A100\na,1,20.5,8,\n"
PAI = """\
a,worker,2.0,Terminated,100.0,160.0,400.0,29.296875,50.0,T4
a,ps,1.0,Terminated,100.0,160.0,600.0,10.0,,
b,tensorflow,3.0,Failed,50.0,55.0,600.0,1.0,200.0,V100M32
c,worker,1.0,Running,70.0,,600.0,1.0,100.0,MISC
d,worker,1.0,Terminated,70.0,80.0,600.0,1.0,150.0,MISC
e,worker,,Terminated,70.0,80.0,600.0,1.0,100.0,MISC
f,worker,1.0,Terminated,20.0,30.0,,,25.0,
"""
HELIOS = """\
job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
7,u,vcA,x,16,48,2,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:11,2020-06-09 18:42:01,50,10
8,u,vcB,x,0,1,1,COMPLETED,2020-06-09 18:41:02,2020-06-09 18:41:11,2020-06-09 18:42:01,50,10
9,u,vcB,x,1,1,1,CANCELLED,2020-06-09 18:41:03,None,None,,
"""
PAI_HEAD = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
SPEEDS = {"v100": {"('LM', 2)": {"null": 4.0}, "('LM', 1)": {"null": 0.0}}, "k80": {"('LM', 2)": {"null": 0.5}}}
SACCT = """\
JobID|User|Account|Partition|Submit|Start|End|Elapsed|Timelimit|State|AllocTRES|ReqTRES|NNodes|Priority
12|ann|chem|gpu|2024-05-01T10:00:30|2024-05-01T11:00:00|2024-05-02T13:00:01|1-02:00:01|2-00:00:00|COMPLETED|\
billing=9,cpu=64,gres/gpu:h100=8,gres/gpu=8,mem=500G,node=2|cpu=64,gres/gpu:h100=8,mem=500G|2|4000
12.batch||chem||2024-05-01T11:00:00|2024-05-01T11:00:00|2024-05-02T13:00:01|1-02:00:01||COMPLETED|cpu=32,node=1||1|
12.0||chem||2024-05-01T11:00:00|2024-05-01T11:00:00|2024-05-02T13:00:01|1-02:00:01||COMPLETED|cpu=32,node=1||1|
13_4|bob||gpu|2024-05-01T10:00:00|2024-05-01T10:00:00|2024-05-01T10:05:00|05:00|UNLIMITED|CANCELLED by 7|\
cpu=3,gres/gpu:a100=1,gres/gpu:h100=2,mem=256000M|gres/gpu=3|2|
14|bob||gpu|2024-05-01T10:00:00|Unknown|Unknown|00:00:00|1:00:00|PENDING||gres/gpu=8|1|1
15|bob||gpu|2024-05-01T10:00:00|2024-05-01T10:00:00|Unknown|00:10:00|1:00:00|RUNNING|gres/gpu=8|gres/gpu=8|1|1
16|bob||cpu|2024-05-01T10:00:00|2024-05-01T10:00:00|2024-05-01T10:00:09|00:00:09|1:00:00|COMPLETED|cpu=1,mem=1G||1|1
"""
YAML = """\
# two kinds of nodes
nodes:
  - count: 2
    gpus: 8
    gpu_type: H100
    gpu_memory_gb: 80
    cpu: 96
    memory_gb: 1024.5
    rack: a
    name: big
  - {count: 1, gpus: 0, gpu_type: none}
"""


def tar(**members: str) -> bytes:
    """A gzip'd tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(f"{name}.csv")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def rows(jobs, *columns: str) -> list[tuple]:
    """The jobs in order of submission: id, submit, duration, gpus and the named columns."""
    picked = [jobs.id, jobs.submit, jobs.duration, jobs.gpus, *(getattr(jobs, name) for name in columns)]
    return [tuple(row) for row in zip(*(list(column) for column in picked), strict=True)]


def attempt(start, end, *gpus: int) -> dict:
    detail = [{"ip": f"m{k}", "gpus": [f"gpu{g}" for g in range(n)]} for k, n in enumerate(gpus)]
    return {"start_time": start, "end_time": end, "detail": detail}


def philly(jobid: str, submitted: str, *attempts: dict) -> dict:
    about = {"status": "Pass", "vc": "ee9e8c", "user": "u"}
    return {**about, "jobid": jobid, "attempts": attempts, "submitted_time": submitted}


def pod(
    name: str, requests: dict, *runs: tuple, phase: str = "Succeeded", created: str = "2024-05-01T10:00:00Z", **spec
):
    states = [{"state": {"terminated": {"startedAt": start, "finishedAt": end}}} for start, end in runs]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "lab", "creationTimestamp": created},
        "spec": {"containers": [{"name": "main", "resources": {"requests": requests}}], **spec},
        "status": {"phase": phase, "containerStatuses": states},
    }


def node(name: str, resources: dict, **labels: str) -> dict:
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}, "status": {"allocatable": resources}}

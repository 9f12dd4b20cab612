"""A cluster file as Slurm's: slurm.conf, gres.conf, topology.conf, accounts and quotas, prolog and epilog.

A pool is a partition and, for whole GPUs, a type of the gres ``gpu`` of the pool's name. What is nominal is a QOS of the
team's name, which preempts; jobs beyond it run in the QOS ``borrow-COHORT`` and are requeued when the owner comes.
"""

import math
import shlex
from collections.abc import Iterator

from weft.cluster.files.text import TraceError
from weft.cluster.specification import Pool, PoolQuota, Specification, Team
from weft.deploy.gpu_operator import racks
from weft.deploy.manifests import gpu_pools

ETC = "/etc/slurm"
JOBS = "/run/weft/jobs"  # a file for each GPU with the jobs on it: the exporter's --jobs
BIN = "/opt/weft/bin"  # where weft may be installed on nodes
MPS_PER_GPU = 100  # Slurm counts MPS in percent of a GPU
USABLE_MEMORY = 0.95  # of what is stated: a node that registers with less than slurm.conf says is drained


def render(made: Specification) -> dict[str, str]:
    """File → text.

    Raises:
        TraceError: a pool that does not state its cores and memory, which Slurm schedules by.
    """
    for pool in made.pools:
        if pool.nodes.count and not (pool.nodes.cpu and pool.nodes.memory_gb):
            raise TraceError(
                f"{made.path}:{pool.line}: pool '{pool.name}' states no cpu or memory_gb; Slurm needs both"
            )
        if pool.dra:
            raise TraceError(
                f"{made.path}:{pool.line}: pool '{pool.name}' has dra, which is Kubernetes'; Slurm has its gres"
            )
    files = {
        "slurm.conf": slurm_conf(made),
        "gres.conf": gres_conf(made),
        "cgroup.conf": "ConstrainCores=yes\nConstrainRAMSpace=yes\nConstrainDevices=yes\n",
        "prolog.sh": PROLOG,
        "epilog.sh": EPILOG,
    }
    if _racked(made):
        files["topology.conf"] = topology_conf(made)
    if made.slurm.accounting:
        files["accounts.sh"] = accounts(made)
    return files


def slurm_conf(made: Specification) -> str:
    lines = [
        f"# Cluster {made.name}. A node that differs from what stands here is drained by Slurm itself.",
        f"ClusterName={made.name}",
        f"SlurmctldHost={made.slurm.controller}",
        "SlurmUser=slurm",
        "AuthType=auth/munge",
        "StateSaveLocation=/var/spool/slurmctld",
        "SlurmdSpoolDir=/var/spool/slurmd",
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/affinity,task/cgroup",
        "# A node that comes back after a reboot takes jobs again; one that was drained stays so.",
        "ReturnToService=1",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"GresTypes={','.join(_gres_types(made))}",
        "SchedulerType=sched/backfill",
        "# A job whose prolog finds a bad GPU is queued again for other nodes, not held for a person to look at.",
        "SchedulerParameters=nohold_on_prolog_fail",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=100000",
        "PriorityWeightFairshare=10000",
        "PriorityWeightAge=1000",
        "PriorityMaxAge=7-0",
        "# The owner of a quota takes it back from who borrowed it; the borrower's job is queued again.",
        "PreemptType=preempt/qos",
        "PreemptMode=REQUEUE",
        "PreemptExemptTime=00:10:00",
        "JobRequeue=1",
        f"Prolog={ETC}/prolog.sh",
        f"Epilog={ETC}/epilog.sh",
        "PrologFlags=Alloc",
        "PrologEpilogTimeout=120",
        "KillWait=60",
        "JobAcctGatherType=jobacct_gather/cgroup",
    ]
    if _racked(made):
        lines.append("TopologyPlugin=topology/tree")
    if made.slurm.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={made.slurm.accounting}",
            f"AccountingStorageTRES={','.join(sorted({_tres(pool) for pool in gpu_pools(made)} | {'gres/gpu'}))}",
            "AccountingStorageEnforce=associations,limits,qos,safe",
        ]
    lines.append("")
    lines += [_node_line(pool) for pool in made.pools if pool.nodes.count]
    longest = max((each.max_hours for each in made.priorities), default=0)
    bounded = longest and all(each.max_hours for each in made.priorities)
    limit = f"{int(longest)}:00:00" if bounded else "INFINITE"
    for k, pool in enumerate(pool for pool in made.pools if pool.nodes.count):
        each = max(pool.units, pool.nodes.count)  # a share of cores and memory goes with each GPU
        defaults = ""
        if pool.gpus:
            share = pool.nodes.count / each
            kind = "Gpu" if pool.sharing.mode in ("exclusive", "mig") else ""
            if kind:
                defaults = (
                    f" DefCpuPerGPU={max(1, int(pool.nodes.cpu * share))} DefMemPerGPU={int(_memory(pool) * share)}"
                )
        teams = ",".join(team.name for team in made.teams if team.of(pool.name))
        allowed = f" AllowAccounts={teams}" if teams and made.slurm.accounting else ""
        first = " Default=YES" if not k else ""
        lines.append(
            f"PartitionName={pool.name} Nodes={nodes(pool)}{first} MaxTime={limit} State=UP{defaults}{allowed}"
        )
    return "\n".join(lines) + "\n"


def nodes(pool: Pool) -> str:
    """The pool's nodes as Slurm writes them: ``h100-[0-47]``."""
    return _range(pool, 0, pool.nodes.count - 1)


def _range(pool: Pool, first: int, last: int) -> str:
    return f"{pool.name}-[{first}-{last}]" if last > first else f"{pool.name}-{first}"


def _memory(pool: Pool) -> int:
    return int(pool.nodes.memory_gb * 1024 * USABLE_MEMORY)


def _node_line(pool: Pool) -> str:
    gres = f" Gres={','.join(_gres(pool))}" if pool.gpus else ""
    sizes = f"CPUs={int(pool.nodes.cpu)} RealMemory={_memory(pool)}{gres}"
    return f"NodeName={nodes(pool)} {sizes} Feature={pool.name} State=UNKNOWN"


def _gres(pool: Pool) -> list[str]:
    gpus, sharing = pool.nodes.gpus, pool.sharing
    if sharing.mode == "mig":
        return [f"gpu:{sharing.profile}:{gpus * sharing.replicas}"]
    more = {"time-slicing": f"shard:{gpus * sharing.replicas}", "mps": f"mps:{gpus * MPS_PER_GPU}"}
    return [f"gpu:{pool.name}:{gpus}", *([more[sharing.mode]] if sharing.mode in more else [])]


def _gres_types(made: Specification) -> list[str]:
    kinds = {gres.split(":")[0] for pool in gpu_pools(made) for gres in _gres(pool)} | {"gpu"}
    return sorted(kinds)


def _tres(pool: Pool) -> str:
    """What accounting counts of a pool."""
    kinds = {"mig": f"gres/gpu:{pool.sharing.profile}", "time-slicing": "gres/shard", "mps": "gres/mps"}
    return kinds.get(pool.sharing.mode, f"gres/gpu:{pool.name}")


def _in_tres(pool: Pool, units: float) -> int:
    return int(units) * (MPS_PER_GPU // pool.sharing.replicas if pool.sharing.mode == "mps" else 1)


def gres_conf(made: Specification) -> str:
    """The devices of each node. MIG slices are found by NVML, since their device files depend on how the GPUs were cut."""
    lines = ["# Devices of each pool's nodes."]
    for pool in gpu_pools(made):
        if not pool.nodes.count:
            continue
        where = f"NodeName={nodes(pool)}"
        if pool.sharing.mode == "mig":
            lines.append(f"{where} AutoDetect=nvml")
            continue
        last = pool.nodes.gpus - 1
        lines.append(f"{where} Name=gpu Type={pool.name} File=/dev/nvidia{f'[0-{last}]' if last else '0'}")
        if pool.sharing.mode == "time-slicing":
            lines.append(f"{where} Name=shard Count={pool.nodes.gpus * pool.sharing.replicas}")
        if pool.sharing.mode == "mps":
            lines.append(f"{where} Name=mps Count={pool.nodes.gpus * MPS_PER_GPU}")
    return "\n".join(lines) + "\n"


def _racked(made: Specification) -> bool:
    return any(pool.nodes.rack or pool.nodes.rack_nodes for pool in made.pools if pool.nodes.count)


def topology_conf(made: Specification) -> str:
    """Racks as leaf switches, below one: Slurm packs a job under as few as it can. A pool without racks is one."""
    leaves: dict[str, list[str]] = {}
    for pool in made.pools:
        for rack, first, last in racks(pool) if pool.nodes.count else []:
            leaves.setdefault(rack or pool.name, []).append(_range(pool, first, last))
    lines = [f"SwitchName={name} Nodes={','.join(of)}" for name, of in leaves.items()]
    return "\n".join([*lines, f"SwitchName=all Switches={','.join(leaves)}"]) + "\n"


# ---- accounts and quotas ---------------------------------------------------------------------------------------------


def accounts(made: Specification) -> str:
    """A script of sacctmgr's commands. It may run again: what exists is only set anew."""
    lines = [
        "#!/bin/sh",
        f"# Accounts, users and quotas of cluster {made.name}. It may run again at any time.",
        "set -eu",
        "",
        "# sacctmgr ends with status 1 where nothing is new.",
        'add() { sacctmgr --immediate add "$@" || [ $? -eq 1 ]; }',
        'change() { sacctmgr --immediate modify "$@" || [ $? -eq 1 ]; }',
        "",
    ]
    lines += list(_qos(made))
    for team in made.teams:
        limits, qos = _limits(made, team, most=True), _qos_of(made, team)
        lines += [
            "",
            f"add account {team.name} Description={team.name} Organization={made.name}",
            f"change account {team.name} set Fairshare={max(1, round(team.weight * 100))} "
            f"GrpTRES={limits} QOS={','.join(qos)} DefaultQOS={qos[0]}",
            *(f"add user {shlex.quote(user)} Account={team.name}" for user in team.users),
        ]
    return "\n".join(lines) + "\n"


def _qos(made: Specification) -> Iterator[str]:
    """A QOS for what each team owns, and one for each tree of cohorts in which jobs borrow."""
    borrowing = sorted({made.root_of(team.cohort) for team in made.teams if team.cohort})
    for cohort in borrowing:
        yield f"add qos borrow-{cohort}"
        yield f"change qos borrow-{cohort} set Priority=0 PreemptMode=requeue UsageFactor=1"
    for team in made.teams:
        preempts = f" Preempt=borrow-{made.root_of(team.cohort)}" if team.cohort else ""
        yield f"add qos {team.name}"
        yield f"change qos {team.name} set Priority=100 GrpTRES={_limits(made, team, most=False)}{preempts}"


def _qos_of(made: Specification, team: Team) -> list[str]:
    return [team.name, *([f"borrow-{made.root_of(team.cohort)}"] if team.cohort else [])]


def _limits(made: Specification, team: Team, most: bool) -> str:
    """GrpTRES: what a team owns, or with all that it may borrow; 0 of pools that it has no quota of. Also of all GPUs
    together, since a job that names no type counts in no type's limit."""
    found = {"gres/gpu": 0}
    for pool in gpu_pools(made):
        quota = team.of(pool.name) or PoolQuota(pool.name, 0, 0)
        borrowed = quota.borrowing_limit if most and team.cohort else 0
        units = min(quota.nominal + borrowed, pool.units) if borrowed < math.inf else pool.units
        found[_tres(pool)] = found.get(_tres(pool), 0) + _in_tres(pool, units)
        if _tres(pool).startswith("gres/gpu"):
            found["gres/gpu"] += int(units)
    return ",".join(f"{name}={value}" for name, value in sorted(found.items()))


# ---- prolog and epilog -----------------------------------------------------------------------------------------------

PROLOG = f"""\
#!/bin/sh
# Before a job, on each of its nodes, as root: says which GPUs it has, and checks them. Where this fails Slurm drains
# the node and queues the job again.
set -u
PATH={BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin # Slurm sets none
export PATH
jobs={JOBS}
mkdir -p "$jobs"
for gpu in $(echo "${{SLURM_JOB_GPUS:-}}" | tr ',' ' '); do
    case $gpu in *[!0-9]* | '') continue ;; esac
    echo "$SLURM_JOB_ID" >> "$jobs/$gpu"
done
[ -n "${{SLURM_JOB_GPUS:-}}" ] || exit 0
command -v weft > /dev/null || exit 0 # nothing to check with: the job is not stopped for it
timeout 60 weft health check --level quick --prolog
status=$?
if [ "$status" -ne 0 ]; then
    echo "weft health check ended with status $status" >&2 # 124: it hung, and so would the job
    exit 1
fi
"""

EPILOG = f"""\
#!/bin/sh
# After a job, on each of its nodes, as root: its GPUs are no longer its own, and are checked before the next one has them.
set -u
PATH={BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin # Slurm sets none
export PATH
jobs={JOBS}
for gpu in $(echo "${{SLURM_JOB_GPUS:-}}" | tr ',' ' '); do
    case $gpu in *[!0-9]* | '') continue ;; esac
    if [ -f "$jobs/$gpu" ]; then
        left=$(grep -vx "$SLURM_JOB_ID" "$jobs/$gpu")
        printf '%s\\n' "$left" > "$jobs/$gpu"
        [ -n "$left" ] || rm -f "$jobs/$gpu"
    fi
done
[ -n "${{SLURM_JOB_GPUS:-}}" ] || exit 0
command -v weft > /dev/null || exit 0
timeout 60 weft health check --level quick --prolog || exit 1
"""

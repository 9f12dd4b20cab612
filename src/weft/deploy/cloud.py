"""Rented GPUs: a SkyPilot task for each pool, with spot policy and price limit from the cluster file."""

from typing import Any

from weft.cluster.files.text import TraceError
from weft.cluster.specification import Pool, Specification
from weft.deploy.manifests import gpu_pools, yaml_text


def render(made: Specification) -> dict[str, str]:
    """A task for each pool: ``sky launch h100.yaml``; spot pools through ``sky jobs launch``, which starts a job again where it
    was taken away.

    Raises:
        TraceError: no GPUs.
    """
    pools = gpu_pools(made)
    if not pools:
        raise TraceError(f"{made.path}: no GPUs to rent; expected a group of nodes with gpus")
    return {f"{pool.name}.yaml": yaml_text([task(made, pool)]) for pool in pools}


def task(made: Specification, pool: Pool) -> dict[str, Any]:
    """Of the pool's nodes; ``--num-nodes`` on the command line takes fewer."""
    of = pool.accelerator
    resources: dict[str, Any] = {
        "accelerators": {of.cloud_name or of.gpu_type: pool.nodes.gpus},
        "use_spot": pool.spot,
        "disk_size": 512,
    }
    if pool.nodes.cpu:
        resources["cpus"] = f"{int(pool.nodes.cpu)}+"
    if pool.nodes.memory_gb:
        resources["memory"] = f"{int(pool.nodes.memory_gb)}+"
    if pool.price and made.currency == "USD":  # never more for a node than the cluster file counts with
        resources["max_hourly_cost"] = round(pool.price * pool.nodes.gpus, 4)
    if pool.spot:
        resources["job_recovery"] = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 3}
    else:
        resources["autostop"] = {"idle_minutes": made.alerts.idle_minutes, "down": True}
    return {
        "name": f"{made.name}-{pool.name}",
        "num_nodes": pool.nodes.count,
        "resources": resources,
        "workdir": ".",  # a checkout of weft with the job
        "setup": "make setup && .venv/bin/weft doctor",
        "run": (
            'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
            '.venv/bin/weft launch job.yaml --nodes "$SKYPILOT_NUM_NODES" --rendezvous "$head:29400"\n'
        ),
    }

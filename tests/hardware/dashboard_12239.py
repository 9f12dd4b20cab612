"""What Grafana's dashboard 12239 (NVIDIA DCGM Exporter) asks of Prometheus: its variables and the queries of its panels.

The newer revision, of dcgm-exporter's repository, chooses by ``Hostname``; the older one, of grafana.com, by ``instance``.
"""

CHOSEN = '{Hostname=~"$Hostname", gpu=~"$gpu"}'
INSTANCE = "by (Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)"

VARIABLES = {  # name → series, label
    "Hostname": ("DCGM_FI_DEV_FB_FREE", "Hostname"),
    "instance": ("DCGM_FI_DEV_GPU_TEMP", "instance"),
    "gpu": ('DCGM_FI_DEV_FB_FREE{Hostname=~"$Hostname"}', "gpu"),
}
PANELS = {
    "GPU Temperature": f"max(DCGM_FI_DEV_GPU_TEMP{CHOSEN}) by (Hostname, gpu, uuid)",
    "GPU Avg. Temp": f"avg(DCGM_FI_DEV_GPU_TEMP{CHOSEN})",
    "GPU Power Usage": f"max(DCGM_FI_DEV_POWER_USAGE{CHOSEN}) by (Hostname, gpu, uuid)",
    "GPU Power Total": f"sum(max(DCGM_FI_DEV_POWER_USAGE{CHOSEN}) by (gpu))",
    "GPU SM Clocks": f"max(DCGM_FI_DEV_SM_CLOCK{CHOSEN} * 1000000) by (Hostname, UUID, gpu)",
    "GPU Utilization": f"max(DCGM_FI_PROF_GR_ENGINE_ACTIVE{CHOSEN}) {INSTANCE}",
    "Tensor Core Utilization": f"max(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{CHOSEN}) {INSTANCE}",
    "GPU Framebuffer Mem Used": f"max(DCGM_FI_DEV_FB_USED{CHOSEN}) {INSTANCE}",
    **{
        f"older: {name}": f'{name}{{instance=~"$instance", gpu=~"$gpu"}}'
        for name in ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL")
    },
}


def asked(query: str, hostname: str = ".*", gpu: str = ".*") -> str:
    """The query with its variables, as Grafana sends it."""
    return query.replace("$instance", ".+").replace("$Hostname", hostname).replace("$gpu", gpu)

"""The ranks of a run that torchrun started: who this is, DDP, FSDP2 and tensor parallelism, and what all ranks agree on.

Where ``tensor`` ranks in a row share each layer, they have the same batch; so ``world() // tensor`` is how many share batches.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm import compression


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def choose_device(asked: str) -> torch.device:
    """The device of this rank.

    Raises:
        ValueError: no such device here.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local) if not asked and gpus else _named(asked or "cpu")
    if device.type == "cuda" and asked == "cuda":
        device = torch.device("cuda", local)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(
            f"device '{device}' is not here: PyTorch sees {gpus} GPU(s); use --device cpu, or fewer processes"
        )
    return device


def _named(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise ValueError(f"device is '{name}'; expected cpu, cuda or cuda:N")
    return torch.device(name)


@contextlib.contextmanager
def group(parallel: str, tensor: int, device: torch.device) -> Iterator[None]:
    """The process group of a run, NCCL or Gloo; none where there is one process, no ``parallel`` and no ``tensor``.

    Raises:
        ValueError: several processes without ``parallel``, ``parallel`` without torchrun, or a number of processes that
            ``tensor`` does not divide.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if parallel == "none" and tensor == 1:
        if processes > 1:
            raise ValueError(
                f"torchrun started {processes} processes; say how they share the work: --parallel ddp or fsdp"
            )
        yield
        return
    if "RANK" not in os.environ:
        asked = f"parallel {parallel}" if parallel != "none" else f"tensor-parallel {tensor}"
        raise ValueError(
            f"{asked} needs torchrun's ranks: "
            f"torchrun --nproc-per-node N -m weft train … --{asked}, or weft launch job.yaml"
        )
    if processes % tensor or (parallel == "none" and processes != tensor):
        raise ValueError(
            f"tensor_parallel is {tensor} and torchrun started {processes} processes; expected as many, or with "
            "--parallel fsdp a multiple"
        )
    if dist.is_initialized():  # the caller's
        yield
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrap(model: Any, settings: Any, tensor: int, device: torch.device) -> Any:
    """The model split over ranks and compiled, as the settings say. FSDP gathers weights in the dtype of ``amp`` and adds
    gradients in fp32, if ``compress`` does not say otherwise."""
    mesh: Any = None
    if tensor > 1 or settings.parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device.type, (world() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        split_layers(model, mesh["tensor"])
    if settings.compile:
        for block in model.blocks:
            block.compile()
    if settings.parallel == "ddp":
        ids = [device] if device.type == "cuda" else None
        # hooks are Python: fewer, larger buckets than PyTorch's 25 MiB
        bucket_mb = None if settings.compress == "none" else 100
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
        compression.compress_ddp(model, settings.compress)
        return model
    if settings.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        reduced = torch.bfloat16 if settings.compress == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(reduce_dtype=reduced)
        if settings.amp == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced, cast_forward_inputs=False)
        blocks = [b for b in model.blocks if any(True for _ in b.parameters()) and b is not model]
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh["data"], mp_policy=policy)
            if settings.compress == "fp8":
                module.set_custom_reduce_scatter(compression.Fp8ReduceScatter())
    return model


def split_layers(model: Any, mesh: Any) -> None:
    """Tensor parallelism: each rank has its heads and hidden units of a block; all have embedding, norms and head.

    Source: Shoeybi et al. 2019, "Megatron-LM".
    """
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    first, second = ColwiseParallel(), RowwiseParallel()  # the products between which a rank works alone
    for block in model.blocks:
        parallelize_module(block, mesh, {"qkv": first, "out": second, "gate": first, "up": first, "down": second})
    distribute_module(model, mesh)


@contextlib.contextmanager
def gradients(model: Any, parallel: str, last: bool) -> Iterator[None]:
    """Gradients are added over the ranks in the last part of a batch only."""
    if parallel == "ddp" and not last:
        with model.no_sync():
            yield
        return
    if parallel == "fsdp":
        model.set_requires_gradient_sync(last)
    yield


def total(*values: Tensor | float, tensor: int, device: torch.device) -> Tensor:
    """The sums over all that share batches, float64, ``[values]``."""
    alike: dict[str, Any] = {"dtype": torch.float64, "device": device}
    sums = torch.stack([v.to(**alike) if isinstance(v, Tensor) else torch.full((), v, **alike) for v in values])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums / tensor


def distinct(mine: str) -> list[str]:
    """What the ranks have, without the empty and the same."""
    found: list[Any] = [mine] * world()
    if dist.is_initialized():
        dist.all_gather_object(found, mine)
    return sorted({each for each in found if each})


def of_first(mine: Any) -> Any:
    """What rank 0 has."""
    found = [mine]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def share(x: Tensor, tensor: int) -> Tensor:
    """This rank's rows of a batch."""
    return x.tensor_split(world() // tensor)[rank() // tensor]


def average_buffers(model: nn.Module) -> None:
    """Statistics such as BatchNorm's, which each rank takes of its own images, as their mean over the ranks."""
    if dist.is_initialized():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(world())

"""The ranks of a run that torchrun started: who this is, DDP and FSDP2, and what all ranks agree on."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
def group(parallel: str, device: torch.device) -> Iterator[None]:
    """The process group of a run, NCCL or Gloo; none where there is one process and no ``parallel``.

    Raises:
        ValueError: several processes without ``parallel``, or ``parallel`` without torchrun.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if parallel == "none":
        if processes > 1:
            raise ValueError(
                f"torchrun started {processes} processes; say how they share the work: --parallel ddp or fsdp"
            )
        yield
        return
    if "RANK" not in os.environ:
        raise ValueError(
            f"parallel={parallel} needs torchrun's ranks: "
            f"torchrun --nproc-per-node N -m weft train … --parallel {parallel}, or weft launch job.yaml"
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


def wrap(model: Any, parallel: str, amp: str, device: torch.device) -> Any:
    """The model as DDP or FSDP2 has it. FSDP gathers weights in the dtype of ``amp`` and adds gradients in fp32."""
    if parallel == "ddp":
        ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    if parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if amp == "bf16":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        mesh = init_device_mesh(device.type, (world(),))
        for block in model.blocks:
            if any(True for _ in block.parameters()) and block is not model:
                fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


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


def total(*values: Tensor | float, device: torch.device) -> Tensor:
    """The sums over all ranks, float64, ``[values]``."""
    sums = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums


def share(x: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    return x.tensor_split(world())[rank()]


def average_buffers(model: nn.Module) -> None:
    """Statistics such as BatchNorm's, which each rank takes of its own images, as their mean over the ranks."""
    if dist.is_initialized():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(world())

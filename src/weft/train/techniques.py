"""What each switch of a training run does to PyTorch, model and optimizer."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weft.train.settings import Settings

AMP_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def usual_defaults() -> Iterator[None]:
    """New tensors on the CPU and in float32 unless said otherwise, whatever ``torch.set_default_device`` and
    ``torch.set_default_dtype`` of the caller say."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with contextlib.nullcontext() if device.type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def backends(settings: Settings) -> Iterator[None]:
    """PyTorch's global switches for a run; as they were afterwards."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32
    strict = torch.are_deterministic_algorithms_enabled()
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    cudnn.benchmark = settings.cudnn_benchmark and not settings.deterministic
    cudnn.deterministic = settings.deterministic
    cudnn.allow_tf32 = matmul.allow_tf32 = settings.tf32
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
        torch.use_deterministic_algorithms(strict)


def autocast(settings: Settings, device: torch.device) -> Any:
    if settings.amp == "none":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AMP_DTYPE[settings.amp])


def optimizer(settings: Settings, model: Any) -> torch.optim.Optimizer:
    """The optimizer of that name over a model's parameters."""
    import weft.optim as ours

    options: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    parameters = model.parameters()
    match settings.optimizer:
        case "adamw":
            fused = all(p.device.type == "cuda" for p in model.parameters())
            return torch.optim.AdamW(parameters, **options, fused=fused)
        case "sgd":
            return torch.optim.SGD(parameters, **options, momentum=0.9)
        case "weft-adamw":
            return ours.AdamW(parameters, **options)
        case "weft-adamw-8bit":
            return ours.AdamW8bit(parameters, **options)
        case "weft-lion":
            return ours.Lion(parameters, **options)
        case "weft-muon":
            return ours.Muon(ours.muon_groups(model), **options)
    return ours.SGD(parameters, **options, momentum=0.9)


class Graph:
    """Forward and backward of one batch as a CUDA graph, replayed on other batches of its shape.

    Gradients are added to buffers of the capture: set them to 0, not to None, between updates.
    """

    def __init__(self, run: Any, model: Any, scale: Tensor, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.scale = x.clone(), y.clone(), scale.clone()
        buffers = [b.clone() for b in model.buffers()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # cuBLAS, autograd and Triton allocate and compile in their first calls
                run(self.x, self.y, self.scale)
        torch.cuda.current_stream().wait_stream(side)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = run(self.x, self.y, self.scale)
        for buffer, value in zip(model.buffers(), buffers, strict=True):  # BatchNorm's, which the warm-up moved
            buffer.copy_(value)

    def __call__(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        self.x.copy_(x)
        self.y.copy_(y)
        self.scale.copy_(scale)
        self.graph.replay()
        return self.loss.clone()

"""Gradients sent between ranks in fewer bytes: bf16, fp8 with error feedback, PowerSGD; for DDP and FSDP2.

bf16 and PowerSGD are PyTorch's own. A sum cannot be taken of fp8 codes, so fp8 is an all-to-all of codes, a sum in fp32 and
an all-gather of codes: a quarter of fp32's bytes each way.

Source of error feedback on both ways: Tang et al. 2019, "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass
Error-Compensated Compression"; of PowerSGD: Vogels et al. 2019.
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import ops
from weft.comm.torch_transport import all_gather

SHARED_SCALE = 1024  # neighbours that share a scale in fp8
POWERSGD_RANK, POWERSGD_START = 4, 10  # of the approximation; the first steps are sent as they are


class Fp8:
    """Sums over a process group in fp8 (e4m3, a scale for each 1024 neighbours). What a rank's rounding lost is added to its
    next gradients: fp32, as large as what it sends, and not saved in checkpoints. NaN stays NaN."""

    def __init__(self, group: Any = None):
        self.group = group
        self._lost: dict[Any, Tensor] = {}

    def reduce_scatter(self, key: Any, x: Tensor) -> Tensor:
        """x [ranks * part] fp32 -> the sum of this rank's part over the ranks, [part]. ``key``: whose error it is."""
        n = dist.get_world_size(self.group)
        parts = self._encoded(key, _padded(x, n))  # [n, bytes]
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return _decoded(received).sum(0)[: x.numel() // n]

    def all_reduce(self, key: Any, x: Tensor) -> Tensor:
        """x [any] fp32 -> its sum over the ranks: the same bits on all."""
        n = dist.get_world_size(self.group)
        whole = _padded(x, n, exact=False)
        part = self.reduce_scatter((key, "sent"), whole)
        codes = self._encoded((key, "returned"), _padded(part, 1))
        gathered = codes.new_empty((n, codes.shape[1]))
        all_gather(gathered.view(-1), codes.view(-1), group=self.group)
        return _decoded(gathered)[:, : len(part)].reshape(-1)[: x.numel()]

    def _encoded(self, key: Any, x: Tensor) -> Tensor:
        """[n, rows, SHARED_SCALE] -> [n, bytes]: codes, then scales."""
        lost = self._lost.get(key)
        if lost is not None and lost.shape == x.shape:  # DDP makes other buckets after the first step
            x = x + lost
        codes, scale = ops.quantize(x, "fp8_e4m3", "row")
        self._lost[key] = (x - ops.dequantize(codes, scale, "row")).nan_to_num_(0.0, 0.0, 0.0)
        return torch.cat([t.reshape(len(x), -1).view(torch.uint8) for t in (codes, scale)], 1)


def _padded(x: Tensor, n: int, *, exact: bool = True) -> Tensor:
    """n parts of x as rows of SHARED_SCALE, with zeros at the end of each part (``exact``) or of the whole."""
    if not exact:
        return torch.nn.functional.pad(x, (0, -x.numel() % n))
    parts = x.view(n, -1)
    return torch.nn.functional.pad(parts, (0, -parts.shape[1] % SHARED_SCALE)).view(n, -1, SHARED_SCALE)


def _decoded(message: Tensor) -> Tensor:
    """[n, bytes] -> [n, elements] fp32."""
    rows = message.shape[1] // (SHARED_SCALE + 4)
    codes = message[:, : rows * SHARED_SCALE].reshape(-1, SHARED_SCALE).view(torch.float8_e4m3fn)
    scale = message[:, rows * SHARED_SCALE :].reshape(-1, 4).view(torch.float32)
    return ops.dequantize(codes, scale, "row").view(len(message), -1)


def compress_ddp(model: Any, how: str) -> None:
    """Registers the hook of a DistributedDataParallel model."""
    if how == "bf16":
        model.register_comm_hook(None, _bf16_hook)
    elif how == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif how == "fp8":
        model.register_comm_hook(_Fp8Hook(), _Fp8Hook.__call__)


def _bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PyTorch's, under another name: by its own DDP refuses it without NCCL, though Gloo adds bf16 too."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(group, bucket)


class _Fp8Hook:
    """DDP's hook: the mean of a bucket over the ranks. On a GPU it runs on a stream of its own, beside backward."""

    def __init__(self) -> None:
        self.fp8 = Fp8()
        self.stream: Any = None

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        x = bucket.buffer()
        context: Any = contextlib.nullcontext()
        if x.is_cuda:
            self.stream = self.stream or torch.cuda.Stream(x.device)
            self.stream.wait_stream(torch.cuda.current_stream(x.device))
            context = torch.cuda.stream(self.stream)
        with context:
            mean = self.fp8.all_reduce(bucket.index(), x.float() / dist.get_world_size())
            done: Any = torch.futures.Future(devices=[x.device] if x.is_cuda else [])
            done.set_result(x.copy_(mean))
        return done


class Fp8ReduceScatter:
    """FSDP2's reduce-scatter of one module's gradients, for ``set_custom_reduce_scatter``."""

    def __init__(self) -> None:
        self._of_group: dict[Any, Fp8] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        fp8 = self._of_group.setdefault(group, Fp8(group))
        mean = 1 / dist.get_world_size(group) if op == dist.ReduceOp.AVG else 1.0
        output_tensor.copy_(fp8.reduce_scatter(input_tensor.numel(), input_tensor.float() * mean))

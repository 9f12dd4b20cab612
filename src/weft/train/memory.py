"""The memory that a training run will need, before it: PyTorch's own tracker over fake tensors, which allocate nothing."""

import dataclasses
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from weft.train import techniques
from weft.train.jobs import Job, job
from weft.train.settings import Settings

SWITCHES: dict[str, Any] = {  # what may make a run fit, least costly first
    "accumulate": lambda s: 2 * s.accumulate,
    "amp": lambda s: "bf16",
    "optimizer": lambda s: "weft-adamw-8bit",
    "checkpoint_activations": lambda s: True,
}


@dataclass
class Prediction:
    """Bytes at the peak of a training step, by category, on one rank without sharding. ``fits`` has the switches that bring
    the peak below the limit, with the peak of each."""

    peak: int
    categories: dict[str, int]
    limit: int | None
    fits: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def predict(settings: Settings, limit: int | None = None, device: torch.device | None = None) -> Prediction:
    """Predicts the peak of two steps (the second has the optimizer's state), and below ``limit`` bytes what would fit.

    The CUDA context and what the allocator holds in reserve come on top. On a CPU operators are PyTorch's, whatever the
    settings say.
    """
    device = device or torch.device("cpu")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    with techniques.usual_defaults():
        return _predicted(settings, limit, device)


def _predicted(settings: Settings, limit: int | None, device: torch.device) -> Prediction:
    made = job(settings)
    peak, categories = tracked(settings, made, device)
    fits = {}
    if limit is not None and peak > limit:
        for name, value in SWITCHES.items():
            if not hasattr(settings, name) or getattr(settings, name) == value(settings):
                continue
            if name == "accumulate" and value(settings) > settings.batch:
                continue
            changed = dataclasses.replace(settings, **{name: value(settings)})
            if (found := tracked(changed, made, device)[0]) <= limit:
                fits[f"--{name.replace('_', '-')} {value(settings)}".removesuffix(" True")] = found
    return Prediction(peak, categories, limit, fits)


def tracked(settings: Settings, made: Job, device: torch.device) -> tuple[int, dict[str, int]]:
    """The peak of two updates under ``torch.distributed._tools.mem_tracker``, and its categories, in bytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")  # fake tensors and the tracker's hooks
        with device:
            recompute = getattr(settings, "checkpoint_activations", False)
            ours = settings.operators == "weft" and made.name == "gpt" and device.type == "cuda"
            model = made.plain(recompute, "outline" if ours else "torch")
        optimizer = Fused(model.parameters(), settings.optimizer)
        x, y = (t.to(device) for t in made.example(-(-settings.batch // settings.accumulate)))
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x, y)
        with tracker:
            for step in range(2):
                for part in range(min(settings.accumulate, 2)):
                    if step or part:
                        tracker.reset_mod_stats()
                    with techniques.autocast(settings, device):
                        loss = model(x, y)[0]
                    loss.backward()
                    del loss
                optimizer.step()
                optimizer.zero_grad()
        snapshot = tracker.get_tracker_snapshot("peak")[device]
    found = {str(getattr(k, "value", k)): int(v) for k, v in snapshot.items()}
    total = found.pop("Total")
    if device.type == "cuda":
        found["Workspace"] = workspace(device)
        total += found["Workspace"]
    return total, {name: size for name, size in found.items() if size}


@functools.cache
def workspace(device: torch.device) -> int:
    """Bytes that PyTorch gives to cuBLAS for good in the first products of a process, measured."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    x = torch.ones(64, 64, device=device, requires_grad=True)
    x.mm(x).sum().backward()  # in two threads, which have a workspace each
    del x
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


MOMENTS = {"adamw": (2, torch.float32), "weft-adamw": (2, torch.float32), "weft-adamw-8bit": (2, torch.uint8)}


class Fused(torch.optim.Optimizer):
    """A fused optimizer's state, without its step: the kernels of ours need addresses, which fake tensors do not have."""

    def __init__(self, params: Any, name: str) -> None:
        super().__init__(params, {})
        self.moments, self.dtype = MOMENTS.get(name, (1, torch.float32))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p] = {str(i): torch.zeros_like(p, dtype=self.dtype) for i in range(self.moments)}

"""weft.optim where kernels in CUDA C++ take the larger part of the weights, beside the same steps of Triton's."""

import math

import pytest
import torch

from weft.operators.optimizer.dispatch import STEP
from weft.optim import Adam, AdamW, AdamW8bit

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="of Hopper alone")]


def weights(kind: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Large ones of 16 bits, one of them transposed; a few that other kernels take."""
    g = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = kind) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda").to(dtype)

    made = [drawn(2048, 1024), drawn(1000, 2049).t(), drawn(777, dtype=torch.float32), drawn(333), drawn(64, 64)]
    return [torch.nn.Parameter(t) for t in (*made, drawn(2048, 513))]


def stepped(kind, steps, captured=False, dtype=torch.bfloat16, large=False, scaled=False, bad=None, **options):
    """The optimizer, and the parameters after some steps.

    Args:
        captured: all but the first are replayed.
        large: weights that the kernels in CUDA C++ take, and no other.
        scaled: as a ``torch.amp.GradScaler`` calls them.
        bad: a step with a gradient that is infinite.
    """
    params = weights(dtype)
    params = params[:2] + params[5:] if large else params
    rate = torch.tensor(3e-2, device="cuda") if captured else 3e-2
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 1e-2}]
    optimizer = kind(groups, lr=rate, **options)
    g = torch.Generator("cuda").manual_seed(1)
    graph, scale, found = None, torch.full((1,), 256.0, device="cuda"), torch.zeros(1, device="cuda")
    if scaled:
        optimizer.grad_scale, optimizer.found_inf = scale, found
    for step in range(steps):
        found.fill_(float(step == bad))
        for i, p in enumerate(params):
            new = torch.randn(p.shape, generator=g, device="cuda").to(p.dtype)
            new *= 256 if scaled else 1
            if step == bad and i == 1:
                new[-1, -1] = math.inf
            if step == 1 and i == 1 and not captured:
                p.grad = None
            elif p.grad is None:
                p.grad = torch.empty_like(p).copy_(new)
            else:
                p.grad.copy_(new)
        if not captured or step == 0:
            optimizer.step()
        else:
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
    return optimizer, params


def same(ours: torch.Tensor, other: torch.Tensor) -> None:
    """In the mean to less than a unit of last place of 16 bits: of few elements roundings differ, and codes more rarely."""
    ours, other = ours.double(), other.double()
    assert (ours - other).norm() <= 2.0**-8 * other.norm()


def same_steps(one: tuple, other: tuple) -> None:
    (ours, params), (theirs, others) = one, other
    for a, b in zip(params, others, strict=True):
        same(a.detach(), b.detach())
    for a, b in zip(ours.state_dict()["state"].values(), theirs.state_dict()["state"].values(), strict=True):
        assert float(a["step"]) == float(b["step"])
        for name in a:
            if a[name].is_floating_point():
                same(a[name], b[name])


def kernels_of(optimizer: object) -> set[bool]:
    """Of the kernels in CUDA C++ that were launched, whether they scale, clip and skip."""
    return {key[2] for part in optimizer._parts for key in part.table.plans if key[0] == "cuda"}


# The norm of all gradients is about 2,500.
ASKED = {
    "plain": {}, "clipped": {"max_norm": 700.0}, "not clipped": {"max_norm": 1e6},
    "scaled": {"scaled": True, "bad": 2}, "not finite": {"skip_nonfinite": True, "bad": 2},
    "all": {"max_norm": 700.0, "skip_nonfinite": True, "scaled": True, "bad": 3},
    "all, of large ones": {"max_norm": 700.0, "skip_nonfinite": True, "scaled": True, "bad": 2, "large": True},
}  # fmt: skip
KINDS = {
    "AdamW": (AdamW, {}), "AdamW fp16": (AdamW, {"dtype": torch.float16, "betas": (0.9, 0.99)}),
    "Adam": (Adam, {"weight_decay": 0.01, "maximize": True}), "8 bits": (AdamW8bit, {}),
    "8 bits fp16": (AdamW8bit, {"dtype": torch.float16, "block_size": 2048}),
    "e4m3": (AdamW8bit, {"state_format": "fp8"}),
}  # fmt: skip


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_steps_are_those_of_the_portable_kernels(kind, options, captured, monkeypatch):
    optimizer, more = kind
    ours = stepped(optimizer, 5, captured, **more, **options)
    assert kernels_of(ours[0]) == {bool(options)}
    monkeypatch.setattr(STEP, "build", STEP.kernel("triton").build)
    theirs = stepped(optimizer, 5, captured, **more, **options)
    same_steps(ours, theirs)
    assert ours[0].skipped_steps == theirs[0].skipped_steps == ("bad" in options)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_a_skipped_step_changes_nothing(kind, large):
    def step(value: float) -> None:
        for p in params:
            p.grad = torch.full_like(p, 0.5)
        params[0].grad[5, 5] = value
        optimizer.step()

    def found() -> list[torch.Tensor]:
        kept = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        return [t.detach().clone() for t in (*params, *kept)]

    optimizer, params = stepped(kind, 2, large=large, skip_nonfinite=True)
    before = found()
    for count, value in enumerate((math.inf, math.nan), 1):
        step(value)
        assert all(a.equal(b) for a, b in zip(found(), before, strict=True)) and optimizer.skipped_steps == count
    step(0.5)
    assert not any(a.equal(b) for a, b in zip(found(), before, strict=True) if a.numel() > 1000)
    assert optimizer.skipped_steps == 2 and float(optimizer.state[params[0]]["step"]) == 3

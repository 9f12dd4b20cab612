"""Steps that scale, clip or skip, where a kernel in CUDA C++ updates some of the weights: what it and Triton's are passed."""

import math

import pytest
import torch
from optimizer_samples import set_gradients, weights
from where import DEVICE

from weft import optim
from weft.operators.optimizer.dispatch import STEP, Step
from weft.operators.optimizer.multi_tensor import AdamTable, Table

pytestmark = pytest.mark.device


@pytest.fixture
def launched(monkeypatch):
    """Of each launch of ``adam.cu`` whether it was asked for more than a step. Triton's kernel stands in for it."""
    launches = []

    def kernel(table, chunks, factors=False):
        def launch(grads, rows, places, numbers, arrivals, clip=None, scale=None, found=None, skipped=None):
            launches.append(factors)
            plan = table._plan(chunks, *(factors and bool(t.numel()) for t in (scale, clip, found)), False)
            given = [t if factors and t.numel() else table.control for t in (scale, found)]
            control = torch.full_like(table.control, math.nan)
            for at, t in ((0, clip), (3, skipped)):
                if factors and t.numel():
                    control[at] = t[0]
            plan(grads, rows, places, numbers, arrivals, control, *given, table.codebook)
            if factors and skipped.numel():
                skipped[0] = control[3]

        return launch

    monkeypatch.setattr(AdamTable, "kernel", kernel)
    return launches


def stepped(kind, monkeypatch, *, scaled=False, other=False, **options):
    """Three steps with all gradients, one with those of few elements, one with those of many; two have an infinite one."""
    mine = [*weights(((2100,), (17, 9))), *weights(((5,), (40,)), torch.bfloat16)]
    if other:  # PyTorch steps it
        mine.append(torch.nn.Parameter(torch.arange(3, dtype=torch.float64, device=DEVICE)))
    monkeypatch.setattr(STEP, "build", lambda *call: Step(*call).table(kind))
    optimizer = optim.AdamW(mine, lr=1e-2, **options)
    for step in range(5):
        set_gradients(mine, seed=step)
        if step in (2, 4):
            mine[1].grad[3] = math.inf
        for p in {3: mine[:2], 4: mine[2:]}.get(step, ()):
            p.grad = None
        if scaled:
            optimizer.grad_scale = torch.full((1,), 8.0, device=DEVICE)
            optimizer.found_inf = torch.full((1,), float(step >= 2), device=DEVICE)
        optimizer.step()
    return optimizer, mine


OPTIONS = {
    "clipped": {"max_norm": 1.0}, "skipped": {"skip_nonfinite": True}, "scaled": {"scaled": True},
    "all": {"max_norm": 100.0, "skip_nonfinite": True, "scaled": True},
    "measured elsewhere": {"max_norm": 1.0, "skip_nonfinite": True, "other": True},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_kernels_make_the_step_of_one(options, launched, monkeypatch):
    a, mine = stepped(AdamTable, monkeypatch, **options)
    assert launched == [True] * 4  # of the fourth step's gradients none is of such a weight
    b, others = stepped(Table, monkeypatch, **options)
    assert len(launched) == 4
    for p, q in zip(mine, others, strict=True):
        for ours, theirs in ((p, q), *((a.state[p][n], b.state[q][n]) for n in ("step", "exp_avg", "exp_avg_sq"))):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    skipped = 3 if "scaled" in options else 2 if "skip_nonfinite" in options else 0  # it takes more than a norm to skip
    assert a.skipped_steps == b.skipped_steps == skipped and any(p.isnan().any() for p in mine) == (not skipped)


def test_gradients_are_zeroed_by_triton_s(launched, monkeypatch):
    _, mine = stepped(AdamTable, monkeypatch, max_norm=1.0, zero_grads=True)
    assert not launched and not any(p.grad.any() for p in mine if p.grad is not None)


def test_a_scale_of_another_dtype_is_triton_s(launched, monkeypatch):
    (p,) = weights(((40,),))
    monkeypatch.setattr(STEP, "build", lambda *call: Step(*call).table(AdamTable))
    optimizer = optim.AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.grad_scale = torch.full((1,), 8.0, dtype=torch.float64, device=DEVICE)
    optimizer.step()
    assert not launched

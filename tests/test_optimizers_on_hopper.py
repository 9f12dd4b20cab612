"""weft.optim where kernels in CUDA C++ take the larger part of the weights, beside the same steps of Triton's."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft.operators.optimizer import fastest  # noqa: E402
from weft.operators.optimizer.cuda_table import CudaTable  # noqa: E402
from weft.operators.optimizer.table import Table  # noqa: E402
from weft.optim import Adam, AdamW, AdamW8bit  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="of Hopper alone"
    ),
]


def weights() -> list[torch.Tensor]:
    """Large ones of 16 bits, one of them transposed; a few that other kernels take."""
    g = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda").to(dtype)

    made = [drawn(2048, 1024), drawn(1000, 2049).t(), drawn(777, dtype=torch.float32), drawn(333), drawn(64, 64)]
    return [torch.nn.Parameter(t) for t in (*made, drawn(2048, 513))]


def stepped(kind: type, steps: int, captured: bool = False, **options: object) -> tuple[object, list[torch.Tensor]]:
    params = weights()
    rate = torch.tensor(3e-2, device="cuda") if captured else 3e-2
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 1e-2}]
    optimizer = kind(groups, lr=rate, **options)
    g = torch.Generator("cuda").manual_seed(1)
    graph = None
    for step in range(steps):
        for i, p in enumerate(params):
            new = torch.randn(p.shape, generator=g, device="cuda").to(p.dtype)
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


@pytest.mark.parametrize(
    "kind, options",
    [(AdamW, {}), (Adam, {"weight_decay": 0.01}), (AdamW8bit, {}), (AdamW8bit, {"state_format": "fp8"})],
)
@pytest.mark.parametrize("captured", [False, True])
def test_steps_are_those_of_the_portable_kernels(kind, options, captured, monkeypatch):
    optimizer, params = stepped(kind, 5, captured, **options)
    assert any(isinstance(part.table, CudaTable) for part in optimizer._parts)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    monkeypatch.setattr(fastest, "kind_of", lambda rule, entries: Table)
    other, others = stepped(kind, 5, captured, **options)
    assert not any(isinstance(part.table, CudaTable) for part in other._parts)
    for a, b in zip(params, others, strict=True):
        same(a.detach(), b.detach())
    for a, b in zip(state.values(), other.state_dict()["state"].values(), strict=True):
        assert float(a["step"]) == float(b["step"])
        for name in a:
            if a[name].is_floating_point():
                same(a[name], b[name])


def test_a_step_that_clips_is_triton_s(monkeypatch):
    optimizer, params = stepped(AdamW, 3, max_norm=1.0)
    monkeypatch.setattr(fastest, "kind_of", lambda rule, entries: Table)
    _, others = stepped(AdamW, 3, max_norm=1.0)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert isinstance(optimizer._parts[0].table, CudaTable)

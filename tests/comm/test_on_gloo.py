"""Over three Gloo ranks: the experts' exchange, products with a collective after or before, and compressed gradients."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import on_gloo
from torch import nn

from weft import ops
from weft.comm.compression import Fp8, Fp8ReduceScatter, compress_ddp
from weft.comm.symmetric import AllGatherMatmul, ExpertAllToAll, MatmulReduceScatter, expert_feed_forward

N, T, D, K, E = 3, 7, 8, 2, 6


def expert_exchange(group):
    """Elements that are wrong in calls of other token counts on each rank, one of them with none, some without an expert."""
    exchange, wrong = ExpertAllToAll(group, tokens=T, width=D, k=K, experts=E, dtype=torch.bfloat16), 0
    for call in range(4):
        g = torch.Generator().manual_seed(10 * call + group.rank)
        t = max(T - 3 * call * group.rank, 0)
        x = torch.randint(-8, 9, (t, D), generator=g).bfloat16()
        experts = torch.rand((t, E), generator=g).topk(K).indices.int()
        experts[::3, 0] = -1
        weights = torch.randint(1, 4, (t, K), generator=g).float()
        received = exchange.dispatch(x, experts, weights)
        assert ((received.experts >= 0).sum(1) > 0).all() and (received.experts < E // N).all()
        number = received.experts + group.rank * (E // N)  # expert e multiplies by e + 1
        factor = torch.where(received.experts >= 0, received.weights * (number + 1), 0.0).sum(1, keepdim=True)
        y = exchange.combine((received.rows * factor).to(x.dtype))
        expected = x * (weights * (experts + 1)).sum(1, keepdim=True)
        wrong += (y != expected).sum().item()
    with pytest.raises(RuntimeError, match="combine without a dispatch"):
        exchange.combine(y)
    with pytest.raises(ValueError, match=r"8 tokens; this object was made for up to 7"):
        exchange.dispatch(torch.zeros(8, D).bfloat16(), torch.zeros(8, K).int(), torch.zeros(8, K))
    exchange.dispatch(x, experts, weights)
    with pytest.raises(RuntimeError, match="dispatch twice"):
        exchange.dispatch(x, experts, weights)
    return wrong


def layer(group):
    """How far the layer over ranks is from the one with all experts, of 6 tokens on each rank; the largest value."""
    d, h, t = 32, 16, 6
    g = torch.Generator().manual_seed(0)
    x, router, w_gate_up, w_down = (
        torch.randn(shape, generator=g) for shape in ((N * t, d), (E, d), (E, 2 * h, d), (E, d, h))
    )
    mine, experts = slice(group.rank * t, group.rank * t + t), slice(group.rank * (E // N), (group.rank + 1) * (E // N))
    exchange = ExpertAllToAll(group, tokens=t, width=d, k=K, experts=E, dtype=torch.float32)
    y = expert_feed_forward(exchange, x[mine].contiguous(), router, w_gate_up[experts], w_down[experts])
    want = ops.moe_feed_forward(x, router, w_gate_up, w_down, k=K)[mine]
    return (y - want).abs().max().item(), want.abs().max().item()


def products(group):
    g = torch.Generator().manual_seed(group.rank)
    x, weight = (torch.randint(-4, 5, shape, generator=g).float() for shape in ((2 * N, 16), (5, 16)))
    everyone = [torch.empty_like(x) for _ in range(N)], [torch.empty_like(weight) for _ in range(N)]
    for parts, mine in zip(everyone, (x, weight), strict=True):
        dist.all_gather(parts, mine)
    first, second = AllGatherMatmul(group), MatmulReduceScatter(group)
    assert first.explain(x, weight) == second.explain(x, weight) == "nccl"
    whole = sum(a @ b.t() for a, b in zip(*everyone, strict=True))
    right = torch.equal(first(x, weight), torch.cat(everyone[0]) @ weight.t())
    right &= torch.equal(second(x, weight), whole[2 * group.rank :][:2])
    with pytest.raises(ValueError, match=r"x has 4 rows; expected a multiple of 3 ranks"):
        second(x[:4].contiguous(), weight)
    with pytest.raises(ValueError, match=r"out is \[5, 2\] .*; expected contiguous \[2, 5\]"):
        second(x, weight, torch.empty(5, 2))
    with pytest.raises(ValueError, match=r"expected .* of one dtype"):
        first(x, weight.double())
    return right


def fp8_sums(group):
    """Relative errors of one sum and of the sum of twenty, in which what rounding lost is sent later; whether all ranks have
    the same bits."""
    fp8, g, found = Fp8(), torch.Generator().manual_seed(group.rank), []
    for size in (1, 5000):
        total, exact = torch.zeros(size), torch.zeros(size)
        for _ in range(20):
            x = torch.randn(size, generator=g) * 1e-3
            right = x.clone()
            dist.all_reduce(right)
            y = fp8.all_reduce(size, x)
            total, exact = total + y, exact + right
        everyone = [torch.empty_like(y) for _ in range(N)]
        dist.all_gather(everyone, y)
        found.append(((y - right).norm() / right.norm()).item())
        found.append(((total - exact).norm() / exact.norm()).item())
        assert all(torch.equal(y, other) for other in everyone)
    x[0] = float("nan")
    assert fp8.all_reduce(size, x)[0].isnan() and not fp8.all_reduce(size, torch.ones(size)).isnan().any()
    part, out = torch.randn(3 * 700, generator=g), torch.empty(700)
    Fp8ReduceScatter()(out, part, dist.group.WORLD, dist.ReduceOp.SUM)
    dist.all_reduce(part)
    found.append(((out - part.view(3, 700)[group.rank]).norm() / out.norm()).item())
    return found


def regression(group):
    """The loss after sixty steps by each compression, and the weights' bits."""
    found = {}
    target = torch.randn(10, 40, generator=torch.Generator().manual_seed(9))
    for how in ("none", "bf16", "fp8", "powersgd"):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 10))
        model = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
        compress_ddp(model, how)
        optimizer, g = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(group.rank)
        for _ in range(60):
            x = torch.randn(16, 40, generator=g)
            loss = (model(x) - x @ target.t()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss.detach())
        found[how] = loss.item() / N, layers[0].weight.double().sum().item()
    return found


def everything(group):
    return {work.__name__: work(group) for work in (expert_exchange, layer, products, fp8_sums, regression)}


def test_over_gloo():
    ranks = on_gloo(N, everything)
    assert [r["expert_exchange"] for r in ranks] == [0] * N
    assert all(off < 1e-5 * largest for off, largest in (r["layer"] for r in ranks))
    assert all(r["products"] for r in ranks)
    for r in ranks:
        one_alone, sum_alone, one, many, part = r["fp8_sums"]
        assert one_alone < 0.05 and sum_alone < 0.01
        assert 0.01 < one < 0.08 and many < one / 4  # rounded indeed, and made up for
        assert 0.01 < part < 0.05
        assert r["regression"] == ranks[0]["regression"]
    exact = ranks[0]["regression"].pop("none")[0]
    for loss, _ in ranks[0]["regression"].values():
        assert loss == pytest.approx(exact, rel=0.05) and loss != exact

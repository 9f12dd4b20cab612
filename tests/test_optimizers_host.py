"""What a step does on the host besides its launch: hooks, profiles, compiled training steps, and uploads of addresses."""

from __future__ import annotations

import copy

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from optimizer_samples import assert_close, both, set_gradients, weights  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402

from weft import optim  # noqa: E402
from weft.operators.optimizer.adam_rule import ADAM  # noqa: E402
from weft.operators.optimizer.table import Entry, Table  # noqa: E402
from weft.optim.part import BATCH  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# ---- seen from outside -----------------------------------------------------------------------------------------------


class Louder(optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [optim.AdamW, Louder])
def test_hooks_of_an_optimizer_and_of_all_are_called_once(kind):
    mine = weights(((3,),))
    a = kind(mine)
    called = []
    handles = [
        a.register_step_pre_hook(lambda o, args, kwargs: called.append(("before", o is a, len(args)))),
        a.register_step_post_hook(lambda *_: called.append("after")),
        register_optimizer_step_pre_hook(lambda *_: called.append("any before")),
        register_optimizer_step_post_hook(lambda *_: called.append("any after")),
    ]
    set_gradients(mine)
    a.step()
    for handle in handles:
        handle.remove()
    a.step()
    assert called == ["any before", ("before", True, 1), "after", "any after"]


def test_a_hook_may_replace_the_closure():
    (p,) = weights(((3,),))
    a = optim.SGD([p], lr=0.0)
    a.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 7.0), {}))
    assert a.step(lambda: 3.0) == 7.0


def test_a_step_has_its_name_in_a_profile():
    mine = weights(((3,),))
    a = optim.AdamW(mine)
    set_gradients(mine)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:  # a GPU's track has it again
        a.step()
    assert [e.count for e in profile.key_averages() if e.key == "Optimizer.step#AdamW.step"] == [1]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_grad_mode_is_the_callers_after_a_step_that_raises(enabled):
    (p,) = weights(((4, 3),))
    a = optim.AdamW([p])
    p.grad = torch.eye(4, 3, device=DEVICE).to_sparse()
    with torch.set_grad_enabled(enabled):
        with pytest.raises(RuntimeError, match="sparse gradients"):
            a.step()
        assert torch.is_grad_enabled() == enabled


def test_a_compiled_training_step_breaks_its_graph_at_the_step_alone():
    model = torch.nn.Linear(8, 8).to(DEVICE)
    twin = copy.deepcopy(model)
    a, b = optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    x = torch.randn(4, 8, device=DEVICE)

    @torch.compile(backend="eager")
    def update(optimizer):
        optimizer.step()

    torch._dynamo.utils.counters.clear()
    for step in range(3):
        for net in (model, twin):
            net.zero_grad()
            net(x).square().mean().backward()
        update(a)
        if step == 0:
            (reason,) = torch._dynamo.utils.counters["graph_break"]
            assert "OneLaunch.step" in reason
        b.step()
    assert_close(list(model.parameters()), list(twin.parameters()), 3)


# ---- gradients that change -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["transposed", "strided", "offset", "missing"])
def test_one_gradient_in_the_middle_changes_at_the_second_step(change):
    shapes = ((5,), (4, 6), (7,))
    mine, theirs, a, b = both("AdamW", shapes)
    for step in range(4):
        set_gradients(mine, theirs, seed=step)
        if step in (1, 2):
            p, g = mine[1], mine[1].grad
            if change == "transposed":
                p.grad = g.t().contiguous().t()
            elif change == "strided":
                p.grad = torch.stack([g, -g], -1)[..., 0]
            elif change == "offset":
                p.grad = torch.cat([g.new_full((1,), 9.0), g.flatten()])[1:].view_as(g)
            else:
                p.grad = theirs[1].grad = None
        a.step()
        b.step()
    assert_close(mine, theirs, 4)


def test_more_gradients_than_are_held_at_once():
    """Fresh ones at every step; one in the last batch changes its layout, then is missing."""
    mine, theirs, a, b = both("AdamW", ((2, 3),) * (2 * BATCH + 5))
    for step in range(3):
        set_gradients(mine, theirs, seed=step)
        if step == 1:
            mine[-2].grad = mine[-2].grad.t().contiguous().t()
        if step == 2:
            mine[-2].grad = theirs[-2].grad = None
        a.step()
        b.step()
    assert_close(mine, theirs, 3)


def test_a_gradient_that_becomes_sparse_is_refused_and_nothing_is_stepped():
    mine = weights(((5,), (4, 3), (7,)))
    a = optim.AdamW(mine)
    set_gradients(mine)
    a.step()
    before = [p.detach().clone() for p in mine]
    mine[1].grad = torch.eye(4, 3, device=DEVICE).to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 1 has one of torch\.sparse_coo"):
        a.step()
    assert all(p.equal(q) for p, q in zip(mine, before, strict=True))


def test_a_learning_rate_that_becomes_a_tensor_and_a_number_again():
    mine, theirs, a, b = both("AdamW")
    for step, rate in enumerate((1e-2, torch.tensor(3e-2, device=DEVICE), 5e-3)):
        a.param_groups[0]["lr"], b.param_groups[0]["lr"] = rate, float(rate)
        set_gradients(mine, theirs, seed=step)
        a.step()
        b.step()
    assert_close(mine, theirs, 3)


# ---- what a graph reads ----------------------------------------------------------------------------------------------


def table():
    p = torch.zeros(3, device=DEVICE)
    options = {"lr": 1.0, "betas": (0.9, 0.9), "eps": 0.0, "weight_decay": 0.0, "amsgrad": False}
    return Table(ADAM, [Entry(p, (p.clone(), p.clone()), p.new_zeros(()), options)])


def test_what_a_graph_reads_is_not_written_again():
    """Addresses that are on the device already are the graph's without a copy; a later step uploads elsewhere."""
    t = table()
    t.addresses[:] = 1024
    eager, _ = t._upload()
    for _ in range(2):  # two graphs of the same gradients read the same
        graph, _ = t._captured(uploaded=True)
        assert graph.data_ptr() == eager.data_ptr()
    t.addresses[:] = 2048
    later, _ = t._upload()
    assert (int(graph), int(later)) == (1024, 2048)
    t.addresses[:] = 4096
    assert t._upload()[0].data_ptr() == later.data_ptr()
    assert int(graph) == 1024


@pytest.mark.gpu
def test_a_graph_of_gradients_in_place_is_one_launch():
    mine = weights()
    a = optim.AdamW(mine)
    set_gradients(mine)
    a.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1 and "update" in on_device[0]


@pytest.mark.gpu
def test_more_graphs_than_are_provided_for_after_a_step_between():
    mine = weights(((5,),))
    a = optim.SGD(mine, lr=0.5)
    set_gradients(mine)
    a.step()
    graphs, gradients = [], []  # a graph keeps no gradient alive
    for seed in range(6):
        mine[0].grad = torch.full_like(mine[0], float(seed))
        gradients.append(mine[0].grad)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            a.step()
        if seed == 3:
            a.step()
    before = mine[0].detach().clone()
    for graph in graphs:
        graph.replay()
    torch.testing.assert_close(mine[0].detach(), before - 0.5 * sum(range(6)))

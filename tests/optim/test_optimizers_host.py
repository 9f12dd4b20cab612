"""What a step does on the host besides its launch: hooks, profiles, lists of parameters, what it compiles and uploads, CUDA
graphs."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from optimizer_samples import assert_close, random_step, set_gradients, weights
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from where import DEVICE, ROOT, printed

from weft import ops, optim
from weft.operators.launch import Plan
from weft.operators.optimizer import dispatch
from weft.operators.optimizer.multi_tensor import Entry, Table
from weft.operators.optimizer.rules import ADAM

pytestmark = pytest.mark.device


class Louder(optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [optim.AdamW, Louder])
def test_hooks_of_an_optimizer_and_of_all_are_called_once(kind):
    a = kind(weights(((3,),)))
    called = []
    handles = [
        a.register_step_pre_hook(lambda o, args, kwargs: called.append(("before", o is a, len(args)))),
        a.register_step_post_hook(lambda *_: called.append("after")),
        register_optimizer_step_pre_hook(lambda *_: called.append("any before")),
        register_optimizer_step_post_hook(lambda *_: called.append("any after")),
    ]
    random_step(a)
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
    with torch.profiler.profile(acc_events=True) as profile:  # without, it warns
        a.step()
    named = [e for e in profile.key_averages() if e.key == "Optimizer.step#AdamW.step"]
    # a GPU's row has the same name beside the host's: from the first to the last kernel within
    assert [e.count for e in named if e.device_type == torch.autograd.DeviceType.CPU] == [1]


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


CHANGES = {
    "append": lambda params, p: params.append(p), "extend": lambda params, p: params.extend([p]),
    "insert": lambda params, p: params.insert(0, p), "iadd": lambda params, p: params.__iadd__([p]),
    "item": lambda params, p: params.__setitem__(0, p),
    "slice": lambda params, p: params.__setitem__(slice(0, 1), [p]),
    "pop": lambda params, p: (params.append(p), params.pop(0)),
    "delete": lambda params, p: (params.append(p), params.__delitem__(0)),
    "clear": lambda params, p: (params.clear(), params.append(p)),
}  # fmt: skip


@pytest.mark.parametrize("plain", [False, True], ids=["its own list", "a list of the caller's"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_groups_list_that_is_changed_in_place(change, plain):
    """The step is of the parameters that the list then has; that is seen of a list that the caller has put there too."""
    first, second, other = weights(((5,), (3,), (4,)))
    a = optim.SGD([first, second], lr=0.5)
    if plain:
        a.param_groups[0]["params"] = [first, second]
    everything = (first, second, other)
    for p in everything:
        p.grad = torch.ones_like(p)
    a.step()
    change(a.param_groups[0]["params"], other)
    before = [p.detach().clone() for p in everything]
    a.step()
    listed = {id(p) for p in a.param_groups[0]["params"]}
    assert id(other) in listed
    for p, q in zip(everything, before, strict=True):
        torch.testing.assert_close(p.detach(), q - 0.5 * (id(p) in listed))


def test_a_parameter_that_goes_to_the_next_group_has_its_options():
    """The order of all parameters is what it was."""
    first, second = weights(((5,), (3,)))
    a = optim.SGD([{"params": [first, second], "lr": 0.5}, {"params": [], "lr": 0.25}])
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    a.step()
    a.param_groups[1]["params"].append(a.param_groups[0]["params"].pop())
    before = first.detach().clone(), second.detach().clone()
    a.step()
    torch.testing.assert_close(first.detach(), before[0] - 0.5)
    torch.testing.assert_close(second.detach(), before[1] - 0.25)


def test_another_list_of_the_same_parameters_makes_no_new_table():
    """A new table would be refused within a capture."""
    mine = weights(((5,), (3,)))
    a = optim.SGD(mine, lr=0.5)
    random_step(a)
    table = a._parts[0].table
    a.param_groups[0]["params"] = list(mine)
    a.step()
    params = a.param_groups[0]["params"]
    params.append(params.pop())
    a.step()
    assert a._parts[0].table is table


def test_lists_of_a_copied_optimizer_are_its_own():
    (p,) = weights(((5,),))
    (other,) = weights(((3,),))
    a = optim.SGD([p], lr=0.5)
    p.grad, other.grad = torch.ones_like(p), torch.ones_like(other)
    a.step()
    b = copy.deepcopy(a)
    (q,) = b.param_groups[0]["params"]
    q.grad = torch.ones_like(q)
    b.step()
    b.param_groups[0]["params"].append(other)
    before = p.detach().clone(), q.detach().clone(), other.detach().clone()
    b.step()
    assert a.param_groups[0]["params"] == [p] and p.detach().equal(before[0])
    torch.testing.assert_close(q.detach(), before[1] - 0.5)
    torch.testing.assert_close(other.detach(), before[2] - 0.5)


@pytest.mark.share(2)
def test_every_kind_compiles_for_every_architecture():
    printed(str(ROOT / "tests/optim/compiled_optimizers.py"))


def table():
    p = torch.zeros(3, device=DEVICE)
    options = {"lr": 1.0, "betas": (0.9, 0.9), "eps": 0.0, "weight_decay": 0.0, "amsgrad": False}
    return Table(ADAM, [Entry(p, (p.clone(), p.clone()), p.new_zeros(()), options)])


def test_more_states_than_a_row_has_slots_are_refused():
    (e,) = table().entries
    with pytest.raises(ValueError, match="has 6 states of a weight; expected at most 5"):
        Table(ADAM, [Entry(e.param, (e.param,) * 6, e.step, e.options)])


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
    assert t._upload()[0].data_ptr() == later.data_ptr() and int(graph) == 1024


@pytest.mark.gpu
def test_a_graph_of_gradients_in_place_is_one_launch():
    a = optim.AdamW(weights())
    random_step(a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        graph.replay()
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1 and "update" in on_device[0]


def captured(step, monkeypatch):
    """Replays a CUDA graph of the step; without a GPU, the copies and launches that it would have, which are then left out."""
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay
    work, copy_, launch = [], torch.Tensor.copy_, Plan.__call__
    with monkeypatch.context() as patch:
        patch.setattr(Table, "_capturing", lambda table: True)
        noted = lambda to, *how, **keys: work.append(partial(copy_, to, *how, **keys)) or to  # noqa: E731
        patch.setattr(torch.Tensor, "copy_", noted)
        patch.setattr(Plan, "__call__", lambda plan, *tensors: work.append(partial(launch, plan, *tensors)))
        step()
    return lambda: [again() for again in work]


def test_more_graphs_than_are_provided_for_after_a_step_between(monkeypatch):
    """Each has gradients of its own, which are kept: a graph keeps none, and memory of one that is gone is given out again."""
    mine = weights(((5,),))
    a = optim.SGD(mine, lr=0.5)
    grads = [torch.full_like(mine[0], 10.0**seed) for seed in range(6)]
    mine[0].grad = grads[0]  # in place for the first graph, which reads what this step uploads; the others upload
    a.step()
    before = mine[0].detach().clone()
    replays = []
    for seed, grad in enumerate(grads):
        mine[0].grad = grad
        replays.append(captured(a.step, monkeypatch))
        if seed == 3:
            a.step()
    torch.testing.assert_close(mine[0].detach(), before - 0.5 * 1e3)
    for seed in (2, 0, 5, 3, 1, 4, 2):
        with torch.no_grad():
            mine[0].copy_(before)
        replays[seed]()
        torch.testing.assert_close(mine[0].detach(), before - 0.5 * 10.0**seed)


@pytest.mark.parametrize("later", [0.5, "another tensor"])
def test_a_graph_reads_its_own_learning_rate_after_a_step_with_another(monkeypatch, later):
    mine = weights(((5,),))
    rate = torch.tensor(2.0, device=DEVICE)
    a = optim.SGD(mine, lr=rate)
    mine[0].grad = torch.ones_like(mine[0])
    a.step()
    replay = captured(a.step, monkeypatch)
    a.param_groups[0]["lr"] = later if isinstance(later, float) else torch.tensor(0.5, device=DEVICE)
    a.step()
    before = mine[0].detach().clone()
    replay()
    torch.testing.assert_close(mine[0].detach(), before - 2.0)
    rate.fill_(3.0)
    replay()
    torch.testing.assert_close(mine[0].detach(), before - 5.0)
    a.step()
    torch.testing.assert_close(mine[0].detach(), before - 5.5)


@pytest.mark.parametrize("graphs", [0, 1])
def test_a_table_that_is_replaced_is_kept_for_graphs_alone(monkeypatch, graphs):
    first, second = weights(((5,), (3,)))
    a = optim.SGD([first, second], lr=0.5)
    first.grad = torch.ones_like(first)
    a.step()
    replays = [captured(a.step, monkeypatch) for _ in range(graphs)]
    table = weakref.ref(a._parts[0].table)
    second.grad = torch.ones_like(second)  # its first: another table
    a.step()
    gc.collect()
    assert a._parts[0].table is not table() and (table() is not None) == bool(graphs)
    before = first.detach().clone()
    for replay in replays:
        replay()
    torch.testing.assert_close(first.detach(), before - 0.5 * graphs)


def test_tables_of_graphs_outlast_those_of_other_calls(monkeypatch):
    """A call on lists keeps its table for the next one, and only so many of them."""
    sets = torch.zeros(70, 4, 1, 5, device=DEVICE)

    def step(row):
        ops.adam(*map(list, sets[row]), steps[row], lr=0.5, betas=(0.0, 0.0), eps=0.0)

    monkeypatch.setattr(dispatch, "TABLES", {})
    steps = [[torch.zeros((), device=DEVICE)] for _ in sets]
    sets[:, 1] = 1.0
    step(0)
    replay = captured(lambda: step(0), monkeypatch)
    (table,) = dispatch.TABLES.values()
    for row in range(1, len(sets)):
        step(row)
    assert table in dispatch.TABLES.values() and len(dispatch.TABLES) < 64
    replay()
    torch.testing.assert_close(sets[:2, 0, 0, 0], sets.new_tensor([-1.0, -0.5]))


def test_gradients_are_checked_beside_a_table_of_the_call_before():
    params, grads, momenta, squares = torch.zeros(4, 3, 2, 5, device=DEVICE)
    steps = [torch.zeros((), device=DEVICE) for _ in params]
    with pytest.raises(ValueError, match=r"grads\[1\]"):
        for last in (grads[1], grads[1].mT):
            ops.adam(list(params), [grads[0], last, grads[2]], list(momenta), list(squares), steps)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"skip_nonfinite": True, "zero_grads": True}])
def test_a_captured_step_is_replayed(options):
    """Gradients in the graph's memory; between replays an eager step with others, which must not change what is replayed."""
    rate = torch.tensor(1e-2, device="cuda")
    mine, theirs = weights(), weights()
    a, b = optim.AdamW(mine, lr=rate, **options), optim.AdamW(theirs, lr=rate, **options)
    static = [torch.empty_like(p) for p in mine]

    def load(seed):
        set_gradients(theirs, seed=seed)
        for s, q in zip(static, theirs, strict=True):
            s.copy_(q.grad)

    def use_static():
        for p, s in zip(mine, static, strict=True):
            p.grad = s

    load(0)
    use_static()
    a.step()
    b.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for seed in range(1, 6):
        load(seed)
        rate.fill_(1e-2 / seed)
        b.step()
        if seed == 3:
            for p, s in zip(mine, static, strict=True):
                p.grad = s.clone()
            a.step()
            use_static()
        else:
            graph.replay()
    torch.cuda.synchronize()
    assert all(p.equal(q) for p, q in zip(mine, theirs, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # it is: the step is refused before anything is launched
def test_a_first_step_cannot_be_captured():
    mine = weights()
    set_gradients(mine)
    a = optim.AdamW(mine)
    with pytest.raises(RuntimeError, match="call it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        a.step()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_training_step():
    model = torch.nn.Linear(8, 8, device="cuda")
    twin = copy.deepcopy(model)
    a, b = optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    x = torch.randn(4, 8, device="cuda")

    @torch.compile
    def train(net, optimizer):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        train(model, a)
        train(twin, b)
    assert_close(list(model.parameters()), list(twin.parameters()), 30)

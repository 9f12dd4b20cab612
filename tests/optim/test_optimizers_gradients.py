"""Gradients and weights that change between steps, and the versions that autograd sees."""

import copy
import sys

import pytest
import torch
from optimizer_samples import assert_close, assert_same_steps, both, random_step, set_gradients, weights
from where import DEVICE

from weft import ops, optim
from weft.operators.launch import Plan
from weft.optim.optimizer import BATCH, Part

pytestmark = pytest.mark.device


@pytest.fixture
def one_by_one(monkeypatch):
    """Rows whose gradients were looked at one by one, not in a batch."""
    rows, collect = [], Part._collect_row
    monkeypatch.setattr(Part, "_collect_row", lambda part, row, *rest: rows.append(row) or collect(part, row, *rest))
    return rows


@pytest.mark.parametrize("change", ["transposed", "strided", "offset", "missing"])
def test_one_gradient_in_the_middle_changes_at_the_second_step(change):
    mine, theirs, a, b = both("AdamW", ((5,), (4, 6), (7,)))

    def changed(step):
        p, g = mine[1], mine[1].grad
        if step not in (1, 2):
            return
        if change == "transposed":
            p.grad = g.t().contiguous().t()
        elif change == "strided":
            p.grad = torch.stack([g, -g], -1)[..., 0]
        elif change == "offset":
            p.grad = torch.cat([g.new_full((1,), 9.0), g.flatten()])[1:].view_as(g)
        else:
            p.grad = theirs[1].grad = None

    assert_same_steps(mine, theirs, a, b, 4, changed)


def test_more_gradients_than_a_batch_has():
    """Fresh ones at every step; one in the last batch changes its layout, then is missing."""
    mine, theirs, a, b = both("AdamW", ((2, 3),) * (2 * BATCH + 5))

    def change(step):
        if step == 1:
            mine[-2].grad = mine[-2].grad.t().contiguous().t()
        if step == 2:
            mine[-2].grad = theirs[-2].grad = None

    assert_same_steps(mine, theirs, a, b, change=change)


@pytest.mark.parametrize("how", ["data", "swapped"])
def test_a_weight_of_the_last_batch_that_is_moved(how):
    """Its old memory is left as it was. A swap gives the same Python object another tensor."""
    mine, theirs, a, b = both("AdamW", ((2, 3),) * (BATCH + 5))
    for step in range(3):
        set_gradients(mine, theirs, seed=step)
        if step == 1:
            p, before = mine[-2], mine[-2].detach().clone()
            left = p.data
            if how == "data":
                p.data = left.clone()
            else:
                other = torch.nn.Parameter(left.clone())
                other.grad = p.grad
                del left  # of which a swap wants no other view
                torch.utils.swap_tensors(p, other)
                left = other.data
        a.step()
        b.step()
    assert left.equal(before)
    assert_close(mine, theirs, 3)


def test_a_gradient_that_becomes_sparse_is_refused_and_nothing_is_stepped():
    mine = weights(((5,), (4, 3), (7,)))
    a = optim.AdamW(mine)
    random_step(a)
    before = [p.detach().clone() for p in mine]
    mine[1].grad = torch.eye(4, 3, device=DEVICE).to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 1 has one of torch\.sparse_coo"):
        a.step()
    assert all(p.equal(q) for p, q in zip(mine, before, strict=True))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_gradients_of_a_weight_whose_channels_are_last(memory_format, one_by_one):
    """In the weight's own order they are used without a copy."""
    mine, theirs, a, b = both("AdamW", ((5,), (4, 3, 2, 2)))
    mine[1].data = mine[1].data.to(memory_format=torch.channels_last)

    def change(step):
        mine[1].grad = mine[1].grad.to(memory_format=memory_format)

    assert_same_steps(mine, theirs, a, b, change=change)
    (part,) = a._parts
    assert len(part.copied) == (memory_format == torch.contiguous_format)
    assert bool(one_by_one) == bool(part.copied)


def test_a_gradient_whose_dtype_is_another_from_the_second_step_on():
    """As numbers of 16 bits its first half would be read."""
    mine, theirs, a, b = both("SGD", ((5,), (7,)), dtype=torch.float16)
    for step in range(3):
        set_gradients(mine[:1], theirs[:1], seed=step)
        set_gradients(theirs[1:], seed=step)
        mine[1].grad = None
        mine[1].grad_dtype = torch.float32 if step else torch.float16
        mine[1].grad = theirs[1].grad.to(mine[1].grad_dtype)
        a.step()
        b.step()
    assert_close(mine, theirs, 3, torch.float16)


def test_a_gradient_without_memory_is_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, x):
            return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

        @classmethod
        def __torch_dispatch__(cls, function, *_):
            raise NotImplementedError(function)

    mine = weights(((5,), (7,)))
    a = optim.AdamW(mine)
    random_step(a)
    mine[1].grad = Wrapper(mine[1].grad)
    with pytest.raises(RuntimeError, match="the gradient of parameter 1 is a Wrapper without memory"):
        a.step()


def test_a_class_of_parameters_with_gradients_of_its_own():
    class Scaled(torch.nn.Parameter):
        @property
        def grad(self):
            return self.scaled

    p = Scaled(torch.zeros(5, device=DEVICE))
    a = optim.SGD([p], lr=1.0)
    for scale in (0.5, 0.25):
        p.scaled = torch.full((5,), scale, device=DEVICE)
        a.step()
    assert p.detach().eq(-0.75).all()


def test_a_weight_that_is_moved_between_steps_in_backward():
    """Its bucket is left to the step, which looks at all anew."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)).to(DEVICE)
    twin = copy.deepcopy(model)
    a, b = optim.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    a.overlap_with_backward(0.0)  # a bucket for each
    left = []
    for step in range(4):
        if step == 2:
            left = [model[0].weight.data, model[0].weight.detach().clone()]
            model[0].weight.data = left[0].clone()
        for net in (model, twin):
            net.zero_grad()
            net(torch.ones(2, 4, device=DEVICE)).square().mean().backward()
        a.step()
        b.step()
    assert left[0].equal(left[1])
    assert_close(list(model.parameters()), list(twin.parameters()), 40)


def test_batches_with_unusual_gradients_are_looked_at_row_by_row(one_by_one):
    params = weights(((4, 4),) * (2 * BATCH) + ((0,),))
    a = optim.SGD(params)
    for gradient in ("usual", "missing", "transposed"):
        set_gradients(params)
        if gradient == "missing":
            params[1].grad = None
        if gradient == "transposed":
            params[1].grad = params[1].grad.t()
        one_by_one.clear()
        a.step()
        (part,) = a._parts
        (copy,) = [t for _, t in part.copied] or [None]
        rows = [*range(BATCH), 2 * BATCH] if gradient != "usual" else [2 * BATCH]  # an empty tensor has no address
        wanted = [0 if p.grad is None else p.grad.data_ptr() for p in params]
        if copy is not None:
            wanted[1] = copy.data_ptr()
        assert one_by_one == rows and part.table.addresses.tolist() == wanted


NAMES = ["Adam", "AdamW", "SGD", "Lion", "Adam8bit", "AdamW8bit", "Muon", "MuonW"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(6, 4), (5000,)])
def test_a_weight_that_was_saved_for_a_gradient_is_known_to_have_changed(name, shape):
    """Else the gradient is computed with the new weight, and wrong."""
    mine = weights((shape, (3,)))
    p, q = mine
    x = torch.ones(shape, device=DEVICE, requires_grad=True)
    a = getattr(optim, name)(mine, lr=1.0)
    for first in (True, False):  # some have a gradient, all have one
        set_gradients(mine)
        if first:
            q.grad = None
        loss, other = (p * x).sum(), (q * x.flatten()[:3]).sum()
        a.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        if first:
            other.backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()


def test_gradients_that_are_set_to_0_are_known_to_have_changed():
    mine = weights(((5,), (7,)))
    set_gradients(mine)
    loss = (mine[0].grad * torch.ones(5, device=DEVICE, requires_grad=True)).sum()
    optim.AdamW(mine, zero_grads=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_steps_in_backward_are_known_to_have_changed_weights():
    mine = weights(((5,),))
    a = optim.SGD(mine, lr=1.0)
    random_step(a)
    a.overlap_with_backward()
    later = (mine[0] * torch.ones(5, device=DEVICE, requires_grad=True)).sum()
    mine[0].grad = None
    mine[0].square().sum().backward()
    assert mine[0].grad is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lion", "adamw_8bit"])
def test_the_operators_increment_versions_of_what_they_write(name):
    def drawn(dtype=torch.float32, shape=(300,)):
        return torch.ones(shape, device=DEVICE).to(dtype)

    p, g, step = drawn(), drawn(), drawn(shape=())
    kept = {
        "adam": lambda: [drawn(), drawn(), step], "adamw": lambda: [drawn(), drawn(), step, drawn()],
        "sgd": lambda: [drawn()], "lion": lambda: [drawn()],
        "adamw_8bit": lambda: [drawn(torch.uint8), drawn(shape=(2,)), drawn(torch.uint8), drawn(shape=(2,)), step],
    }[name]()  # fmt: skip
    before = [t._version for t in (p, *kept)]
    getattr(ops, name)([p], [g], *([t] for t in kept), **({"momentum": 0.9} if name == "sgd" else {}))
    assert all(t._version > version for t, version in zip((p, *kept), before, strict=True)) and g._version == 0


def calls(count, monkeypatch):
    """Calls of Python and C functions that a step of so many small tensors makes besides its launch."""
    monkeypatch.setattr(Plan, "__call__", lambda plan, *tensors: None)
    mine = weights(((3,),) * count)
    a = optim.AdamW(mine)
    for _ in range(2):
        random_step(a)
    set_gradients(mine)
    seen = 0

    def counting(frame, event, argument):
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        a.step()
    finally:
        sys.setprofile(None)
    return seen


def test_few_calls_are_made_for_each_tensor(monkeypatch):
    few, many = calls(BATCH, monkeypatch), calls(9 * BATCH, monkeypatch)
    assert few <= 100 + 6 * BATCH and many - few <= 8 * 6 * BATCH

"""Lists of parameters in an optimizer's groups: whatever is done to one is seen by the next step."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from optimizer_samples import set_gradients, weights  # noqa: E402

from weft import optim  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

CHANGES = {
    "append": lambda params, p: params.append(p),
    "extend": lambda params, p: params.extend([p]),
    "insert": lambda params, p: params.insert(0, p),
    "iadd": lambda params, p: params.__iadd__([p]),
    "item": lambda params, p: params.__setitem__(0, p),
    "slice": lambda params, p: params.__setitem__(slice(0, 1), [p]),
    "pop": lambda params, p: (params.append(p), params.pop(0)),
    "delete": lambda params, p: (params.append(p), params.__delitem__(0)),
    "clear": lambda params, p: (params.clear(), params.append(p)),
}


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
    set_gradients(mine)
    a.step()
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
    assert a.param_groups[0]["params"] == [p]
    assert p.detach().equal(before[0])
    torch.testing.assert_close(q.detach(), before[1] - 0.5)
    torch.testing.assert_close(other.detach(), before[2] - 0.5)

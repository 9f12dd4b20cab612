"""The optimizers of ``weft.optim`` against those of ``torch.optim``, on the GPU where there is one, else interpreted."""

from __future__ import annotations

import copy
import importlib.util
import io
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from where import DEVICE, ROOT, python

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from weft import optim  # noqa: E402
from weft.operators.optimizer.table import Entry, Table  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

SHAPES = ((3, 5), (1,), (), (0,), (2100,), (17, 9))
PAIRS = {
    "Adam": {"lr": 1e-2},
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}


def weights(shapes=SHAPES, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(DEVICE, dtype)) for s in shapes]


def set_gradients(*lists, seed=0, scale=1.0):
    """The same random gradients for the parameters of each list."""
    g = torch.Generator().manual_seed(1000 + seed)
    for same in zip(*lists, strict=True):
        drawn = torch.randn(same[0].shape, generator=g) * scale
        for p in same:
            p.grad = drawn.to(p.device, p.dtype, copy=True)


def assert_close(ours, theirs, steps=1, dtype=torch.float32):
    """To rounding: each step rounds a weight of a few units once, and its update, relatively, a few times."""
    for a, b in zip(ours, theirs, strict=True):
        bound = steps * torch.finfo(dtype).eps * max(float(b.detach().abs().max()) if b.numel() else 0.0, 1.0)
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=bound)


def both(name, shapes=SHAPES, dtype=torch.float32, **options):
    mine, theirs = weights(shapes, dtype), weights(shapes, dtype)
    options = {**PAIRS[name], **options}
    return mine, theirs, getattr(optim, name)(mine, **options), getattr(torch.optim, name)(theirs, **options)


# ---- equal to PyTorch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_a_hundred_steps_equal_pytorchs(name):
    mine, theirs, a, b = both(name, ((3, 5), (1,), (70,)))
    for step in range(100):
        set_gradients(mine, theirs, seed=step)
        a.step()
        b.step()
    assert_close(mine, theirs, 100)


MATRIX = [
    ("Adam", {"amsgrad": True}),
    ("Adam", {"maximize": True, "weight_decay": 0.1}),
    ("Adam", {"betas": (0.0, 0.5), "eps": 1e-3}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"amsgrad": True, "maximize": True, "weight_decay": 0.3}),
    ("AdamW", {"betas": (0.5, 0.0)}),
    ("SGD", {"momentum": 0.0}),
    ("SGD", {"momentum": 0.0, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"dampening": 0.3}),
    ("SGD", {"nesterov": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), MATRIX)
def test_every_option_equals_pytorchs(name, options):
    mine, theirs, a, b = both(name, **options)
    for step in range(4):
        set_gradients(mine, theirs, seed=step)
        a.step()
        b.step()
    assert_close(mine, theirs, 4)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.lists(
        st.tuples(
            st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
            st.sampled_from((torch.float32, torch.float16)),
            st.floats(1e-4, 1e-1),
            st.floats(0, 0.5),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
    absent=st.integers(0, 8),
)
def test_any_groups_equal_pytorchs(groups, absent):
    """Shapes, dtypes and options mixed; one parameter has no gradient at the second step."""

    def made(kind):
        own = []
        for i, (shapes, dtype, lr, decay, amsgrad, maximize) in enumerate(groups):
            options = {"lr": lr, "weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
            own.append({"params": weights(shapes, dtype, seed=i), **options})
        return kind(own), [p for group in own for p in group["params"]]

    (a, mine), (b, theirs) = made(optim.AdamW), made(torch.optim.AdamW)
    wide = [torch.nn.Parameter(p.detach().double()) for p in theirs]
    c = torch.optim.AdamW([{**g, "params": [wide.pop(0) for _ in g["params"]]} for g in b.param_groups])
    exact = [p for g in c.param_groups for p in g["params"]]
    for step in range(3):
        set_gradients(mine, theirs, exact, seed=step)
        if step == 1 and absent < len(mine):
            mine[absent].grad = theirs[absent].grad = exact[absent].grad = None
        for optimizer in (a, b, c):
            optimizer.step()
    for ours, torchs, right in zip(mine, theirs, exact, strict=True):
        if right.numel():
            error, usual = ((t.detach().double() - right.detach()).abs().max() for t in (ours, torchs))
            floor = 4 * torch.finfo(ours.dtype).eps * max(float(right.detach().abs().max()), 1.0)
            assert float(error) <= max(2 * float(usual), floor)


def test_lion_equals_its_formula():
    mine, theirs = weights(), weights()
    a = optim.Lion(mine, lr=1e-2, weight_decay=0.1)
    moments = [torch.zeros_like(p) for p in theirs]
    for step in range(4):
        set_gradients(mine, theirs, seed=step)
        a.step()
        with torch.no_grad():
            for p, m in zip(theirs, moments, strict=True):
                p.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * torch.sign(0.9 * m + 0.1 * p.grad))
                m.mul_(0.99).add_(p.grad, alpha=0.01)
    assert_close(mine, theirs, 4)


def test_options_may_change_between_steps():
    mine, theirs, a, b = both("AdamW")
    for step in range(6):
        for optimizer in (a, b):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.param_groups[0]["maximize"] = step % 2 == 1
        set_gradients(mine, theirs, seed=step)
        a.step()
        b.step()
    assert_close(mine, theirs, 6)


def test_a_learning_rate_may_be_a_tensor_that_changes():
    rate = torch.tensor(1e-2, device=DEVICE)
    mine, theirs = weights(), weights()
    a, b = optim.AdamW(mine, lr=rate), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(3):
        set_gradients(mine, theirs, seed=step)
        rate.fill_(1e-2 * (step + 1))
        b.param_groups[0]["lr"] = float(rate)
        a.step()
        b.step()
    assert_close(mine, theirs, 3)


def test_a_scheduler_drives_it():
    mine, theirs, a, b = both("AdamW")
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 5) for o in (a, b)]
    for step in range(5):
        set_gradients(mine, theirs, seed=step)
        for optimizer, schedule in zip((a, b), schedules, strict=True):
            optimizer.step()
            schedule.step()
    assert_close(mine, theirs, 5)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def laid_out(layout):
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    if layout == "unaligned":
        return torch.nn.Parameter(torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x))
    if layout == "transposed":
        return torch.nn.Parameter(x.transpose(0, 2).contiguous().transpose(0, 2))
    if layout == "gaps":
        return torch.nn.Parameter(torch.stack([x, x], -1)[..., 0])
    return torch.nn.Parameter(x.clone())


@pytest.mark.parametrize("weight", ["contiguous", "unaligned", "transposed", "gaps"])
@pytest.mark.parametrize("gradient", ["contiguous", "unaligned", "transposed", "gaps", "expanded"])
def test_any_layout_of_weight_and_gradient(weight, gradient):
    p, q = laid_out(weight), laid_out("contiguous")
    a, b = optim.AdamW([p], lr=1e-1, zero_grads=True), torch.optim.AdamW([q], lr=1e-1)
    for _ in range(2):
        g = q.new_ones(6, 4, 1).expand(6, 4, 5) if gradient == "expanded" else laid_out(gradient).detach()
        p.grad, q.grad = g, g.clone(memory_format=torch.contiguous_format)
        a.step()
        b.step()
        assert not g.any()
    assert_close([p], [q], 2)
    assert p.stride() == laid_out(weight).stride()


def test_weights_that_move_are_found_again():
    mine, theirs, a, b = both("AdamW")
    for step in range(3):
        set_gradients(mine, theirs, seed=step)
        mine[0].data = mine[0].data.clone()
        a.step()
        b.step()
    assert_close(mine, theirs, 3)


def test_states_that_are_replaced_are_found_again():
    """As they are when somebody parks them in other memory between steps."""
    mine, theirs, a, b = both("AdamW")
    for step in range(4):
        set_gradients(mine, theirs, seed=step)
        a.step()
        b.step()
        for state in a.state.values():
            for name, value in state.items():
                state[name] = value.clone()
        if step == 1:
            a.state = {p: dict(state) for p, state in a.state.items()}
        if step == 2:
            a.state[mine[4]] = {name: value.clone() for name, value in a.state[mine[4]].items()}
    assert_close(mine, theirs, 4)
    assert {float(s["step"]) for s in a.state.values()} == {4.0}


def test_a_group_that_is_added_later():
    mine, theirs, a, b = both("AdamW")
    more = weights(((7,),), seed=5), weights(((7,),), seed=5)
    for step in range(3):
        if step == 1:
            for optimizer, extra in zip((a, b), more, strict=True):
                optimizer.add_param_group({"params": extra, "lr": 1e-3, "amsgrad": True})
        set_gradients([*mine, *more[0]], [*theirs, *more[1]], seed=step)
        a.step()
        b.step()
    assert_close([*mine, *more[0]], [*theirs, *more[1]], 3)


# ---- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), [(n, {}) for n in PAIRS] + MATRIX)
def test_state_goes_to_pytorch_and_back(name, options):
    mine, theirs, a, b = both(name, **options)
    for step in range(6):
        set_gradients(mine, theirs, seed=step)
        a.step()
        b.step()
        if step == 2:  # each goes on from the other's state
            saved = copy.deepcopy((a.state_dict(), b.state_dict()))
            a.load_state_dict(saved[1])
            b.load_state_dict(saved[0])
    assert_close(mine, theirs, 6)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("capturable", [False, True])
def test_a_state_dict_looks_as_pytorchs(name, capturable):
    options = {"capturable": True} if capturable and name != "SGD" else {}
    mine, theirs = weights(), weights()
    a = getattr(optim, name)(mine, **PAIRS[name], **options)
    b = getattr(torch.optim, name)(theirs, **PAIRS[name], **({} if DEVICE == "cpu" else options))
    set_gradients(mine, theirs)
    a.step()
    b.step()
    ours, torchs = a.state_dict(), b.state_dict()
    assert ours["state"].keys() == torchs["state"].keys()
    assert set(torchs["param_groups"][0]) <= set(ours["param_groups"][0])
    for i, state in torchs["state"].items():
        assert type(ours["state"][i]) is dict and ours["state"][i].keys() == state.keys()
        for key, value in state.items():
            got = ours["state"][i][key]
            assert (got.shape, got.dtype) == (value.shape, value.dtype)
            assert got.device.type == (DEVICE if capturable or key != "step" else "cpu")


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("AdamW", {"amsgrad": True}, torch.float32),
        ("SGD", {"dampening": 0.1}, torch.float32),
        ("AdamW", {"state_dtype": torch.float32}, torch.float16),
        ("AdamW", {"rounding": "stochastic", "state_dtype": torch.float32, "seed": 4}, torch.bfloat16),
        ("AdamW", {"rounding": "split", "state_dtype": torch.float32}, torch.bfloat16),
        ("Lion", {"lr": 1e-2}, torch.float32),
    ],
)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(name, options, dtype):
    def made():
        mine = weights(dtype=dtype)
        return mine, getattr(optim, name)(mine, **{**PAIRS.get(name, {}), **options})

    (mine, a), (resumed, _) = made(), made()
    for step in range(3):
        set_gradients(mine, seed=step)
        a.step()
    file = io.BytesIO()
    torch.save({"optimizer": a.state_dict(), "weights": [p.detach() for p in mine]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = [torch.nn.Parameter(p) for p in saved["weights"]]
    b = getattr(optim, name)(resumed, **{**PAIRS.get(name, {}), **options})
    b.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        set_gradients(mine, resumed, seed=step)
        a.step()
        b.step()
    for p, q in zip(mine, resumed, strict=True):
        assert p.equal(q)


def test_a_copied_optimizer_goes_its_own_way():
    mine, theirs, a, b = both("AdamW")
    set_gradients(mine, theirs)
    a.step()
    b.step()
    twin = copy.deepcopy(a)
    copies = twin.param_groups[0]["params"]
    set_gradients(mine, theirs, copies, seed=1)
    twin.step()
    a.step()
    b.step()
    assert_close(mine, theirs, 2)
    assert_close(copies, theirs, 2)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("AdamW", {"lr": -1.0}, "Invalid learning rate: -1.0"),
        ("AdamW", {"lr": math.nan}, "Invalid learning rate: nan"),
        ("AdamW", {"lr": torch.ones(2)}, "1-element"),
        ("AdamW", {"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ("AdamW", {"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ("AdamW", {"betas": (0.9, math.nan)}, "Invalid beta parameter at index 1: nan"),
        ("Adam", {"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ("SGD", {"momentum": -0.5}, "Invalid momentum value: -0.5"),
        ("SGD", {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        ("Lion", {"betas": (0.9, 2.0)}, "Invalid beta parameter at index 1: 2.0"),
        ("AdamW", {"rounding": "up"}, "expected nearest, stochastic, split"),
        ("AdamW", {"rounding": "split"}, r"for torch.bfloat16 weights; a parameter is torch.float32"),
        ("AdamW", {"state_dtype": torch.float16}, "expected None or torch.float32"),
        ("AdamW", {"max_norm": 0.0}, "Invalid max_norm: 0.0"),
    ],
)
def test_options_out_of_range_are_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        getattr(optim, name)(weights(), **options)
    own = {k: v for k, v in options.items() if k != "max_norm"}
    if own:
        with pytest.raises(ValueError, match=words):
            getattr(optim, name)([{"params": weights(), **own}])


def test_parameters_are_each_there_once():
    p, q = weights(((3,), (4,)))
    with pytest.raises(ValueError, match="duplicate parameters"):
        optim.AdamW([p, q, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optim.AdamW([{"params": [p]}, {"params": [q, p]}])
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.AdamW([])
    with pytest.raises(TypeError):
        optim.AdamW(p)


def test_sparse_gradients_are_refused():
    (p,) = weights(((4, 3),))
    a = optim.AdamW([p])
    p.grad = torch.eye(4, 3, device=DEVICE).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        a.step()


def test_states_of_another_shape_are_refused():
    mine, theirs, _, b = both("AdamW", ((3,), (4,)))
    set_gradients(mine, theirs)
    b.step()
    saved = b.state_dict()
    other = optim.AdamW(weights(((3,), (5,))))
    with pytest.raises(ValueError, match=r"'exp_avg' of shape \(4,\) for parameter 1; expected \(5,\)"):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match="doesn't match the size"):
        optim.AdamW(weights(((3,),))).load_state_dict(saved)


def test_a_parameter_without_a_gradient_is_left_alone():
    mine, theirs, a, b = both("AdamW")
    set_gradients(mine, theirs)
    mine[4].grad = theirs[4].grad = None
    before = mine[4].detach().clone()
    a.step()
    b.step()
    assert mine[4].equal(before) and not a.state_dict()["state"].get(4)
    a.zero_grad()
    a.step()  # none at all
    assert_close(mine, theirs, 1)


def test_closures_and_hooks_are_called():
    (p,) = weights(((3,),))
    a = optim.SGD([p], lr=1e-1)
    called = []
    a.register_step_pre_hook(lambda *_: called.append("before"))
    a.register_step_post_hook(lambda *_: called.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        a.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        called.append("closure")
        return loss

    first = a.step(closure)
    assert a.step(closure).item() < first.item()
    assert called == ["before", "closure", "after"] * 2


# ---- fused into the step ---------------------------------------------------------------------------------------------


def other_device():
    """A parameter that PyTorch steps, beside those of the engine."""
    return torch.nn.Parameter(torch.arange(3, dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize("scale", [0.01, 10.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_clipping_equals_pytorchs_two_calls(scale, mixed):
    mine, theirs = weights(), weights()
    if mixed:
        mine, theirs = [*mine, other_device()], [*theirs, other_device()]
    a, b = optim.AdamW(mine, lr=1e-2, max_norm=1.0), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(3):
        set_gradients(mine, theirs, seed=step, scale=scale)
        want = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        a.step()
        b.step()
        torch.testing.assert_close(float(a.grad_norm), float(want), rtol=1e-6, atol=0)
    assert_close(mine, theirs, 3)


def test_the_norm_is_the_same_bits_every_time():
    mine, twins = weights(), weights()
    a, b = optim.SGD(mine, max_norm=1.0), optim.SGD(twins, max_norm=1.0)
    set_gradients(mine, twins)
    a.step()
    b.step()
    assert a.grad_norm.equal(b.grad_norm)


def test_there_is_no_norm_unless_asked_for():
    with pytest.raises(RuntimeError, match="max_norm or skip_nonfinite"):
        _ = optim.AdamW(weights()).grad_norm


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(value, mixed):
    mine, theirs = weights(), weights()
    if mixed:
        mine, theirs = [*mine, other_device()], [*theirs, other_device()]
    a, b = optim.AdamW(mine, skip_nonfinite=True, zero_grads=True), torch.optim.AdamW(theirs)
    for step in range(4):
        set_gradients(mine, theirs, seed=step)
        if step == 2:
            mine[4].grad[-1] = value
            a.step()
            assert not any(p.grad.any() for p in mine[:6])
            continue
        a.step()
        b.step()
    assert_close(mine, theirs, 3)
    assert a.skipped_steps == 1
    assert float(a.state[mine[0]]["step"]) == 3


def test_without_the_option_what_is_not_finite_goes_where_pytorchs_goes():
    mine, theirs, a, b = both("AdamW")
    set_gradients(mine, theirs)
    for p in (mine[4], theirs[4]):
        p.grad[0], p.grad[1] = math.nan, math.inf
    a.step()
    b.step()
    torch.testing.assert_close(mine[4], theirs[4], equal_nan=True, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_gradient_scaler_leaves_unscaling_and_skipping_to_the_step(mixed):
    """Called as ``torch.amp.GradScaler.step`` calls a fused optimizer."""
    mine, theirs = weights(), weights()
    if mixed:
        mine, theirs = [*mine, other_device()], [*theirs, other_device()]
    a, b = optim.AdamW(mine), torch.optim.AdamW(theirs)
    for step in range(3):
        set_gradients(mine, theirs, seed=step)
        for p in mine:
            p.grad = p.grad * 1024
        a.grad_scale = torch.full((1,), 1024.0, device=DEVICE)
        a.found_inf = torch.full((1,), float(step == 1), device=DEVICE)
        a.step()
        if step != 1:
            b.step()
        del a.grad_scale, a.found_inf
    assert_close(mine, theirs, 2)
    assert a.skipped_steps == 1


@pytest.mark.gpu
def test_the_scaler_itself():
    mine, theirs, a, b = both("AdamW")
    scalers = [torch.amp.GradScaler("cuda", init_scale=256.0) for _ in range(2)]
    for step in range(4):
        for params, optimizer, scaler in zip((mine, theirs), (a, b), scalers, strict=True):
            optimizer.zero_grad()
            loss = sum((p * math.inf if step == 2 else p.square()).sum() for p in params if p.numel())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_close(mine, theirs, 3)


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


def test_states_of_fp32_beside_weights_of_16_bits():
    mine, exact = weights(dtype=torch.float16), weights()
    for p, q in zip(mine, exact, strict=True):
        q.data = p.detach().float()
    a, b = optim.AdamW(mine, lr=1e-2, state_dtype=torch.float32), torch.optim.AdamW(exact, lr=1e-2)
    set_gradients(mine)
    for p, q in zip(mine, exact, strict=True):
        q.grad = p.grad.float()
    a.step()
    b.step()
    for p, q in zip(mine, exact, strict=True):
        assert a.state[p]["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(a.state[p]["exp_avg_sq"], b.state[q]["exp_avg_sq"], rtol=1e-6, atol=0)
        torch.testing.assert_close(p.float(), q, rtol=2**-10, atol=1e-7)


def test_gradients_of_another_dtype_than_the_weight():
    """As PyTorch allows with ``grad_dtype``; from one step to the next it may change."""
    p = weights(((2100,),), torch.float16)[0]
    p.grad_dtype = None
    want = p.detach().float()
    a = optim.SGD([p], lr=2.0**-3)
    for dtype in (torch.float32, torch.float16, torch.float32):
        p.grad = torch.full_like(p, 0.5, dtype=dtype)
        a.step()
        want -= 2.0**-4
    torch.testing.assert_close(p.detach().float(), want, rtol=2**-10, atol=2**-11)


def masters(p, state):
    bits = p.detach().view(torch.int16).int().bitwise_left_shift(16) + state["lower_bits"].int()
    return bits.view(torch.float32)


def test_split_weights_are_fp32_weights():
    """16 bits beside each bf16 weight make a run equal to one in fp32; the weight is the master, rounded."""
    mine, exact = weights(dtype=torch.bfloat16), weights()
    for p, q in zip(mine, exact, strict=True):
        q.data = p.detach().float()
    a = optim.AdamW(mine, lr=1e-3, rounding="split", state_dtype=torch.float32)
    b = torch.optim.AdamW(exact, lr=1e-3)
    for step in range(20):
        set_gradients(mine, seed=step)
        for p, q in zip(mine, exact, strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(mine, exact, strict=True):
        master = masters(p, a.state[p])
        assert_close([master], [q], 20)
        assert p.equal(master.bfloat16())


def test_stochastic_rounding_keeps_the_expectation():
    """Steps of a twentieth of the distance between neighbours: to nearest they are all lost."""
    n, steps = 4096, 10
    p = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device=DEVICE))
    q = torch.nn.Parameter(p.detach().clone())
    a = optim.SGD([p], lr=2**-7 / 20, rounding="stochastic", seed=3)
    b = optim.SGD([q], lr=2**-8 / 20)
    for _ in range(steps):
        for w in (p, q):
            w.grad = -torch.ones_like(w)
        a.step()
        b.step()
    expected = 1 + steps * 2**-7 / 20
    spread = 2**-7 * math.sqrt(steps * 0.05 * 0.95 / n)
    assert abs(float(p.detach().double().mean()) - expected) < 5 * spread
    if DEVICE == "cuda":  # the interpreter's conversion truncates
        assert bool((q == 1).all())
    assert len(p.unique()) >= 2


def test_stochastic_rounding_differs_between_steps_tensors_and_seeds():
    def run(seed, steps=1):
        ps = weights(((64,), (64,)), torch.bfloat16)
        for p in ps:
            p.data.fill_(1.0)
        a = optim.SGD(ps, lr=2**-8, rounding="stochastic", seed=seed)
        for _ in range(steps):
            for p in ps:
                p.data.fill_(1.0)
                p.grad = -torch.ones_like(p)
            a.step()
        return [p.detach() for p in ps]

    first = run(1)
    assert all(p.equal(q) for p, q in zip(first, run(1), strict=True))
    assert not first[0].equal(first[1])
    assert not first[0].equal(run(2)[0])
    assert not first[0].equal(run(1, 2)[0])


def test_nan_survives_every_rounding():
    for rounding in ("stochastic", "split"):
        p = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16, device=DEVICE))
        a = optim.SGD([p], rounding=rounding)
        p.grad = torch.full_like(p, math.nan)
        a.step()
        assert bool(p.isnan().all())


# ---- an optimizer of one's own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_readmes_optimizer(tmp_path, dtype):
    """The example as it is printed; float64 goes its PyTorch way."""
    text = (ROOT / "src/weft/operators/optimizer/README.md").read_text()
    code = text.partition("<!-- example: signum -->")[2].partition("<!-- end -->")[0].partition("```python")[2]
    file = tmp_path / "signum.py"
    file.write_text(code.partition("```")[0])
    spec = importlib.util.spec_from_file_location("signum", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mine, theirs = weights(dtype=dtype), weights(dtype=dtype)
    a = module.Signum(mine, lr=1e-2, weight_decay=0.1, max_norm=100.0, maximize=True)
    buffers = [torch.zeros_like(p) for p in theirs]
    for step in range(4):
        set_gradients(mine, theirs, seed=step)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 100.0)
        a.step()
        torch.testing.assert_close(float(a.grad_norm), float(norm), rtol=1e-6, atol=0)
        with torch.no_grad():
            for p, b in zip(theirs, buffers, strict=True):
                b.mul_(0.9).sub_(p.grad, alpha=0.1)
                p.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * b.sign())
    assert_close(mine, theirs, 4)
    with pytest.raises(TypeError, match="unknown option 'nesterov'"):
        module.Signum(mine, nesterov=True)


# ---- steps in backward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_mib", [0.0, 2e-5, 100.0])
def test_steps_in_backward_equal_steps_after_it(bucket_mib):
    g = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).to(DEVICE)
    twin = copy.deepcopy(model)
    unused = weights(((5,),))
    a = optim.AdamW([*model.parameters(), *unused], lr=1e-2)
    b = torch.optim.AdamW([*twin.parameters()], lr=1e-2)
    overlap = a.overlap_with_backward(bucket_mib)
    for step in range(5):
        if step == 4:
            overlap.remove()
        x = torch.randn(8, 4, generator=g).to(DEVICE)
        for net in (model, twin):
            net(x).square().mean().backward()
        if step in (1, 2, 3) and bucket_mib == 0.0:
            assert all(p.grad is None for p in model.parameters())
        for optimizer in (a, b):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(list(model.parameters()), list(twin.parameters()), 60)


def test_steps_in_backward_refuse_what_needs_all_gradients():
    with pytest.raises(ValueError, match="all gradients at once"):
        optim.AdamW(weights(), max_norm=1.0).overlap_with_backward()
    mine = weights()
    a = optim.AdamW(mine)
    a.overlap_with_backward()
    a.grad_scale = torch.ones(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="all gradients at once"):
        a.step()


# ---- other paths -----------------------------------------------------------------------------------------------------

ON_CPU = """
import copy, torch
from weft import optim
for name in ("Adam", "AdamW", "SGD"):
    for options in ({}, {"maximize": True, "weight_decay": 0.1}, {"fused": True}):
        mine, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 50)] for _ in range(2))
        extra = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
        a = getattr(optim, name)(mine, lr=0.1, **options, **extra)
        b = getattr(torch.optim, name)(theirs, lr=0.1, **options, **extra)
        for step in range(4):
            for p, q in zip(mine, theirs):
                p.grad = torch.cos(p.detach() * (step + 1)); q.grad = p.grad.clone()
            a.step(); b.step()
            if step == 1:
                saved = copy.deepcopy((a.state_dict(), b.state_dict()))
                a.load_state_dict(saved[1]); b.load_state_dict(saved[0])
        assert all(p.equal(q) for p, q in zip(mine, theirs)), (name, options)
optim.Lion(mine).step()
"""


def test_the_example_runs():
    done = python("-W", "error", str(ROOT / "examples" / "optimizer_against_torch.py"))
    assert done.returncode == 0, done.stderr
    assert "after 10 steps the weights are" in done.stdout


def test_parameters_on_the_cpu_are_stepped_by_pytorch():
    done = python("-W", "error", "-c", ON_CPU)
    assert done.returncode == 0, done.stderr


def test_a_differentiable_step_is_pytorchs():
    p = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    q = p.clone()
    a = optim.SGD([q], lr=0.1, differentiable=True)
    q.grad = p * 2
    a.step()
    q.sum().backward()
    torch.testing.assert_close(p.grad, torch.full_like(p, 0.8))


def test_importing_weft_imports_no_pytorch():
    done = python("-c", "import sys, weft; assert 'torch' not in sys.modules; from weft.optim import AdamW")
    assert done.returncode == 0, done.stderr


def test_shards_of_a_dtensor_are_stepped_where_they_lie(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        whole = torch.randn(6, 4, device=DEVICE)
        p = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
        q = torch.nn.Parameter(whole.clone())
        a, b = optim.AdamW([p], lr=1e-2), torch.optim.AdamW([q], lr=1e-2)
        for step in range(3):
            q.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            p.grad = distribute_tensor(q.grad.clone(), mesh, [Shard(0)])
            a.step()
            b.step()
        assert isinstance(a.state[p]["exp_avg"], DTensor)
        with pytest.raises(RuntimeError, match="a parameter is sharded"):
            clipped = optim.AdamW([p], max_norm=1.0)
            clipped.step()
        assert_close([p.to_local()], [q], 3)
    finally:
        dist.destroy_process_group()


COMPILED = """
import torch
from weft.bench.compile_check import resource_usage
from weft.definition import SHARED_LIMIT
from weft.operators.launch import compiling_for
from weft.operators.optimizer.adam_rule import ADAM
from weft.operators.optimizer.table import Entry, Table

options = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
def entry(dtype, kept, rounding, amsgrad=False):
    one = lambda d: torch.empty(5000, dtype=d, device="meta")
    states = [one(kept)] * (3 if amsgrad else 2) + [one(torch.int16)] * (rounding == "split")
    return Entry(one(dtype), tuple(states), one(torch.float32), {**options, "amsgrad": amsgrad}, 0, rounding, dtype)

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
kinds = [
    [entry(fp32, fp32, "nearest", True), entry(fp16, fp16, "nearest"), entry(bf16, bf16, "nearest")],
    [entry(bf16, fp32, "split"), entry(bf16, bf16, "stochastic")],
]
flags = {"scale": torch.ones(1), "found": torch.ones(1), "max_norm": 1.0, "guarded": True, "zeroed": True}
for sm in (80, 86, 89, 90, 100, 120):
    for entries in kinds:
        made = []
        with compiling_for(sm, lambda *kernel: made.append(kernel)):
            table = Table(ADAM, entries)
            table.set_group(0, options, 1.0)
            table.launch(**flags)
        assert [name for name, *_ in made] == ["gradient_norm", "update"]
        for name, cubin, shared, threads in made:
            usage = resource_usage(cubin)
            assert usage["STACK"] == 0 and usage["REG"] * threads <= 65536 and shared <= SHARED_LIMIT[sm], (sm, usage)
"""


def test_every_kind_compiles_for_every_architecture():
    done = python("-c", COMPILED)
    assert done.returncode == 0, done.stderr


def test_more_states_than_a_row_holds_are_refused():
    from weft.operators.optimizer.adam_rule import ADAM

    p = torch.zeros(3, device=DEVICE)
    options = {"lr": 1.0, "betas": (0.9, 0.9), "eps": 0.0, "weight_decay": 0.0, "amsgrad": False}
    with pytest.raises(ValueError, match="keeps 6 states of a weight; expected at most 5"):
        Table(ADAM, [Entry(p, (p,) * 6, p, options)])


# ---- what only a GPU shows -------------------------------------------------------------------------------------------


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
    for p, q in zip(mine, theirs, strict=True):
        assert p.equal(q)


@pytest.mark.gpu
def test_a_first_step_cannot_be_captured():
    mine = weights()
    set_gradients(mine)
    a = optim.AdamW(mine)
    with pytest.raises(RuntimeError, match="call it once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        a.step()


@pytest.mark.gpu
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

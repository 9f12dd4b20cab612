"""What goes into the optimizers' step: clipping, skipping, unscaling, rounding, steps in backward, rules of one's own."""

import copy
import importlib.util
import math

import pytest
import torch
from optimizer_samples import assert_close, both, random_step, set_gradients, weights
from where import DEVICE, ROOT

from weft import optim

pytestmark = pytest.mark.device


@pytest.fixture(params=[False, True], ids=["", "mixed"])
def pair(request):
    """Twice the same parameters; mixed, with one that PyTorch steps beside those of the engine."""
    other = [torch.arange(3, dtype=torch.float64, device=DEVICE)] * request.param
    return [[*weights(), *map(torch.nn.Parameter, (t.clone() for t in other))] for _ in range(2)]


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_clipping_equals_pytorchs_two_calls(scale, pair):
    mine, theirs = pair
    a, b = optim.AdamW(mine, lr=1e-2, max_norm=1.0), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(3):
        set_gradients(mine, theirs, seed=step, scale=scale)
        want = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        a.step()
        b.step()
        torch.testing.assert_close(float(a.grad_norm), float(want), rtol=1e-6, atol=0)
    assert_close(mine, theirs, 3)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_clipping_alone_skips_no_step(value, pair):
    """Of an infinite norm PyTorch's factor is 0, of one that is NaN it is NaN."""
    mine, theirs = pair
    a, b = optim.AdamW(mine, lr=1e-2, max_norm=1.0), torch.optim.AdamW(theirs, lr=1e-2)
    set_gradients(mine, theirs)
    mine[0].grad[1] = theirs[0].grad[1] = value
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    a.step()
    b.step()
    assert a.skipped_steps == 0
    for p, q in zip(mine, theirs, strict=True):
        assert p.isnan().equal(q.isnan())


def test_the_norm_is_the_same_bits_every_time():
    mine, twins = weights(), weights()
    a, b = optim.SGD(mine, max_norm=1.0), optim.SGD(twins, max_norm=1.0)
    random_step(a, b)
    assert a.grad_norm.equal(b.grad_norm)


def test_programs_that_take_several_chunks_measure_all_of_them():
    mine = weights([(5,), (3 * 8192 + 7,), (0,), (8192,), (1,)] * 9)
    for p in mine[3:30]:
        p.data = p.data.bfloat16()
    a = optim.SGD(mine, max_norm=1.0, skip_nonfinite=True)
    random_step(a)
    (part,) = a._parts
    assert DEVICE != "cpu" or 3 * part.table.parts < 8 * 9, "no program takes a third chunk"
    squares = sum(p.grad.double().square().sum() for p in mine)
    torch.testing.assert_close(float(a.grad_norm), float(squares.sqrt()), rtol=1e-6, atol=0)
    for at in (0, -1):
        set_gradients(mine, seed=at)
        mine[at].grad[-1] = math.nan
        a.step()
    assert a.skipped_steps == 2


def test_there_is_no_norm_unless_asked_for():
    with pytest.raises(RuntimeError, match="max_norm or skip_nonfinite"):
        _ = optim.AdamW(weights()).grad_norm


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(value, pair):
    mine, theirs = pair
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
    assert a.skipped_steps == 1 and float(a.state[mine[0]]["step"]) == 3


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "AdamW8bit"])
@pytest.mark.parametrize("kind", ["engine", "float64", "strided"])
def test_a_step_that_is_skipped_sets_gradients_to_0_all_the_same(name, kind):
    """Else what is not finite stays where gradients are added to it, and no step is ever done again."""
    p = torch.nn.Parameter(torch.ones(6, dtype=torch.float64 if kind == "float64" else torch.float32, device=DEVICE))
    if kind == "strided":
        p = torch.nn.Parameter(torch.ones(6, 2, device=DEVICE)[:, 0])
    a = getattr(optim, name)([p], lr=0.5, skip_nonfinite=True, zero_grads=True)
    for scale in (math.nan, 1.0):
        before = p.detach().clone()
        (p * scale).sum().backward()
        a.step()
        assert p.equal(before) == math.isnan(scale) and not p.grad.any()
    assert a.skipped_steps == 1


def test_without_the_option_what_is_not_finite_goes_where_pytorchs_goes():
    mine, theirs, a, b = both("AdamW")
    set_gradients(mine, theirs)
    for p in (mine[4], theirs[4]):
        p.grad[0], p.grad[1] = math.nan, math.inf
    a.step()
    b.step()
    torch.testing.assert_close(mine[4], theirs[4], equal_nan=True, rtol=0, atol=1e-6)


def test_a_gradient_scaler_leaves_unscaling_and_skipping_to_the_step(pair):
    """Called as ``torch.amp.GradScaler.step`` calls a fused optimizer."""
    mine, theirs = pair
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


@pytest.fixture(params=["engine", "pytorch"])
def way(request, monkeypatch):
    """Parameters that the engine does not take, those on a CPU say, go by PyTorch's functions on fp32 copies."""
    if request.param == "pytorch":
        monkeypatch.setattr("weft.optim.optimizer.supported", lambda p, group: False)
    return request.param


def test_split_weights_are_fp32_weights(way):
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


def test_stochastic_rounding_keeps_the_expectation(way):
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


def test_stochastic_rounding_differs_between_steps_tensors_and_seeds(way):
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
    assert all(p.equal(q) for p, q in zip(first, run(1), strict=True)) and not first[0].equal(first[1])
    assert not first[0].equal(run(2)[0]) and not first[0].equal(run(1, 2)[0])


def test_nan_survives_every_rounding(way):
    for rounding in ("stochastic", "split"):
        p = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16, device=DEVICE))
        a = optim.SGD([p], rounding=rounding)
        p.grad = torch.full_like(p, math.nan)
        a.step()
        assert bool(p.isnan().all())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "AdamW8bit"])
@pytest.mark.parametrize("options", [{"rounding": "split"}, {"state_dtype": torch.float32}], ids=str)
def test_pytorchs_way_keeps_the_engines_states(monkeypatch, name, options):
    """16-bit weights on a CPU: what a checkpoint has does not depend on who made the step."""
    extra = {"momentum": 0.9} if name == "SGD" else {"min_8bit_size": 0} if name == "AdamW8bit" else {}
    states = []
    for taken in (None, lambda p, group: False):
        if taken:
            monkeypatch.setattr("weft.optim.optimizer.supported", taken)
        mine = weights(((90, 3), (5,)), torch.bfloat16)
        a = getattr(optim, name)(mine, lr=1e-2, **extra, **options)
        made, prepare = [], a._prepare
        monkeypatch.setattr(a, "_prepare", lambda made=made, prepare=prepare: (made.append(1), prepare()))
        for step in range(4):
            random_step(a, seed=step)
        assert len(made) <= 2, "tables are not made anew at each step"
        states.append((mine, [a.state[p] for p in mine]))
    for p, q, s, t in zip(states[0][0], states[1][0], states[0][1], states[1][1], strict=True):
        allowed = 2**-7 if "rounding" in options else 4 * 2**-7  # the interpreter's conversion truncates, at each step
        assert float((p.detach().float() - q.detach().float()).abs().max()) <= allowed * float(p.detach().abs().max())
        assert {n: x.dtype for n, x in s.items()} == {n: x.dtype for n, x in t.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_optimizer_of_the_examples(dtype):
    """float64 goes its PyTorch way."""
    spec = importlib.util.spec_from_file_location("signum", ROOT / "examples/signum.py")
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
    for mib in (-1, math.nan, "a", None):
        with pytest.raises(ValueError, match=f"'bucket_mib' is {mib!r}; expected MiB, 0 or more"):
            optim.AdamW(weights()).overlap_with_backward(mib)
    a = optim.AdamW(weights())
    a.overlap_with_backward()
    a.grad_scale = torch.ones(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="all gradients at once"):
        a.step()

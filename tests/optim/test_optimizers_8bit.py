"""Moments in 8 bits: ``Adam8bit`` and ``AdamW8bit`` on the GPU where there is one, else interpreted."""

import copy
import math

import optimizer_samples
import pytest
import torch
from optimizer_samples import IN_8_BITS, random_step, set_gradients
from where import DEVICE

from weft import ops, optim, registry
from weft.definition import workload
from weft.operators.optimizer import blockwise
from weft.operators.optimizer.adamw_8bit import reference

pytestmark = pytest.mark.device

SHAPES = ((3, 5), (5000,), (70, 80), (0,))  # the second and the third are kept in 8 bits


def weights(dtype=torch.float32, shapes=SHAPES):
    return optimizer_samples.weights(shapes, dtype)


def exact(kind, params, options):
    """The operator's reference in a loop: what the optimizer has to do for tensors in 8 bits."""
    block, format = options.get("block_size", 256), options.get("state_format", "dynamic")
    n = [p.numel() for p in params]
    code = [torch.zeros_like(p, dtype=torch.uint8) for p in params for _ in range(2)]
    scale = [torch.zeros(blockwise.blocks_of(size, block), device=DEVICE) for size in n for _ in range(2)]
    for signed in (0, 1):
        for c, s in zip(code[signed::2], scale[signed::2], strict=True):
            blockwise.quantize(torch.zeros_like(c, dtype=torch.float32), c, s, block, signed == 0, format)
    steps = [torch.zeros((), device=DEVICE) for _ in params]
    kept = code[::2], scale[::2], code[1::2], scale[1::2]

    def step():
        seed = options.get("seed") if options.get("code_rounding") == "stochastic" else None
        grads = [p.grad for p in params]
        numbers = {"lr": 1e-2, "maximize": options.get("maximize", False), "block_size": block}
        reference([p.detach() for p in params], grads, *kept, steps, **numbers, state_format=format, seed=seed)

    return step, kept


@pytest.mark.parametrize("options", [o for o in IN_8_BITS if "amsgrad" not in o])
def test_steps_are_the_references(options):
    shapes = SHAPES[1:3]
    mine, theirs = weights(shapes=shapes), weights(shapes=shapes)
    a = optim.AdamW8bit(mine, lr=1e-2, **options)
    step, kept = exact(a, theirs, options)
    for seed in range(4):
        set_gradients(mine, theirs, seed=seed)
        a.step()
        step()
    for i, (p, q) in enumerate(zip(mine, theirs, strict=True)):
        # a code that falls on the other side of a boundary moves its weight by a part of a step, elsewhere weights are equal
        off = (p - q).detach().abs()
        assert float((off > 1e-6).float().mean()) < 0.002 and float(off.max()) < 1e-2
        assert float(((a.state[p]["exp_avg_codes"].int() - kept[0][i].int()).abs() > 0).float().mean()) < 0.003


@pytest.mark.share(2)
@pytest.mark.parametrize(("kind", "dtype"), [("AdamW", torch.float32), ("Adam", torch.float16)])
@pytest.mark.parametrize("options", IN_8_BITS)
def test_small_tensors_equal_pytorchs_and_large_ones_are_near(kind, options, dtype):
    mine, theirs = weights(dtype), [torch.nn.Parameter(p.detach().float()) for p in weights(dtype)]
    shared = {n: v for n, v in options.items() if n in ("amsgrad", "maximize")}
    a = getattr(optim, f"{kind}8bit")(mine, lr=1e-2, **options)
    b = getattr(torch.optim, kind)(theirs, lr=1e-2, **shared)
    for seed in range(4):
        set_gradients(mine, seed=seed)
        for p, q in zip(mine, theirs, strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mine[0].float(), theirs[0], rtol=4 * eps, atol=4 * eps)
    for p, q in zip(mine[1:3], theirs[1:3], strict=True):
        off = (p.float() - q).detach().abs()
        assert float(off.mean()) < 4e-4 + eps and float(off.max()) < 1e-2


def test_the_states_of_small_tensors_are_fp32():
    mine = weights(torch.float16)
    a = optim.AdamW8bit(mine)
    random_step(a)
    assert a.state[mine[0]]["exp_avg"].dtype == torch.float32
    state = a.state[mine[1]]
    assert "exp_avg" not in state and state["exp_avg_codes"].dtype == torch.uint8
    assert state["exp_avg_scales"].shape == (20,)


def test_state_comes_from_pytorch_and_goes_back():
    mine, theirs = weights(), weights()
    a, b = optim.AdamW8bit(mine, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    set_gradients(mine, theirs)
    b.step()
    a.load_state_dict(b.state_dict())
    for p, q in zip(mine, theirs, strict=True):
        p.data.copy_(q)
    random_step(a, b, seed=1)
    back = a.torch_state_dict()
    for i, p in enumerate(theirs[:3]):
        assert back["state"][i].keys() == b.state[p].keys()
        for name in ("exp_avg", "exp_avg_sq"):
            got, want = back["state"][i][name], b.state[p][name]
            assert float((got - want).abs().max()) <= 0.02 * float(want.abs().max())
    b.load_state_dict(back)
    set_gradients(theirs, seed=2)
    b.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the engine's way, PyTorch's
def test_an_optimizer_of_32_bits_takes_moments_and_no_codes(dtype):
    mine, theirs = weights(dtype=dtype), weights(dtype=dtype)
    a, b = optim.AdamW8bit(mine), optim.AdamW(theirs)
    set_gradients(mine, theirs)
    a.step()
    if dtype == torch.float32:  # which is kept in 8 bits
        with pytest.raises(ValueError, match=r"'exp_avg_codes' is a moment in 8 bits; expected .*torch_state_dict"):
            b.load_state_dict(a.state_dict())
    b.load_state_dict(a.torch_state_dict())
    set_gradients(mine, theirs, seed=1)
    b.step()
    assert "state_format" not in b.param_groups[0] and all("exp_avg" in b.state[p] for p in theirs)


def test_a_limit_that_changes_moves_states_over():
    mine = weights()
    a = optim.AdamW8bit(mine)
    for limit, coded in ((4096, True), (10**6, False), (0, True)):
        a.param_groups[0]["min_8bit_size"] = limit
        random_step(a, seed=limit)
        assert ("exp_avg_codes" in a.state[mine[1]], "exp_avg" in a.state[mine[1]]) == (coded, not coded)
    assert "exp_avg_codes" in a.state[mine[0]]


def test_a_transposed_weight():
    mine = [torch.nn.Parameter(torch.randn(70, 80, device=DEVICE).t())]
    theirs = [torch.nn.Parameter(mine[0].detach().t().contiguous())]
    a, b = optim.AdamW8bit(mine), optim.AdamW8bit(theirs)
    for _ in range(2):
        mine[0].grad = torch.randn(80, 70, device=DEVICE)
        theirs[0].grad = mine[0].grad.t().contiguous()
        a.step()
        b.step()
    assert mine[0].t().equal(theirs[0])


def test_clipping_skipping_and_the_scaler():
    mine, theirs = weights(), weights()
    a, b = optim.AdamW8bit(mine, max_norm=1.0, skip_nonfinite=True), optim.AdamW8bit(theirs)
    for seed in range(3):
        set_gradients(mine, theirs, seed=seed)
        a.grad_scale = torch.full((1,), 8.0, device=DEVICE)
        for p in mine:
            p.grad *= 8
        if seed == 1:
            mine[1].grad[7] = math.nan
            before = copy.deepcopy(a.state_dict()["state"][1])
        else:
            torch.nn.utils.clip_grad_norm_(theirs, 1.0)
            b.step()
        a.step()
        if seed == 1:
            assert all(torch.equal(v, before[n]) for n, v in a.state_dict()["state"][1].items())
    assert a.skipped_steps == 1
    for p, q in zip(mine, theirs, strict=True):
        assert float((p - q).detach().abs().gt(1e-5).float().mean() if p.numel() else 0) < 0.002


def stepped():
    """An optimizer after one step, of a parameter in 8 bits whose gradient is there."""
    (p,) = mine = [torch.nn.Parameter(torch.ones(64, 80, device=DEVICE))]
    set_gradients(mine)
    a = optim.AdamW8bit(mine)
    a.step()
    return p, a


def refuses_to_step(p, a, words):
    """At every step, and no weight is changed."""
    before = p.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            a.step()
    assert p.equal(before)


@pytest.mark.parametrize("limit", [4096, 10**6])
def test_another_block_size_than_the_states_is_refused(limit):
    """128 has twice the scales that there are."""
    p, a = stepped()
    a.param_groups[0].update(block_size=128, min_8bit_size=limit)
    words = "'exp_avg_scales' has 20 blocks for 5120 elements; expected 40, of 128 elements each"
    refuses_to_step(p, a, words)
    with pytest.raises(ValueError, match=words):
        a.torch_state_dict()
    a.param_groups[0].update(block_size=256, min_8bit_size=4096)
    a.step()
    assert a.state[p]["step"] == 2


@pytest.mark.parametrize("scales", [(3,), (), (20, 1)])
def test_loaded_scales_that_are_not_the_blocks_are_not_stepped_with(scales):
    p, a = stepped()
    saved = a.state_dict()
    saved["state"][0]["exp_avg_sq_scales"] = torch.ones(scales)
    a.load_state_dict(saved)
    refuses_to_step(p, a, "'exp_avg_sq_scales' has .* for 5120 elements; expected 20, of 256")


def test_scales_that_were_left_on_another_device_or_in_another_dtype_are_brought_over():
    p, a = stepped()
    q, b = stepped()
    state = a.state[p]
    state["exp_avg_scales"] = state["exp_avg_scales"].double().cpu()
    state["exp_avg_sq_scales"] = torch.stack([state["exp_avg_sq_scales"]] * 2, 1)[:, 0]
    a.step()
    b.step()
    assert p.equal(q)


@pytest.mark.parametrize("loaded", [False, True])
def test_another_format_than_the_states_is_refused(loaded):
    p, a = stepped()
    if loaded:
        a.load_state_dict(copy.deepcopy(a.state_dict()))
    a.param_groups[0]["state_format"] = "fp8"
    words = "state_format is 'fp8', and the state .* has codes of 'dynamic'; expected 'dynamic'"
    refuses_to_step(p, a, words)
    with pytest.raises(ValueError, match=words):
        a.torch_state_dict()
    a.param_groups[0]["min_8bit_size"] = 10**6  # to moments, by the wrong map
    refuses_to_step(p, a, words)
    a.state.clear()
    a.step()
    assert bool(p.isfinite().all())


def test_the_format_of_what_is_loaded_is_its_own():
    p, a = stepped()
    _, b = stepped()
    b.state.clear()
    b.param_groups[0]["state_format"] = "fp8"
    b.step()
    a.load_state_dict(b.state_dict())
    a.step()
    assert a.param_groups[0]["state_format"] == "fp8" and bool(p.isfinite().all())


def test_codes_of_fp8_are_judged_by_what_they_stand_for():
    """Both zeros are one, and neighbours of codes are neighbours of numbers."""
    ranks = registry.get("adamw_8bit").tolerance_of("forward").ranks
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 127) < 127]
    values, places = finite.view(torch.float8_e4m3fn).float(), ranks(workload(T=1, P=1, format="fp8"), finite)
    assert places[finite == 0] == places[finite == 128] == 0
    assert values[places.argsort()].diff().ge(0).all() and places.unique().diff().eq(1).all()
    assert torch.equal(ranks(workload(T=1, P=1), codes), codes)


def test_the_operator_says_what_is_wrong():
    p, g = torch.zeros(300, device=DEVICE), torch.zeros(300, device=DEVICE)
    code, scale, step = p.to(torch.uint8), torch.zeros(2, device=DEVICE), torch.zeros((), device=DEVICE)
    ops.adamw_8bit([p], [g], [code], [scale], [code.clone()], [scale.clone()], [step])
    with pytest.raises(ValueError, match=r"'exp_avg_scales\[0\]' has shape \(2,\); expected \(3,\)"):
        ops.adamw_8bit([p], [g], [code], [scale], [code], [scale], [step], block_size=128)
    with pytest.raises(TypeError, match="exp_avg_codes"):
        ops.adamw_8bit([p], [g], [p], [scale], [code], [scale], [step])
    with pytest.raises(TypeError, match=r"'exp_avg_scales\[0\]' has dtype float64; expected float32"):
        ops.adamw_8bit([p], [g], [code], [scale.double()], [code], [scale], [step])
    with pytest.raises(ValueError, match="expected dynamic or fp8"):
        ops.adamw_8bit([p], [g], [code], [scale], [code], [scale], [step], state_format="int8")


def test_parameters_that_share_memory_are_refused():
    memory = torch.zeros(10, device=DEVICE)
    apart = [torch.nn.Parameter(t) for t in (memory[:5], memory[5:5], memory[5:])]
    over = [torch.nn.Parameter(t) for t in (memory[:5], memory[4:])]
    set_gradients(apart)
    set_gradients(over)
    optim.AdamW(apart).step()
    with pytest.raises(ValueError, match=r"parameters 0 and 1 .*share memory"):
        optim.AdamW(over).step()

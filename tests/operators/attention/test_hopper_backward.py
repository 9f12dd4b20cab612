"""Attention's gradients on Hopper: what is chosen, what a block takes, and on a GPU right gradients in little memory."""

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE

from weft import ops
from weft.operators.attention import dispatch, hopper_backward
from weft.operators.attention.points import SCORES
from weft.operators.attention.reference import reference
from weft.operators.launch import compiling_for

BF16, FP16 = torch.bfloat16, torch.float16


def chosen(d=64, dv=None, dtype=BF16, sm=90, rows=100, do=None, **call):
    q, k, v = (torch.empty(2, h, rows, n, dtype=dtype, device="meta") for h, n in ((4, d), (2, d), (2, dv or d)))
    given = {n: call.pop(n) for n in ("mask", "bias", "sinks", "alibi") if n in call}
    window, scale, cap, score = (call.pop(n, None) for n in ("window", "scale", "softcap", "score"))
    made = dispatch.options(
        tuple(given), call.pop("causal", False), window, scale, cap, score, call.pop("dropout", 0.0), **call
    )
    o = torch.empty(2, 4, rows, v.shape[-1], dtype=dtype, device="meta")
    arguments = (q, k, v, o, o if do is None else do(o), *given.values(), made)
    with compiling_for(sm, lambda *kernel: None):
        declined = dispatch.BACKWARD.routes[0].why_not(dispatch.GradientCall(*arguments))
        return dispatch.BACKWARD.choose(*arguments).implementation, declined


TAKEN = [{}, {"d": 128, "dtype": FP16}, {"causal": True}, {"window": (3, 5)}, {"scale": 2.0}, {"rows": 1},
         {"sinks": torch.empty(4, device="meta")}]  # fmt: skip


@pytest.mark.parametrize("call", TAKEN, ids=str)
def test_hopper_takes_what_it_can(call):
    assert chosen(**call) == ("hopper", "")


DECLINED = [
    ({"sm": 80}, "needs sm_90"), ({"sm": 100}, "sm_100"), ({"dtype": torch.float32}, "float32; it takes 16-bit floats"),
    ({"d": 96}, "head dims 96 and 96; it takes 64 and 128"), ({"d": 128, "dv": 64}, "head dims 128 and 64"),
    ({"softcap": 3.0}, "a soft cap"), ({"scale": -1.0}, "a scale of at most 0"), ({"dropout": 0.5}, "dropout"),
    ({"score": SCORES["near"]}, "a score"), ({"alibi": torch.empty(4, device="meta")}, "alibi; it takes causal"),
    ({"mask": torch.empty(100, dtype=torch.bool, device="meta")}, "mask; it takes causal"),
    ({"bias": torch.empty(1, 1, 1, 100, dtype=BF16, device="meta")}, "bias; it takes causal"),
    ({"do": lambda o: o[:1, :1, :1, :1].expand_as(o)}, "'do' has no contiguous dimension"),
    ({"do": lambda o: torch.empty(2, 4, 100, 68, dtype=BF16, device="meta")[..., :64]}, "do not begin on 16 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "reason"), DECLINED, ids=[reason for _, reason in DECLINED])
def test_what_it_declines_triton_takes(call, reason):
    name, declined = chosen(**call)
    assert name == "triton" and reason in declined


def test_deterministic_gradients_are_those_of_triton():
    assert chosen(deterministic=True) == ("triton", "")
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen() == ("triton", "")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("d", [64, 128])
def test_a_block_fits(d):
    assert 192 * 1024 < hopper_backward.shared_bytes(d) <= 227 * 1024


def gradients(function, tensors, do, dlse, **call):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    o, lse = function(*leaves, return_lse=True, **call)
    outputs = (o, lse) if dlse is not None else (o,)
    return torch.autograd.grad(outputs, leaves, (do, dlse)[: len(outputs)])


CALLS = [{"causal": True}, {"window": (100, 3)}, {"causal": True, "scale": 0.3}, {}]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (64, 129), (333, 300), (1025, 1025), (257, 700)])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_are_as_near_to_float64s_as_tritons(dtype, d, s, t, call):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel of sm_90")
    random = torch.Generator(DEVICE).manual_seed(s)
    q, k, v, do = (
        torch.randn(2, n, h, d, generator=random, device=DEVICE).to(dtype).transpose(1, 2)
        for n, h in ((s, 6), (t, 2), (t, 2), (s, 6))
    )
    dlse = torch.randn(2, 6, s, generator=random, device=DEVICE)
    assert ops.explain("attention", q, k, v, direction="backward", **call).implementation == "hopper"
    mine = gradients(ops.attention, (q, k, v), do, dlse, **call)
    tritons, again = (gradients(ops.attention, (q, k, v), do, dlse, deterministic=True, **call) for _ in range(2))
    exact = gradients(reference, [x.double() for x in (q, k, v)], do.double(), dlse.double(), **call)
    for x, other, same, want in zip(mine, tritons, again, exact, strict=True):
        assert other.equal(same)
        error, usual = (float((y.double() - want).norm()) for y in (x, other))
        assert error <= 1.1 * usual + 1e-3 * torch.finfo(dtype).eps * want.numel() ** 0.5


@pytest.mark.gpu
def test_memory_beside_the_results_is_an_fp32_dq():
    q, k, v, do = (torch.randn(1, 4, 8192, 64, device="cuda", dtype=BF16) for _ in range(4))
    for t in (q, k, v):
        t.requires_grad_()
    o = ops.attention(q, k, v, causal=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o.backward(do)
    rows = 4 * 8192 * 4 * 3  # statistics
    assert torch.cuda.max_memory_allocated() - before < 5 * q.nbytes + rows + 2**20


REFUSED = [
    bad("attention", TypeError, "'deterministic' is 1; True or False", *(torch.randn(1, 2, 5, 16, device=DEVICE),) * 3,
        deterministic=1),
]  # fmt: skip

"""GroupNorm where what is asked of every operator does not reach: shapes with and without space, strides, its neighbours among
the norms, the order of tasks, what is refused."""

import pytest
import torch
from refused import EITHER, bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import random
from where import DEVICE, DTYPES

from weft import ops, registry
from weft.definition import torch_dtype
from weft.operators.normalization.group_norm import dispatch

pytestmark = pytest.mark.device


def gradients(function, x, groups, weight, bias, dy):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], groups, *leaves[1:])
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((3, 6), 1), ((3, 6, 5), 3), ((2, 6, 4, 5), 6), ((2, 6, 2, 3, 4), 1), ((1, 6, 1, 1), 3), ((2, 6, 9, 40), 3)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_pytorchs_for_any_spatial_dimensions(shape, groups, dtype):
    shapes, kind = (shape, shape, (6,), (6,)), torch_dtype(dtype)
    x, dy, weight, bias = (random(*s, seed=i, dtype=kind) for i, s in enumerate(shapes))
    apart = 3 * torch.arange(6, device=DEVICE).view(6, *(1,) * (len(shape) - 2))
    x = (x + apart).to(x.dtype)  # groups of two elements that happen to be alike would magnify every rounding
    got = gradients(ops.group_norm, x, groups, weight, bias, dy)
    want = gradients(torch.group_norm, *(t.double() if t is not groups else t for t in (x, groups, weight, bias, dy)))
    eps = torch.finfo(x.dtype).eps
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == x.dtype
        scale = max(float(b.abs().max()), float(dy.abs().max()))
        torch.testing.assert_close(a.double(), b, rtol=0, atol=(4 * eps + 2e-5) * scale)


@pytest.mark.parametrize("space", [7, 200])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
def test_weights_in_fp32_beside_a_narrow_tensor(space, weight_dtype):
    x, dy = (random(2, 6, space, seed=i, dtype=torch.float16) for i in (0, 1))
    weight, bias = (random(6, seed=i, dtype=weight_dtype) for i in (2, 3))
    got = gradients(ops.group_norm, x, 2, weight, bias, dy)
    want = gradients(torch.group_norm, x.double(), 2, weight.double(), bias.double(), dy.double())
    assert [t.dtype for t in got] == [x.dtype, x.dtype, weight_dtype, weight_dtype]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=2e-3 * float(b.abs().max()))


@pytest.mark.parametrize("space", [12, 160])
def test_one_group_is_layer_norm_and_one_channel_instance_norm(space):
    x, weight, bias = random(3, 4, space), random(4, seed=1), random(4, seed=2)
    rows = ops.layer_norm(x.flatten(1)).view(x.shape)
    torch.testing.assert_close(ops.group_norm(x, 1), rows, rtol=1e-5, atol=1e-5)
    instance = torch.nn.functional.instance_norm(x, weight=weight, bias=bias)
    torch.testing.assert_close(ops.group_norm(x, 4, weight, bias), instance, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("space", [(3, 7), (18, 16)])
def test_groups_have_mean_0_and_variance_1(space):
    x = random(2, 6, *space) * 3 + 20
    y = ops.group_norm(x, 3, eps=0.0).view(2, 3, -1).double()
    torch.testing.assert_close(y.mean(-1), torch.zeros_like(y[..., 0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones_like(y[..., 0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("space", [(3, 7), (18, 16)])
def test_a_group_knows_nothing_of_the_others(space):
    x, weight, bias = random(2, 6, *space), random(6, seed=1), random(6, seed=2)
    whole = ops.group_norm(x, 3, weight, bias)
    for b in range(2):
        for g in range(3):
            of = slice(2 * g, 2 * g + 2)
            alone = ops.group_norm(x[b : b + 1, of], 1, weight[of], bias[of])
            torch.testing.assert_close(whole[b : b + 1, of], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(5, 4), (12, 15)])
def test_channels_last_is_read_in_place_and_stays(size):
    x, weight, bias = random(2, 8, *size), random(8, seed=1), random(8, seed=2)
    last = x.to(memory_format=torch.channels_last)
    assert ops.explain("group_norm", last, 2).implementation == "triton"
    y = ops.group_norm(last, 2, weight, bias)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, ops.group_norm(x, 2, weight, bias), rtol=1e-5, atol=1e-5)
    dy = random(2, 8, *size, seed=3)
    want = gradients(torch.group_norm, x, 2, weight, bias, dy)
    for of_dy in (dy, dy.to(memory_format=torch.channels_last), dy[:, :1, :1, :1].expand(x.shape)):
        got = gradients(ops.group_norm, last, 2, weight, bias, of_dy)
        if of_dy.stride(1):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_slice_without_one_stride_is_handed_over_with_a_reason():
    x = random(2, 4, 6, 8)
    for of_x in (x[..., :5], x.expand(2, 4, 6, 8)[:, :, ::2]):
        explained = ops.explain("group_norm", of_x, 2)
        assert explained.implementation == "torch" and "copy" in explained.reason
        torch.testing.assert_close(ops.group_norm(of_x, 2), torch.group_norm(of_x, 2), rtol=1e-5, atol=1e-5)
    batches, wanted = x[:, :2], ops.group_norm(x[:, :2].contiguous(), 2)  # one stride each: no copy
    assert ops.explain("group_norm", batches, 2).implementation != "torch"
    assert ops.group_norm(batches, 2).equal(wanted)


def test_a_gradient_without_one_stride_is_taken():
    x = random(2, 4, 6, 5).requires_grad_()
    dy = random(2, 4, 6, 8, seed=1)[..., :5]
    (got,) = torch.autograd.grad(ops.group_norm(x, 2), x, dy)
    (want,) = torch.autograd.grad(torch.group_norm(x, 2), x, dy)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("space", [30, 300])
def test_far_from_0_and_with_one_wild_element(space):
    """The first element is the wild one: sums about it would lose the others."""
    x = random(2, 4, space) + 1000
    x[0, 0, 0] = 1e6
    got, want = ops.group_norm(x, 2), torch.group_norm(x.double(), 2)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-4)
    torch.testing.assert_close(got[1, 0].double(), want[1, 0], rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize("space", [30, 300])
def test_constant_groups_give_the_bias(space):
    x = torch.full((2, 4, space), 7.0, device=DEVICE).requires_grad_()
    bias = random(4, seed=1)
    y = ops.group_norm(x, 2, random(4, seed=2), bias)
    torch.testing.assert_close(y, bias[:, None].expand_as(y), rtol=1e-4, atol=1e-4)
    assert bool(torch.autograd.grad(y.sum(), x)[0].isfinite().all())


def test_zeros_are_told_from_nothing():
    """The sums that parts publish may be 0; a word of 0 says that there are none yet."""
    x = torch.zeros(1, 2, 900, device=DEVICE).requires_grad_()
    y = ops.group_norm(x, 1)
    (dx,) = torch.autograd.grad(y, x, torch.zeros_like(y))
    assert not bool(y.any()) and not bool(dx.any())


@pytest.mark.parametrize("shape", [(1, 1, 2**20 + 7), (8, 320, 4096), (2, 3000, 50), (1, 4, 2**26), (1, 2**14, 1000)])
def test_parts_cover_a_group_and_are_few_enough(shape):
    x = torch.empty(shape, device="meta")
    v = dispatch.view_of(x)
    g = dispatch.Groups(x, 1, dispatch.forward_configuration, 64)
    t = g.tile
    span_c, span_s = t["CHANNELS"] * t["WALK_C"], t["SPACE"] * t["WALK_S"]
    parts, parts_s = g.split
    assert parts_s == -(-v.S // span_s) and parts == parts_s * -(-v.C // span_c) <= t["MOST"] <= 2048
    assert g.numbers[1] >= parts and g.tasks == parts * v.B


X, W = random(2, 6, 5), random(6, seed=1)
REFUSED = [
    bad("group_norm", EITHER, "'x' has shape (5,); expected [B, C, ...]", X[0, 0], 1),
    bad("group_norm", EITHER, "'x' has dtype int64", X.long(), 1),
    bad(
        "group_norm", EITHER, "'num_groups' is 4; expected a positive divisor of 6, the channels of 'x' (2, 6, 5)", X, 4
    ),
    bad("group_norm", EITHER, "'num_groups' is 0", X, 0),
    bad("group_norm", EITHER, "'num_groups' is -2", X, -2),
    bad("group_norm", EITHER, "'num_groups' is 2.0; expected an int", X, 2.0),
    bad("group_norm", EITHER, "'num_groups' is True; expected an int", X, True),
    bad("group_norm", EITHER, "'num_groups' is [2]; expected an int", X, [2]),
    bad("group_norm", EITHER, "'weight' has shape (5,); expected (6,)", X, 2, W[:5]),
    bad("group_norm", EITHER, "'weight' has shape (1, 6); expected (6,)", X, 2, W[None]),
    bad("group_norm", EITHER, "'weight' is a float", X, 2, 1.0),
    bad("group_norm", EITHER, "'weight' has dtype float16; expected float32", X, 2, W.half()),
    bad("group_norm", EITHER, "'bias' has dtype float16 and 'weight' has float32", X.half(), 2, W, W.half()),
    bad("group_norm", EITHER, "'bias' has shape (3,)", X, 2, W, W[:3]),
    bad("group_norm", EITHER, "'weight' is on meta", X, 2, W.to("meta")),
    bad("group_norm", EITHER, "'eps' is -1.0", X, 2, W, W, -1.0),
    bad("group_norm", EITHER, "'eps' is nan", X, 2, W, W, float("nan")),
    bad("group_norm", EITHER, "'eps' is None", X, 2, W, W, None),
]


def test_gradients_of_a_bias_alone_and_of_nothing():
    x, bias = random(2, 6, 5), random(6, seed=1).requires_grad_()
    dy = random(2, 6, 5, seed=2)
    torch.testing.assert_close(torch.autograd.grad(ops.group_norm(x, 2, None, bias), bias, dy)[0], dy.sum((0, 2)))
    for shape in ((0, 6, 5), (2, 6, 0)):
        weight = random(6).requires_grad_()
        y = ops.group_norm(torch.empty(shape, device=DEVICE), 3, weight, bias)
        assert y.shape == shape
        assert not any(bool(g.any()) for g in torch.autograd.grad(y.sum(), (weight, bias)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 320, 64, 64), (4, 64, 16, 16), (1, 32, 600, 601)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_reads_the_narrow_tensor_and_writes_fp32(shape, dtype):
    x, dy = random(*shape, dtype=dtype), random(*shape, seed=1)
    weight, bias = random(shape[1], seed=2), random(shape[1], seed=3)
    with torch.autocast("cuda", dtype):
        got = gradients(ops.group_norm, x, 32, weight, bias, dy)
        want = gradients(torch.nn.functional.group_norm, x, 32, weight, bias, dy)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3 * float(b.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 320, 64, 64), (1, 128, 512, 512), (3, 64, 200, 333), (2, 2, 3000, 1000)])
def test_parts_find_each_other_every_time(shape):
    """Tasks wait for each other: many runs, all alike."""
    x = random(*shape, dtype=torch.bfloat16).requires_grad_()
    weight = random(shape[1], seed=1, dtype=torch.bfloat16).requires_grad_()
    dy = random(*shape, seed=2, dtype=torch.bfloat16)
    made = registry.get("group_norm").find("triton").function
    first = None
    for _ in range(50):
        y = made(x, 2, weight)
        found = [y, *torch.autograd.grad(y, (x, weight), dy)]
        first = first or found
        assert all(a.equal(b) for a, b in zip(found, first, strict=True))

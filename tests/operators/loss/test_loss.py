"""Cross entropy and the embedding, where what is asked of every operator does not reach: gradients that are handed out once,
labels out of range, in-place gradients."""

import functools

import pytest
import torch
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from where import DEVICE, printed

from weft import ops
from weft.operators.embedding import dispatch as gathering
from weft.operators.embedding import embedding
from weft.operators.loss import dispatch, kernels, reference

pytestmark = pytest.mark.device
NAMES = ("cross_entropy", "cross_entropy_with_gradient")


@pytest.fixture(params=["one program", "rows"])
def either_kernel(request, monkeypatch):
    """What few logits take, and what more take."""
    dispatch.FORWARD.known.clear()
    if request.param == "rows":
        monkeypatch.setattr(kernels, "SINGLE_MOST", 0)
    yield
    dispatch.FORWARD.known.clear()


def drawn(m=9, v=40, dtype=torch.float32):
    g = torch.Generator(DEVICE).manual_seed(3)
    logits = torch.randn(m, v, generator=g, device=DEVICE).to(dtype)
    return logits, torch.randint(0, v, (m,), generator=g, device=DEVICE)


def expected(logits, target, factor=1.0, **options):
    leaf = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, target, **options)
    return torch.autograd.grad(loss * factor, leaf)[0]


@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [1.0, -0.25])
def test_the_gradient_follows_what_the_loss_is_multiplied_by(dtype, inplace, reduction, factor):
    logits, target = drawn(dtype=dtype)
    want = expected(logits, target, factor, reduction=reduction)
    leaf = logits.clone().requires_grad_()
    loss = ops.cross_entropy(leaf, target, reduction=reduction, inplace_backward=inplace)
    (got,) = torch.autograd.grad(loss * factor, leaf)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-6 if dtype == torch.float32 else 2e-4)
    assert (got.data_ptr() == leaf.data_ptr()) is inplace


@pytest.mark.usefixtures("either_kernel")
def test_a_retained_graph_gives_its_gradient_again_though_the_first_was_changed():
    logits, target = drawn()
    leaf = logits.clone().requires_grad_()
    loss = ops.cross_entropy(leaf, target)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = first.clone()
    first.zero_()  # as an optimizer may
    (second,) = torch.autograd.grad(2 * loss, leaf)
    torch.testing.assert_close(second, 2 * kept)


@pytest.mark.usefixtures("either_kernel")
def test_an_in_place_gradient_is_given_once():
    logits, target = drawn()
    leaf = logits.clone().requires_grad_()
    loss = ops.cross_entropy(leaf, target, inplace_backward=True)
    torch.autograd.grad(loss, leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward after inplace_backward"):
        torch.autograd.grad(loss, leaf)


@pytest.mark.usefixtures("either_kernel")
def test_who_saved_the_logits_hears_that_they_were_overwritten():
    x, target = drawn()
    x.requires_grad_()
    logits = torch.tanh(x)  # its gradient needs its result
    loss = ops.cross_entropy(logits, target, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_in_place_gradient_needs_a_place_for_each_element():
    logits, target = drawn()
    wide = logits[:1].expand(9, 40).requires_grad_()
    words = r"inplace_backward=True and argument 'logits' of shape \(9, 40\) with strides"
    with pytest.raises(ValueError, match=words):
        ops.cross_entropy(wide, target, inplace_backward=True)


@pytest.mark.parametrize("label", [40, -1, 2**40])
def test_a_label_out_of_range_is_named_or_makes_its_row_nan(label):
    logits, target = drawn()
    target[5] = label
    with pytest.raises(ValueError, match=rf"has {label} at \(5,\) .*expected 0 … 39"):
        ops.cross_entropy(logits, target, check_labels=True)
    with pytest.raises(ValueError, match="cross_entropy_with_gradient: argument 'target' has "):
        ops.cross_entropy_with_gradient(logits, target, check_labels=True)
    weight = torch.rand(40, device=DEVICE)
    for options in ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"weight": weight, "label_smoothing": 0.1}):
        loss, gradient = ops.cross_entropy_with_gradient(logits, target, reduction="none", **options)
        others = torch.arange(9, device=DEVICE) != 5
        assert loss[5].isnan() and loss[others].isfinite().all()
        assert gradient[5].isnan().all() and gradient[others].isfinite().all()
    assert ops.cross_entropy(logits, target).isnan()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "soft_cap": 5.0}, {"weight": 40}])
@pytest.mark.parametrize("label", [40, -1, 2**40])
def test_a_formula_makes_the_row_of_such_a_label_nan_too(label, options):
    """Both of them: the one that autograd differentiates, and the gradient's own."""
    logits, target = drawn()
    target[5], target[2] = label, -100
    if "weight" in options:
        options = {"weight": torch.rand(options["weight"], device=DEVICE)}
    leaf = logits.clone().requires_grad_()
    losses = reference.reference(leaf, target, reduction="none", **options)
    (by_autograd,) = torch.autograd.grad(losses.sum(), leaf)
    (by_formula,) = reference.gradient(torch.ones_like(losses), logits, target, reduction="none", **options)
    others = torch.arange(9, device=DEVICE) != 5
    assert losses[5].isnan() and losses[others].isfinite().all()
    for dx in (by_autograd, by_formula):
        assert dx[5].isnan().all() and dx[others].isfinite().all()
    assert reference.reference(logits, target, **options).isnan()


def test_of_no_classes_every_label_is_out_of_range():
    logits, target = torch.zeros(2, 0, device=DEVICE), torch.tensor([-100, 0], device=DEVICE)
    losses = ops.cross_entropy(logits, target, reduction="none")
    assert losses[0] == 0 and losses[1].isnan() and ops.cross_entropy(logits, target, reduction="sum").isnan()


def test_a_label_beyond_its_dtype_may_be_the_ignored_one():
    logits, target = drawn()
    for ignored in (2**40, 2**32):  # which int32 would take for 0
        wanted = ops.cross_entropy(logits, target)
        assert ops.cross_entropy(logits, target.int(), ignore_index=ignored).equal(wanted)
        for t in (target, target.int()):
            torch.testing.assert_close(reference.reference(logits, t, ignore_index=ignored), wanted)
    target[5] = 49
    with pytest.raises(ValueError, match=r"has 49 at \(5,\)"):
        ops.cross_entropy(logits, target.int(), ignore_index=2**32 + 49, check_labels=True)


def test_the_logits_of_an_ignored_row_are_not_looked_at():
    logits, target = drawn()
    target[4] = -100
    logits[4] = torch.nan
    loss, gradient = ops.cross_entropy_with_gradient(logits, target)
    assert loss.isfinite() and (gradient[4] == 0).all() and gradient.isfinite().all()


@pytest.mark.parametrize("classes", [200, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
def test_rows_that_lie_side_by_side_give_what_a_copy_gives(classes, dtype, inplace):
    """In the layout of the logits; twice if the graph is retained; an ignored row is not looked at."""
    logits, target = drawn(70, classes, dtype)
    target[4], logits[4] = -100, torch.nan
    want = expected(logits[target >= 0], target[target >= 0], 2.0)
    leaf = logits.t().contiguous().t().requires_grad_()
    loss = ops.cross_entropy(leaf, target, inplace_backward=inplace)
    found = [torch.autograd.grad(loss * 2, leaf, retain_graph=not inplace)[0] for _ in range(2 - inplace)]
    for got in found:
        assert got.stride() == leaf.stride() and (got[4] == 0).all()
        torch.testing.assert_close(
            got[target >= 0].double(), want, rtol=2e-3, atol=1e-6 if dtype == torch.float32 else 2e-4
        )


def test_the_mean_over_no_label_is_nan_and_its_gradient_zero():
    logits, target = drawn()
    loss, gradient = ops.cross_entropy_with_gradient(logits, target.fill_(-100))
    assert loss.isnan() and (gradient == 0).all()


def test_many_rows_are_summed_in_several_parts():
    logits, target = drawn(40000, 3)
    target[::3] = -100
    got, _ = ops.cross_entropy_with_gradient(logits, target)
    want = torch.nn.functional.cross_entropy(logits.double(), target)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


wrong = functools.partial(bad, "cross_entropy", **dict(zip(("logits", "target"), drawn(), strict=True)))
OF_CLASS = torch.ones(40, device=DEVICE)
REFUSED = [
    wrong(TypeError, "'inplace_backward' is 'x'; expected True or False", inplace_backward="x"),
    wrong(TypeError, "'check_labels' is 2; expected True or False", check_labels=2),
    wrong(ValueError, f"'ignore_index' is {2**70}; expected an int of 64 bits", ignore_index=2**70),
    wrong(TypeError, "'ignore_index' is 0.5; expected an int", ignore_index=0.5),
    wrong(ValueError, "expected mean, sum, none", reduction="average"),
    wrong(ValueError, "expected 0 … 1", label_smoothing=1.5),
    wrong(ValueError, "expected a positive number", soft_cap=0.0),
    *(wrong(ValueError, "a positive number that fp32 can hold", soft_cap=cap) for cap in (1e300, 1e-46, 10**400)),
    wrong(ValueError, "expected a number of at least 0", z_loss=-1.0),
    wrong(ValueError, "a number of at least 0 that fp32 can hold", z_loss=10**400),
    wrong(ValueError, "one for each class", weight=OF_CLASS[:3]),
    *(bad(name, TypeError, "argument 'weight'", *drawn(), weight=[1.0] * 40) for name in NAMES),
    *(bad(name, ValueError, "argument 'weight' requires a gradient", *drawn(), weight=OF_CLASS.clone().requires_grad_())
      for name in NAMES),
    *(bad("embedding", TypeError, "'check_ids' is ; expected True or False", drawn()[1], OF_CLASS[:, None], check_ids=flag)
      for flag in (None, 0, 1, "no")),
]  # fmt: skip


@pytest.mark.share(2)
def test_a_gradient_on_a_cpu_is_summed_in_fp32_too():
    """In a process of its own: this one interprets."""
    program = """
import torch, weft
for dtype in (torch.bfloat16, torch.float16):
    table = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    weft.ops.embedding(torch.zeros(4000, dtype=torch.long), table).sum().backward()
    assert table.grad[0].item() == torch.tensor(4000.0).to(dtype).item(), table.grad
"""
    printed("-c", program)


@pytest.mark.parametrize("function", [ops.embedding, embedding.looked_up, embedding.reference])
def test_ids_out_of_range_are_named_or_give_nan_and_no_gradient(function):
    table = torch.randn(7, 5, device=DEVICE, requires_grad=True)
    ids = torch.tensor([[1, 9], [-1, 6]], device=DEVICE)
    with pytest.raises(ValueError, match=r"has 9 at \(0, 1\) \(2 such in all\); expected 0 … 6"):
        ops.embedding(ids, table, check_ids=True)
    out = function(ids, table)
    assert out[0, 1].isnan().all() and out[1, 0].isnan().all() and out[0, 0].equal(table[1])
    (gradient,) = torch.autograd.grad(out, table, torch.ones_like(out))
    assert gradient.sum(-1).tolist() == [0, 5, 0, 0, 0, 0, 5]
    assert function(ids, torch.zeros(0, 3, device=DEVICE)).isnan().all()  # a table of no rows


@pytest.mark.parametrize(("rows", "columns", "ids"), [(7, 300, 40), (16, 64, 33), (5, 1000, 100)])
def test_a_large_table_is_gathered_in_slices(rows, columns, ids, monkeypatch):
    monkeypatch.setattr(gathering.kernels, "SLICE_BYTES", 2**10)
    g = torch.Generator(DEVICE).manual_seed(4)
    table = torch.randn(rows, columns, generator=g, device=DEVICE)
    wanted = torch.randint(0, rows, (ids,), generator=g, device=DEVICE)
    plan, out = gathering.FORWARD.of((wanted, table), None), torch.full((ids, columns), float("nan"), device=DEVICE)
    assert plan.constants["SLICED"]
    plan(wanted, table, out)
    assert torch.equal(out, table[wanted])

"""Linear cross entropy, where what is asked of every operator does not reach: chunks and their memory, gradients that are
handed out once, labels out of range, sure rows."""

import functools

import pytest
import torch
import torch.nn.functional as F
from refused import bad, test_it_is_refused_in_words_that_help  # noqa: F401
from tensors import with_memory
from where import DEVICE, DTYPES

from weft import ops
from weft.definition import torch_dtype
from weft.operators.loss import dispatch, linear_chunks, linear_cross_entropy
from weft.operators.loss.dispatch import linear_call
from weft.operators.loss.linear_cross_entropy import _by_parts, reference

pytestmark = pytest.mark.device


def drawn(t=20, d=16, v=40, dtype=torch.float32, bias=False):
    g = torch.Generator(DEVICE).manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=DEVICE).to(dtype)

    target = torch.randint(0, v, (t,), generator=g, device=DEVICE)
    return normal(t, d), normal(v, d) / 4, target, normal(v) if bias else None


def of_pytorch(x, weight, target, bias=None, factor=1.0, **options):
    leaves = [a.detach().double().requires_grad_() for a in (x, weight, bias) if a is not None]
    loss = F.cross_entropy(F.linear(*leaves), target, **options)
    return loss, torch.autograd.grad((loss * factor).sum(), leaves)


@pytest.mark.parametrize(("t", "v", "size", "rows"), [
    (8192, 128256, 2, 4096),  # 1002 MiB
    (8192, 32000, 2, 8192),
    (4096, 256000, 2, 2048),
    (9000, 128256, 2, 3072),  # equal chunks rather than two full ones and a rest
    (100, 128256, 4, 100),
    (1000, 2**24, 4, 128),  # never less than a tile of a product
    (0, 100, 4, 1),
])  # fmt: skip
def test_the_plan_bounds_the_logits_in_memory(t, v, size, rows):
    assert dispatch.chunk_rows(t, v, size) == rows
    assert rows * v * size <= dispatch.CHUNK_BYTES or rows == dispatch.TILE_ROWS


def test_chunks_share_one_buffer_of_the_rows_asked_for():
    x, weight, target, _ = drawn(t=20)
    call = linear_call(x, weight, target, chunk_rows=8)
    seen = [(rows.start, rows.stop, logits.data_ptr(), len(logits)) for rows, logits in linear_chunks.chunks(call)]
    assert [(a, b, n) for a, b, _, n in seen] == [(0, 8, 8), (8, 16, 8), (16, 20, 4)]
    assert len({at for *_, at, _ in seen}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("reduction", "factor"), [("mean", 1.0), ("sum", -0.25), ("none", 0.5)])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("sizes", [(20, 16, 40), (20, 13, 37), (20, 16, 37), (20, 16, 5)])
def test_the_gradients_are_those_of_linear_and_cross_entropy(dtype, reduction, factor, chunk, sizes):
    x, weight, target, bias = drawn(*sizes, dtype=torch_dtype(dtype), bias=True)
    target[3] = -100
    leaves = [a.clone().requires_grad_() for a in (x, weight, bias)]
    want, gradients = of_pytorch(x, weight, target, bias, factor, reduction=reduction)
    loss = ops.linear_cross_entropy(*leaves[:2], target, bias=leaves[2], reduction=reduction, chunk_rows=chunk)
    got = torch.autograd.grad((loss * factor).sum(), leaves)
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype != "fp32" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(loss.double(), want, **near)
    for a, b in zip(got, gradients, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=near["rtol"], atol=near["atol"] * float(b.abs().max()))


@pytest.mark.parametrize("bias", [False, True])
def test_of_an_odd_vocabulary_only_the_last_classes_are_copied(bias):
    x, weight, target, bias = drawn(d=16, v=37, dtype=torch.bfloat16, bias=bias)
    call = linear_call(x, weight, target, bias=bias)
    assert linear_chunks.aligned(call) is call
    classes = linear_chunks.Classes(call)
    assert (
        classes.weight.data_ptr() == weight.data_ptr() and len(classes.weight) == 32 and classes.others.shape == (8, 16)
    )
    ((_, logits),) = linear_chunks.chunks(call)
    assert logits.shape == (20, 40) and bool((logits[:, 37:] == 0).all())
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(logits[:, :37].double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("chunk", [8, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_retained_graph_gives_its_gradients_again_though_the_first_were_changed(dtype, chunk):
    x, weight, target, _ = drawn(dtype=torch_dtype(dtype))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    loss = ops.linear_cross_entropy(*leaves, target, chunk_rows=chunk)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()  # as an optimizer may
    for again, before in zip(torch.autograd.grad(2 * loss, leaves), kept, strict=True):
        torch.testing.assert_close(again, 2 * before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_batch_of_gradients_reads_logits_that_the_first_overwrites(dtype):
    x, weight, target, _ = drawn(dtype=dtype, d=15, v=37)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    factors = torch.tensor([1.0, -2.0], device=DEVICE)
    losses = [ops.linear_cross_entropy(*leaves, target) for _ in range(2)]
    found = torch.autograd.grad(losses[0], leaves, factors, is_grads_batched=True)
    for both, one in zip(found, torch.autograd.grad(losses[1], leaves), strict=True):
        torch.testing.assert_close(both, torch.stack([one, -2 * one]), rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_row_that_is_sure_of_its_label_has_no_gradient(reduction):
    """Statistics of logits that were not rounded, put to rounded ones, would leave their difference: 6 % of a logit of 20."""
    x, weight, target, _ = drawn(t=4, v=3, dtype=torch.float16)
    x, weight = torch.full_like(x, 1.003).requires_grad_(), weight.zero_()
    weight[1] = 1.877
    loss = ops.linear_cross_entropy(x, weight, torch.ones_like(target), reduction=reduction)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert float(gradient.abs().max()) < 1e-6


@pytest.mark.parametrize("label", [40, -1, 2**40])
def test_a_label_out_of_range_is_named_or_makes_its_row_nan(label):
    x, weight, target, _ = drawn()
    target[5] = label
    with pytest.raises(ValueError, match=rf"linear_cross_entropy: .*has {label} at \(5,\) .*expected 0 … 39"):
        ops.linear_cross_entropy(x, weight, target, check_labels=True)
    others = torch.arange(20, device=DEVICE) != 5
    for options in ({}, {"label_smoothing": 0.1}, {"class_weight": torch.rand(40, device=DEVICE)}):
        alone = ops.linear_cross_entropy(x, weight, target, reduction="none", **options)
        options = {"reduction": "none", "chunk_rows": 8, **options}
        loss, dx, dweight, _ = ops.linear_cross_entropy_with_gradient(x, weight, target, **options)
        for found in (alone, loss):
            assert found[5].isnan() and found[others].isfinite().all()
        assert dx[5].isnan().all() and dx[others].isfinite().all() and dweight.isnan().all()
    assert ops.linear_cross_entropy(x, weight, target).isnan()


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_label_of_the_columns_that_fill_up_a_row_is_one_of_no_class(dtype, reduction):
    """37 classes are read as 40."""
    x, weight, target, _ = drawn(dtype=dtype, v=37)
    for label in (37, 39, 40):
        target[5] = label
        options = {"reduction": reduction, "chunk_rows": 8}
        loss, dx, dweight, _ = ops.linear_cross_entropy_with_gradient(x, weight, target, **options)
        assert loss.isnan().any() and dx[5].isnan().all() and dweight.isnan().all()
        others = torch.arange(20, device=DEVICE) != 5
        assert dx[others].isfinite().all() and (reduction == "mean" or loss[others].isfinite().all())
        ignored = ops.linear_cross_entropy_with_gradient(x, weight, target, ignore_index=label, **options)
        wanted, gradients = of_pytorch(x, weight, target.where(target != label, -100), reduction=reduction)
        torch.testing.assert_close(ignored[0].double(), wanted, rtol=2e-2, atol=2e-2)
        for got, want in zip(ignored[1:], gradients, strict=False):
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
        of_none = ops.linear_cross_entropy_with_gradient(x, weight, target, ignore_index=40, **options)
        assert of_none[1][5].isnan().all() == (label != 40)


@pytest.mark.parametrize(
    "options", [{"soft_cap": 2.0}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"class_weight": True}]
)
@pytest.mark.parametrize("wanted", ["loss", "gradient"])
def test_options_of_classes_that_are_no_multiple_of_8(options, wanted):
    x, weight, target, _ = drawn(dtype=torch.bfloat16, d=13, v=37)
    if "class_weight" in options:
        options = {"class_weight": torch.rand(37, device=DEVICE) + 0.5}
    leaves = [a.double().requires_grad_() for a in (x, weight)]
    of_all = reference(*leaves, target, **options)
    if wanted == "loss":
        got = ops.linear_cross_entropy(x, weight, target, **options)
        return torch.testing.assert_close(got.double(), of_all, rtol=1e-2, atol=1e-2)
    loss, dx, dweight, _ = ops.linear_cross_entropy_with_gradient(x, weight, target, chunk_rows=8, **options)
    torch.testing.assert_close(loss.double(), of_all, rtol=1e-2, atol=1e-2)
    for got, want in zip((dx, dweight), torch.autograd.grad(of_all, leaves), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


@pytest.mark.parametrize("rows", [8, 100])
def test_the_formula_makes_the_row_of_such_a_label_nan_too(monkeypatch, rows):
    """At once and by parts."""
    monkeypatch.setattr(linear_cross_entropy, "AT_ONCE", 40 * rows)
    x, weight, target, _ = drawn()
    target[5] = 40
    for of_class in (None, torch.rand(40, device=DEVICE)):
        losses = reference(x, weight, target, class_weight=of_class, reduction="none")
        assert losses[5].isnan() and losses[torch.arange(20, device=DEVICE) != 5].isfinite().all()
        assert reference(x, weight, target, class_weight=of_class).isnan()


def test_the_mean_over_no_label_is_nan_and_its_gradients_zero():
    x, weight, target, _ = drawn()
    loss, dx, dweight, _ = ops.linear_cross_entropy_with_gradient(x, weight, target.fill_(-100), chunk_rows=8)
    assert loss.isnan() and (dx == 0).all() and (dweight == 0).all()
    assert ops.linear_cross_entropy(x, weight, target).isnan()


def test_only_the_gradients_that_are_wanted_are_made(monkeypatch):
    made = []
    real = linear_chunks.Gradients.__init__

    def noted(self, call, wanted, *columns):
        made.append(wanted)
        real(self, call, wanted, *columns)

    monkeypatch.setattr(linear_chunks.Gradients, "__init__", noted)
    x, weight, target, bias = drawn(bias=True)
    ops.linear_cross_entropy(x, weight.requires_grad_(), target, bias=bias).backward()
    with torch.no_grad():
        ops.linear_cross_entropy(x, weight, target, bias=bias)
    assert made == [(False, True, False)]


def test_many_chunks_are_summed_in_fp32_and_few_in_the_weights_dtype():
    x, weight, target, _ = drawn(t=64, dtype=torch.float16)
    narrow, wide = torch.float16, torch.float32
    for chunk, asked, dtype in ((16, None, narrow), (15, None, wide), (32, wide, wide)):
        call = linear_call(x, weight, target, chunk_rows=chunk, accumulate=asked)
        assert linear_chunks.Gradients(call, (False, True, False)).dweight.dtype == dtype


def test_the_reference_by_parts_is_the_reference():
    x, weight, target, bias = (a.double() if a.is_floating_point() else a for a in drawn(bias=True))
    target[3] = -100
    of_class = torch.rand(40, device=DEVICE, dtype=torch.float64)
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1, "ignore_index": -100}
        leaf = weight.clone().requires_grad_()
        parts = _by_parts(x, leaf, target, bias, of_class, 6, **options)
        whole = reference(x, leaf, target, bias=bias, class_weight=of_class, **options)
        torch.testing.assert_close(parts, whole)
        torch.testing.assert_close(*(torch.autograd.grad(o.sum(), leaf) for o in (parts, whole)))


def test_it_says_how_it_makes_the_gradients():
    x, weight, target, _ = drawn(dtype=torch.float16)

    def reason(**options):
        return ops.explain("linear_cross_entropy", x, weight, target, **options).reason

    assert "no logit is written" in reason()
    x.requires_grad_()
    assert "until backward" in reason()
    assert "each row's factor" in reason(chunk_rows=8, reduction="none")
    assert "the loss scale" in reason(chunk_rows=8)
    x, weight, target, _ = drawn()
    assert "by cuBLAS" in reason()
    x.requires_grad_()
    assert "with the loss" in reason(chunk_rows=8)


X, WEIGHT, TARGET, _ = drawn()
wrong = functools.partial(bad, "linear_cross_entropy", x=X, weight=WEIGHT, target=TARGET)
REFUSED = [
    wrong(ValueError, "'x' and 'weight' have shapes; expected", weight=torch.ones(40, 15, device=DEVICE)),
    wrong(
        ValueError, "'target' has shape; a label for each row", target=torch.ones(3, dtype=torch.int64, device=DEVICE)
    ),
    wrong(ValueError, "'bias' has shape; one for each class", bias=torch.ones(3, device=DEVICE)),
    wrong(ValueError, "'class_weight' has shape; one for each class", class_weight=torch.ones(3, device=DEVICE)),
    wrong(ValueError, "'chunk_rows' is 0; expected a number of tokens", chunk_rows=0),
    wrong(ValueError, "'accumulate' is torch.float16; expected torch.float32 or None", accumulate=torch.float16),
    wrong(ValueError, "expected 0 … 1", label_smoothing=1.5),
]


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [512, None])
def test_memory_is_the_results_and_one_chunk(chunk):
    x, weight, target, _ = drawn(8192, 1024, 128256, torch.bfloat16)
    rows = chunk or 4096
    for accumulate in (torch.bfloat16, torch.float32):
        options = {"chunk_rows": chunk, "accumulate": accumulate}
        call = functools.partial(ops.linear_cross_entropy_with_gradient, x, weight, target, **options)
        call()  # workspaces
        out, taken = with_memory(call)
        results = sum(a.nbytes for a in out if a is not None)
        summed = 0 if accumulate == torch.bfloat16 else 4 * weight.numel()
        allowed = results + summed + rows * 128256 * 2 + 2**23
        assert taken <= allowed


@pytest.mark.gpu
def test_the_loss_alone_takes_no_logits():
    x, weight, target, _ = drawn(8192, 1024, 128256, torch.bfloat16)
    ops.linear_cross_entropy(x, weight, target)
    assert with_memory(lambda: ops.linear_cross_entropy(x, weight, target))[1] <= 2**24  # two GiB of logits

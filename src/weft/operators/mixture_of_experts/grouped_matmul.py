"""``grouped_matmul(x, w, offsets)``: each group of rows of x times its own matrix, the product of a mixture of experts."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.autograd import is_batched
from weft.operators.call import Choice, cast_for_products, eager, guarded, on_gpu, traced, transformed
from weft.operators.checks import check_same, check_shape
from weft.operators.elementwise.swiglu import torch_swiglu
from weft.operators.mixture_of_experts import dispatch, kernels
from weft.operators.mixture_of_experts import reference as shared
from weft.operators.mixture_of_experts.dispatch import GROUPED, GROUPED_WEIGHT_GRADIENT, ProductCall, token_sums
from weft.operators.random_inputs import LAYOUTS, random_tensor

ACTIVATIONS = ("swiglu",)
reference = shared.grouped_product

_bounds: Any = WeakIdKeyDictionary()


def bounds_of(offsets: Tensor) -> list[int]:
    """The offsets on the host, cached until they are written to, so that this peer is not timed for waiting."""
    known = _bounds.get(offsets)
    if known is None or known[0] != offsets._version:
        known = _bounds[offsets] = offsets._version, offsets.tolist()
    return known[1]


def cublas_product(rows: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.mm`` (``addmm`` with a bias) of each group, group sizes known beforehand."""
    return shared.of_each_group(rows, w, bounds_of(offsets), bias)


def torch_product(rows: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's grouped product in one launch (sizes on the device)."""
    if not hasattr(torch, "_grouped_mm"):
        raise Declined("this PyTorch has no torch._grouped_mm")
    if bias is not None:
        raise Declined("torch._grouped_mm takes no bias")
    if rows.shape[1] % 8 or w.shape[1] % 8:
        raise Declined("torch._grouped_mm takes rows of multiples of 16 bytes")
    return torch._grouped_mm(rows, w.transpose(1, 2), offs=offsets[1:])


cublas_loop, torch_grouped_mm = (
    shared.around(product, lambda y: torch_swiglu(*y.chunk(2, -1))) for product in (cublas_product, torch_product)
)

# ---- PyTorch operators -----------------------------------------------------------------------------------------------
#
# ``kernel``: the implementation, forward and backward; None for the tables' choice.


def products(
    x: Tensor, w: Tensor, offsets: Tensor, source: Tensor | None, position: Tensor | None, bias: Tensor | None,
    gate: bool, keep: bool, kernel: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and with ``keep`` gate and up [R, 2N] (else an empty tensor, and a gradient computes them again)."""
    if not on_gpu(x):
        pre = reference(x, w, offsets, source, position, bias)
        return shared.gated(pre) if gate else pre, pre.clone() if keep else x.new_empty(0)
    r = (x if source is None else source).shape[0]
    n = w.shape[1] // 2 if gate else w.shape[1]
    y = torch.empty((r, n), dtype=x.dtype, device=x.device)
    pre = torch.empty((r, 2 * n) if keep else (0,), dtype=x.dtype, device=x.device)
    if y.numel():
        operands = (x, w) if bias is None else (x, w, bias)
        plans = GROUPED if kernel is None else GROUPED.kernel(kernel)
        plan = plans.of(operands, r, source is not None, gate, keep)
        plan(x, w, offsets, x if source is None else source, x if bias is None else bias, y, pre if keep else y)
    return y, pre


grouped_matmul_op: Any = torch.library.triton_op("weft::grouped_matmul", products, mutates_args=())


@torch.library.triton_op("weft::grouped_outer", mutates_args=())
def grouped_outer_op(
    a: Tensor, b: Tensor, offsets: Tensor, a_source: Tensor | None, b_source: Tensor | None, kernel: str | None
) -> Tensor:
    """c [E, P, Q]: c[e] = a_eᵀ · b_e."""
    if not on_gpu(a):
        return shared.grouped_outer(a, b, offsets, a_source, b_source)
    e = offsets.shape[0] - 1
    r = (a if a_source is None else a_source).shape[0]
    c = torch.empty((e, a.shape[1], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        sizes = offsets[1:] - offsets[:-1]
        order = torch.sort(sizes, descending=True).indices  # large groups first, so that none runs alone at the end
        plans = GROUPED_WEIGHT_GRADIENT if kernel is None else GROUPED_WEIGHT_GRADIENT.kernel(kernel)
        plan = plans.of((a, b), r, e, a_source is not None, b_source is not None)
        plan(a, b, offsets, order, a if a_source is None else a_source, a if b_source is None else b_source, c)
    return c


@torch.library.triton_op("weft::grouped_swiglu_backward", mutates_args=())
def grouped_swiglu_backward_op(dy: Tensor, pre: Tensor) -> Tensor:
    """dpre [R, 2N] of y = silu(gate) · up."""
    if not on_gpu(dy):
        return shared.gated_gradient(dy, pre)
    dpre = torch.empty(pre.shape, dtype=pre.dtype, device=pre.device)
    if dpre.numel():
        kernels.gated_gradient_plans.of((dy,))(dy, pre, dpre)
    return dpre


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, offsets, source, position, bias, ctx.gate, keep, ctx.kernel = inputs
    ctx.save_for_backward(x, w, offsets, source, position, bias, output[1] if keep else None)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dpre: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of y and of gate and up."""
    product, outer = torch.ops.weft.grouped_matmul, torch.ops.weft.grouped_outer
    x, w, offsets, source, position, bias, pre = ctx.saved_tensors
    if dy is not None and ctx.gate:
        gradient = shared.gated_gradient if torch.is_grad_enabled() else torch.ops.weft.grouped_swiglu_backward
        gate_up = pre
        if pre is None:
            gate_up = product(x, w, offsets, source, position, bias, False, False, ctx.kernel)[0]
        dy = gradient(dy, gate_up)
    if dpre is not None and pre is not None:
        dy = dpre if dy is None else dy + dpre
    if dy is None:
        return (None,) * 9
    dx = dw = dbias = None
    if ctx.needs_input_grad[0]:
        dx = product(dy, w.transpose(1, 2), offsets, None, None, None, False, False, ctx.kernel)[0]
        dx = _of_tokens(dx, source, position, x.shape[0])
    if ctx.needs_input_grad[1]:
        if w.stride(1) == 1 and w.stride(2) != 1:  # stored [E, K, N]: so is its gradient
            dw = outer(x, dy, offsets, source, None, ctx.kernel).transpose(1, 2)
        else:
            dw = outer(dy, x, offsets, None, source, ctx.kernel)
    if bias is not None and ctx.needs_input_grad[5]:
        one = torch.ones((), dtype=dy.dtype, device=dy.device).expand(dy.shape[0], 1)
        dbias = outer(dy, one, offsets, None, None, ctx.kernel)[..., 0]
    return dx, dw, None, None, None, dbias, None, None, None


def _of_tokens(rows: Tensor, source: Tensor | None, position: Tensor | None, t: int) -> Tensor:
    if source is None:
        return rows
    if torch.is_grad_enabled() or traced(rows) or is_batched(rows) or not on_gpu(rows):
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if position is not None:
            return wide.index_select(0, position.reshape(-1)).view(*position.shape, rows.shape[1]).sum(1).to(rows.dtype)
        return wide.new_zeros((t, rows.shape[1])).index_add(0, source, wide).to(rows.dtype)
    return token_sums(rows, source, position, t)


grouped_matmul_op.register_autograd(_backward, setup_context=_save)


def _save_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kernel = inputs
    ctx.save_for_backward(*tensors)


def _outer_backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    product = torch.ops.weft.grouped_matmul
    a, b, offsets, a_source, b_source = ctx.saved_tensors
    da = db = None
    if ctx.needs_input_grad[0]:
        da = product(b, dc, offsets, b_source, None, None, False, False, ctx.kernel)[0]
        da = _of_tokens(da, a_source, None, a.shape[0])
    if ctx.needs_input_grad[1]:
        db = product(a, dc.transpose(1, 2), offsets, a_source, None, None, False, False, ctx.kernel)[0]
        db = _of_tokens(db, b_source, None, b.shape[0])
    return da, db, None, None, None, None


grouped_outer_op.register_autograd(_outer_backward, setup_context=_save_outer)


def grouped(
    x: Tensor, w: Tensor, offsets: Tensor, source: Tensor | None = None, position: Tensor | None = None,
    bias: Tensor | None = None, activation: str | None = None, kernel: str | None = None,
) -> Tensor:  # fmt: skip
    """The product of arguments that fit, by one kernel or (None) by the tables' choice. ``cuda`` is Hopper's main loop, which
    must take the product, or of rows to gather its gradients; what else it cannot take of the gradients is Triton's."""
    gate = activation is not None
    operands = (x, w) if bias is None else (x, w, bias)
    ready = eager(*operands)
    wanted = not ready and torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    if kernel == "cuda":
        kernel, rows, gather = None, x, source is not None
        if source is not None and wanted:
            rows, gather = torch.empty((source.shape[0], x.shape[1]), dtype=x.dtype, device="meta"), False
        call = ProductCall(rows, *operands[1:], rows.shape[0], gather, gate, False)
        if reason := dispatch.product_unsupported(call):
            raise Declined(reason)
    if ready:
        return products(x, w, offsets, source, position, bias, gate, False, kernel)[0]
    return torch.ops.weft.grouped_matmul(x, w, offsets, source, position, bias, gate, gate and wanted, kernel)[0]


grouped_matmul_triton = functools.partial(grouped, kernel="triton")
grouped_matmul_hopper = functools.partial(grouped, kernel="cuda")


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """R rows in E groups. ``gather=k``: rows of x [R / k, K], each k times; ``gated``: w [E, 2N, K]; ``bias``: there is
    one; ``layout``: NK or KN as w is stored; ``loads`` as in ``random_offsets``; ``past``: so many last rows in no group."""
    r, n, k, e = (w[a] for a in "RNKE")
    gather, gated, past = w.option("gather", 0), w.option("gated", False), w.option("past", 0)
    source = position = None
    if gather:
        source, position = shared.random_places(g, r // gather, gather, device)
    x = random_tensor(g, (r // max(gather, 1), k), w.dtype, device, layout=w.option("memory", "contiguous"))
    columns = 2 * n if gated else n
    straight = w.option("layout", "NK") == "NK"
    weight = random_tensor(g, (e, columns, k) if straight else (e, k, columns), w.dtype, device)
    return {
        "x": x,
        "w": weight if straight else weight.transpose(1, 2),
        "offsets": shared.random_offsets(g, r - past, e, w.option("loads", "zipf"), device),
        "source": source,
        "position": position,
        "bias": random_tensor(g, (e, columns), w.dtype, device) if w.option("bias", True) else None,
        "activation": "swiglu" if gated else None,
    }


def cost(w: Workload, direction: str) -> Cost:
    r, n, k, size = w["R"], w["N"], w["K"], w.bytes_per_element
    columns = 2 * n if w.option("gated", False) else n
    gather = w.option("gather", 0)
    x = (r // max(gather, 1)) * k
    used = min({"one": 1, "empty": w["E"] // 2 + 1}.get(w.option("loads", "zipf"), w["E"]), r)  # groups that have rows
    weights, bias = used * columns * k, used * columns * w.option("bias", True)
    indices = (w["E"] + 1) * 4 + (r * 4 if gather else 0)
    flops = 2.0 * r * columns * k
    read, written = (x + weights + bias) * size + indices, r * n * size
    if direction == "backward":
        read, written = read + (r * n - bias) * size, (x + w["E"] * columns * (k + w.option("bias", True))) * size
        flops *= 2
    return Cost(read, written, {w.dtype: flops}, special_ops=r * (columns - n))


def _boundary_moved(offsets: Tensor) -> Tensor:
    moved = offsets.clone()
    moved[1:-1] = (moved[1:-1] + 1).clamp(max=int(offsets[-1]))
    return moved


def _last_terms_left_out(**named: Any) -> Tensor:
    k = max(named["x"].shape[1] - 1, 0) // 8 * 8
    return reference(**{**named, "x": named["x"][:, :k], "w": named["w"][:, :, :k]})


def _gate_and_up_exchanged(**named: Any) -> Tensor:
    w = named["w"]
    return reference(**{**named, "w": w.roll(w.shape[1] // 2, 1) if named["activation"] else w})


gradients = mutants.gradient_of(reference, "x", "w", "bias")


def _empty_groups_unwritten(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    dx, dw, *rest = gradients(dy, **named)
    rows = named["offsets"].diff()
    return dx, dw.masked_fill((rows == 0)[:, None, None], 0.5), *rest


def _tokens_overwritten(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    dx, *rest = gradients(dy, **named)
    return dx if named["source"] is None else dx / 2, *rest


def layers(tokens: int, k: int, d: int, hidden: int, e: int = 64) -> list[Workload]:
    """Both products of a layer: gathered with a gate, and back; without biases, as such layers are."""
    up = workload("bf16", R=tokens * k, N=hidden, K=d, E=e, gather=k, gated=True, bias=False)
    return [up, workload("bf16", R=tokens * k, N=d, K=hidden, E=e, bias=False)]


SIZES = (*layers(4096, 8, 2048, 768), *layers(16384, 8, 2048, 768),
         *layers(8192, 6, 2048, 1408), *layers(16384, 2, 4096, 2816))  # fmt: skip

grouped_matmul = Operator(
    name="grouped_matmul",
    axes={"R": "rows", "N": "columns of y", "K": "columns of x", "E": "groups"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "gather": range(9),
        "gated": (False, True),
        "bias": (False, True),
        "past": range(2**20),
        "loads": shared.LOADS,
        "layout": ("NK", "KN"),
        "memory": LAYOUTS,
    },
    differentiable=("x", "w", "bias"),
    # gradients through the gate are sums of what the gate and up, sums themselves, make of dy
    tolerance={
        "forward": Tolerance(scale="tensor", ulps=2.0, terms=lambda w: max(w.axes.values())),
        "backward": Tolerance(scale="tensor", ulps=4.0, terms=lambda w: 2 * (w["R"] + w["N"] + w["K"])),
    },
    workloads={
        "verify": [
            *(workload(R=r, N=n, K=k, E=e) for r, n, k, e in ((1, 1, 1, 1), (40, 33, 17, 3), (50, 16, 40, 2))),
            *(workload(R=r, N=n, K=k, E=2) for r, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0))),
            workload(R=40, N=12, K=16, E=3, loads="one", layout="KN"),
            workload(R=24, N=12, K=20, E=4, loads="empty", gather=2),
            workload(R=36, N=12, K=33, E=3, gated=True, gather=3, past=5),
            workload(R=20, N=34, K=16, E=2, gated=True, layout="KN", bias=False),
            workload(R=20, N=12, K=10, E=2, bias=False, loads="even"),
            *(workload(R=12, N=12, K=16, E=2, memory=at) for at in ("strided", "transposed")),
            # rows on 16 bytes: for Hopper's main loop too
            workload(R=140, N=72, K=72, E=5, gather=2, gated=True, past=9),
            workload(R=150, N=64, K=72, E=4, layout="KN", loads="empty"),
        ],
        "full": [
            *(workload(R=600, N=128, K=192, E=7, gated=gated, gather=2) for gated in (False, True)),
            workload(R=2000, N=256, K=130, E=40),
            *(workload(R=3000, N=520, K=264, E=9, loads=loads, past=70) for loads in ("zipf", "one", "empty", "even")),
            workload(R=3000, N=136, K=328, E=70, gather=3, gated=True, layout="KN"),
        ],
        "huge": [workload("bf16", R=2**17, N=2**14 + 128, K=64, E=8, bias=False),
                 workload("bf16", R=2**10, N=2**13, K=2**13, E=40)],
        "bench": SIZES,
        "quick": [*layers(4096, 2, 2048, 768, 16)],
        "host": [workload(R=64, N=64, K=64, E=4)],
        "compile": [
            *layers(16384, 8, 2048, 768),
            workload("bf16", R=128, N=2048, K=768, E=64, layout="KN"),
            workload("fp16", R=128, N=100, K=100, E=8, gather=2, gated=True),
            workload("fp32", R=4096, N=512, K=512, E=8, gated=True),
        ],
        "tune": [*SIZES, *layers(256, 8, 2048, 768), *layers(1024, 8, 2048, 768)],
        "model": [*layers(16384, 8, 2048, 768, 128), *layers(8192, 1, 5120, 8192, 16), *layers(8192, 8, 7168, 2048, 256)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("the next group's matrix", mutants.changed(reference, w=lambda w: w.roll(1, 0))),
        Mutant("groups begin a row late", mutants.changed(reference, offsets=_boundary_moved)),
        Mutant("last terms left out", _last_terms_left_out),
        Mutant("gate and up exchanged", _gate_and_up_exchanged),
        Mutant("bias of the next group", mutants.changed(reference, bias=lambda b: None if b is None else b.roll(1, 0))),
        *mutants.usual(gradients, "backward"),
        Mutant("gradients of empty groups not written", _empty_groups_unwritten, "backward"),
        Mutant("gathered rows halved", _tokens_overwritten, "backward"),
    ],
)  # fmt: skip

grouped_matmul.implementation("triton", arch=">=sm_80")(grouped_matmul_triton)
grouped_matmul.implementation("cuda", arch="==sm_90", dtypes=("bf16", "fp16"))(grouped_matmul_hopper)
grouped_matmul.implementation("torch")(cublas_loop)
grouped_matmul.implementation("grouped_mm", devices=("cuda",), dtypes=("bf16",))(torch_grouped_mm)
grouped_matmul.implementation("torch.compile", devices=("cuda",), dtypes=("bf16",))(peers.Compiled(torch_grouped_mm))


def check(
    x: Tensor, w: Tensor, offsets: Tensor, source: Tensor | None = None, position: Tensor | None = None,
    bias: Tensor | None = None, activation: str | None = None, check_offsets: bool = False,
) -> None:  # fmt: skip
    name = "grouped_matmul"
    shared.check_matrix(name, "x", x, sharded=False)
    check_same(name, "w", w, "x", x)
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"{name}: argument 'activation' is {activation!r}; expected {', '.join(ACTIVATIONS)} or None")
    fits = w.ndim == 3 and w.shape[2] == x.shape[1] and w.shape[0] > 0 and not (activation and w.shape[1] % 2)
    columns = "2N" if activation else "N"
    expected = f"[E, {columns}, {x.shape[1]}] with at least one group, for 'x' of shape {tuple(x.shape)}"
    check_shape(name, "w", w, fits, expected)
    e, rows = w.shape[0], x.shape[0]
    shared.check_indices(name, "offsets", offsets, 1, f"({e + 1},)", "x", x)
    check_shape(name, "offsets", offsets, len(offsets) == e + 1, f"({e + 1},), one more than 'w' has matrices")
    if source is not None:
        shared.check_indices(name, "source", source, 1, "[rows]", "x", x)
        rows = source.shape[0]
    if rows >= 2**31:
        raise ValueError(f"{name}: {rows} rows; expected under 2**31 (offsets are int32)")
    if position is not None:
        shared.check_indices(name, "position", position, 2, "[tokens, k]", "x", x)
        fits = source is not None and position.shape[0] == x.shape[0] and position.numel() == rows
        expected = f"a 'source' with it, and {x.shape[0]} rows and {rows} elements"
        check_shape(name, "position", position, fits, expected)
    if bias is not None:
        check_same(name, "bias", bias, "x", x)
        check_shape(name, "bias", bias, bias.shape == w.shape[:2], f"{tuple(w.shape[:2])}, 'w' without its last")
    if check_offsets and traced(offsets):
        raise ValueError(f"{name}: check_offsets=True needs values, which tracing does not know; expected False there")
    if not traced(offsets) and (check_offsets or offsets.device.type == "cpu"):
        _check_values(offsets, source, rows, x.shape[0])


def _check_values(offsets: Tensor, source: Tensor | None, rows: int, tokens: int) -> None:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in itertools.pairwise(bounds)):
        wrong = next((i for i, (a, b) in enumerate(itertools.pairwise(bounds)) if a > b), None)
        where = "" if wrong is None else f" (decreasing after offset {wrong})"
        raise ValueError(
            f"grouped_matmul: argument 'offsets' runs from {bounds[0]} to {bounds[-1]}{where}; expected from 0, not "
            f"decreasing, to at most {rows}, the number of rows"
        )
    if source is not None:
        shared.check_range("grouped_matmul", "source", source, tokens)


@grouped_matmul.choice
@guarded
def choose(x: Tensor, w: Tensor, offsets: Tensor, *, direction: str = "forward", **options: Any) -> Choice:
    x, w, bias = cast_for_products(x, w, options.pop("bias", None))
    check(x, w, offsets, bias=bias, **options)
    source, gated = options.get("source"), options.get("activation") is not None
    r, gather = (x if source is None else source).shape[0], source is not None
    if direction == "backward":  # dx is one more product, the weight's gradient is where kernels differ
        dy = torch.empty((r, w.shape[1]), dtype=x.dtype, device="meta")
        return GROUPED_WEIGHT_GRADIENT.choose(dy, x, r, w.shape[0], False, gather)
    operands = (x, w) if bias is None else (x, w, bias)
    return GROUPED.choose(*operands, r, gather, gated, False)


@grouped_matmul.function
def grouped_matmul_function(
    x: Tensor, w: Tensor, offsets: Tensor, *, source: Tensor | None = None, position: Tensor | None = None,
    bias: Tensor | None = None, activation: str | None = None, check_offsets: bool = False,
) -> Tensor:  # fmt: skip
    """Each group of rows times its own matrix: y[r] = x[r] · w[e]ᵀ for rows offsets[e] … offsets[e + 1] - 1.

    Args:
        x: [R, K], rows in the order of their groups, or with ``source`` [T, K]; float32, float16 or bfloat16, any strides.
        w: [E, N, K], of x's dtype and device, any strides ([E, K, N] as ``w.transpose(1, 2)``); with an activation [E, 2N,
            K], in each matrix the N rows of the gate before those of up.
        offsets: [E + 1] int32, from 0, not decreasing; groups may be empty. Rows past the last offset are zeros.
        source: [R] int32: row r is x[source[r]], which is never written out; or None.
        position: [T, k] int32 with T·k = R: the rows that a token has, for x's gradient; without it ``source`` is sorted
            there.
        bias: that of w without its last dimension, [E, N] or [E, 2N], or None.
        activation: ``swiglu`` for silu(gate) · up, or None.
        check_offsets: raise ValueError for offsets that are not so, and sources out of range: waits for the device (on a
            CPU both are always checked). Without it rows of such offsets are undefined, and rows of such a source NaN;
            nothing outside of the tensors is read or written.

    Returns:
        [R, N] of x's dtype, accumulated in fp32 (fp32 products are IEEE). Under autocast x, w and bias are cast as by
        ``torch.mm``.

    Raises:
        TypeError: tensors of other dtypes, or dtypes that differ.
        ValueError: shapes or devices that do not fit, an unknown activation, offsets that do not fit (with
            ``check_offsets``).

    Gradients are the same bits every time: dx by the same kernel with w transposed; dw[e] = dy_eᵀ · x_e, zeros for an
    empty group. A gated product that wants a gradient writes gate and up, [R, 2N], too.
    """
    x, w, bias = cast_for_products(x, w, bias)  # first: under autocast their dtypes may differ, as torch.mm's may
    check(x, w, offsets, source, position, bias, activation, check_offsets)
    if transformed() or x.dtype == torch.float64:
        return reference(x, w, offsets, source, position, bias, activation)
    return grouped(x, w, offsets, source, position, bias, activation)

"""``grouped_matmul(x, w, offsets)``: each group of rows of x times its own matrix, the product of a mixture of experts.

2·R·N·K operations for R rows, whatever their groups; every matrix that has rows is read once: 2·R/E operations for each of
its elements, so that from some hundred rows a group on the rate of the matrix units is the limit (theory: README.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, cast_for_products, guarded, on_gpu, traced, transformed
from weft.operators.launch import target_sm
from weft.operators.mixture_of_experts.arguments import LOADS, random_offsets, random_places
from weft.operators.mixture_of_experts.grouped_calls import check, grouped_matmul_triton, reference
from weft.operators.mixture_of_experts.grouped_hopper_calls import declined, grouped_matmul_hopper
from weft.operators.mixture_of_experts.grouped_kernels import plans
from weft.operators.mixture_of_experts.grouped_peers import cublas_loop, torch_grouped_mm
from weft.operators.random_inputs import LAYOUTS, random_tensor

# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """R rows in E groups. ``gather=k``: rows of x [R / k, K], each k times; ``gated``: w [E, 2N, K]; ``bias``: there is
    one; ``layout``: NK or KN as w is stored; ``loads`` as in ``random_offsets``; ``past``: so many last rows in no group."""
    r, n, k, e = (w[a] for a in "RNKE")
    gather, gated, past = w.option("gather", 0), w.option("gated", False), w.option("past", 0)
    source = position = None
    if gather:
        source, position = random_places(g, r // gather, gather, device)
    x = random_tensor(g, (r // max(gather, 1), k), w.dtype, device, layout=w.option("memory", "contiguous"))
    columns = 2 * n if gated else n
    shape = (e, columns, k) if w.option("layout", "NK") == "NK" else (e, k, columns)
    weight = random_tensor(g, shape, w.dtype, device)
    return {
        "x": x,
        "w": weight if w.option("layout", "NK") == "NK" else weight.transpose(1, 2),
        "offsets": random_offsets(g, r - past, e, w.option("loads", "zipf"), device),
        "source": source,
        "position": position,
        "bias": random_tensor(g, (e, columns), w.dtype, device) if w.option("bias", True) else None,
        "activation": "swiglu" if gated else None,
    }


def used(w: Workload) -> int:
    """Groups that have rows, at most."""
    return min({"one": 1, "empty": w["E"] // 2 + 1}.get(w.option("loads", "zipf"), w["E"]), w["R"])


def cost(w: Workload, direction: str) -> Cost:
    r, n, k, size = w["R"], w["N"], w["K"], w.bytes_per_element
    columns = 2 * n if w.option("gated", False) else n
    gather = w.option("gather", 0)
    x = (r // max(gather, 1)) * k
    weights, bias = used(w) * columns * k, used(w) * columns * w.option("bias", True)
    indices = (w["E"] + 1) * 4 + (r * 4 if gather else 0)
    flops = 2.0 * r * columns * k
    if direction == "forward":
        return Cost(
            (x + weights + bias) * size + indices, r * n * size, {w.dtype: flops}, special_ops=r * (columns - n)
        )
    written = (x + w["E"] * columns * (k + w.option("bias", True))) * size
    return Cost((x + weights + r * n) * size + indices, written, {w.dtype: 2 * flops}, special_ops=r * (columns - n))


def _changed(**changes: Any) -> Any:
    """The reference with arguments changed: functions of all arguments by name."""

    def wrong(**named: Any) -> Tensor:
        return reference(**{**named, **{name: change(named) for name, change in changes.items()}})

    return wrong


def _gradients(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    leaves = {n: named[n].detach().requires_grad_() for n in ("x", "w", "bias") if named[n] is not None}
    with torch.enable_grad():
        return torch.autograd.grad(reference(**{**named, **leaves}), list(leaves.values()), dy)


def _next_group(named: dict[str, Any]) -> Tensor:
    return named["w"].roll(1, 0)


def _boundary_moved(named: dict[str, Any]) -> Tensor:
    offsets = named["offsets"].clone()
    offsets[1:-1] = (offsets[1:-1] + 1).clamp(max=int(offsets[-1]))
    return offsets


def _last_terms_left_out(**named: Any) -> Tensor:
    k = max(named["x"].shape[1] - 1, 0) // 8 * 8
    return reference(**{**named, "x": named["x"][:, :k], "w": named["w"][:, :, :k]})


def _gate_and_up_exchanged(named: dict[str, Any]) -> Tensor:
    w = named["w"]
    return w.roll(w.shape[1] // 2, 1) if named["activation"] else w


def _empty_groups_unwritten(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    dx, dw, *rest = _gradients(dy, **named)
    rows = named["offsets"].diff()
    return dx, dw.masked_fill((rows == 0)[:, None, None], 0.5), *rest


def _tokens_overwritten(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    dx, *rest = _gradients(dy, **named)
    return dx if named["source"] is None else dx / 2, *rest


def layers(tokens: int, k: int, d: int, hidden: int, e: int = 64) -> list[Workload]:
    """Both products of a layer: gathered with a gate, and back; without biases, as such layers are."""
    up = workload("bf16", R=tokens * k, N=hidden, K=d, E=e, gather=k, gated=True, bias=False)
    return [up, workload("bf16", R=tokens * k, N=d, K=hidden, E=e, bias=False)]


SIZES = (
    *layers(4096, 8, 2048, 768),
    *layers(16384, 8, 2048, 768),
    *layers(8192, 6, 2048, 1408),
    *layers(16384, 2, 4096, 2816),
)

grouped_matmul = Operator(
    name="grouped_matmul",
    axes={"R": "rows", "N": "columns of y", "K": "columns of x", "E": "groups"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options={
        "gather": range(9),
        "gated": (False, True),
        "bias": (False, True),
        "past": range(2**20),
        "loads": LOADS,
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
        "huge": [workload("bf16", R=2**17, N=2**14 + 128, K=64, E=8, bias=False), workload("bf16", R=2**10, N=2**13,
        K=2**13, E=40)], "bench": SIZES,
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
        Mutant("the next group's matrix", _changed(w=_next_group)),
        Mutant("groups begin a row late", _changed(offsets=_boundary_moved)),
        Mutant("last terms left out", _last_terms_left_out),
        Mutant("gate and up exchanged", _changed(w=_gate_and_up_exchanged)),
        Mutant("bias of the next group", _changed(bias=lambda n: None if n["bias"] is None else n["bias"].roll(1, 0))),
        *mutants.usual(_gradients, "backward"),
        Mutant("gradients of empty groups not written", _empty_groups_unwritten, "backward"),
        Mutant("gathered rows halved", _tokens_overwritten, "backward"),
    ],
)  # fmt: skip

grouped_matmul.implementation("triton", arch=">=sm_80")(grouped_matmul_triton)
grouped_matmul.implementation("cuda", arch="==sm_90", dtypes=("bf16", "fp16"), devices=("cuda",))(grouped_matmul_hopper)
grouped_matmul.implementation("torch")(cublas_loop)
grouped_matmul.implementation("grouped_mm", devices=("cuda",), dtypes=("bf16",))(torch_grouped_mm)
grouped_matmul.implementation("torch.compile", devices=("cuda",), dtypes=("bf16",))(peers.Compiled(torch_grouped_mm))

# ---- what users call -------------------------------------------------------------------------------------------------


@grouped_matmul.choice
@guarded
def choose(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    source: Tensor | None = None,
    position: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    check_offsets: bool = False,
) -> Choice:
    x, w, bias = cast_for_products(x, w, bias)
    check(x, w, offsets, source, position, bias, activation, check_offsets)
    if not on_gpu(x):
        return Choice("torch", "the tensors are on the CPU, where weft runs a product for each group")
    reason = "one launch over all groups, whose sizes stay on the device"
    if _on_hopper(x, w, source, bias, activation):
        return Choice("cuda", f"{reason}, by TMA and wgmma")
    return Choice("triton", reason, plans)


def _on_hopper(x: Tensor, w: Tensor, source: Tensor | None, bias: Tensor | None, activation: str | None) -> bool:
    if not on_gpu(x) or target_sm(x.device) != 90:
        return False
    return not traced(x, w) and not declined(x, w, source, bias, activation is not None)


@grouped_matmul.function
def grouped_matmul_function(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    source: Tensor | None = None,
    position: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    check_offsets: bool = False,
) -> Tensor:
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
    if transformed():
        return reference(x, w, offsets, source, position, bias, activation)
    function = grouped_matmul_hopper if _on_hopper(x, w, source, bias, activation) else grouped_matmul_triton
    return function(x, w, offsets, source, position, bias, activation)

"""What ``linear`` and ``linear_quantized`` are verified and timed on: references, inputs, compulsory work, mistakes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Mutant, Workload, workload
from weft.operators import mutants
from weft.operators.linear import activations
from weft.operators.linear.activations import ACTIVATIONS, halves
from weft.operators.random_inputs import LAYOUTS, VALUES, of_vectors, random_tensor

E4M3 = torch.float8_e4m3fn  # of codes
NAMES = ("fp8_e4m3", "fp8_e5m2", "int8")
OPTIONS = {
    "activation": ("none", *ACTIVATIONS),
    "plus": ("bias+residual", "bias", "residual", "none"),
    "layout": ("NT", "NN", "TN", "TT"),
    "memory": LAYOUTS,
    "values": VALUES,
}


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return _finished(F.linear(x, weight, bias), residual, activation, "reference")


def composed(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """What a user of PyTorch writes."""
    return _finished(F.linear(x, weight, bias), residual, activation, "usual")


def _finished(y: Tensor, residual: Tensor | None, activation: str | None, form: str) -> Tensor:
    chosen = activations.of(activation)
    y = getattr(chosen, form)(*halves(y, chosen))
    return y if residual is None else y + residual


def activation_of(w: Workload) -> str | None:
    name: str = w.option("activation", "silu")
    return None if name == "none" else name


def gated(w: Workload) -> bool:
    return activations.of(activation_of(w)).gated


def has(w: Workload, what: str) -> bool:
    return what in w.option("plus", "bias+residual")


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [M, K], weight [N, K] ([2N, K] of a gated activation) with a variance of 1 / K, so that activations see numbers of the
    size that they bend. Options: activation (silu); plus, what there is besides (bias+residual); layout, which of the two is
    stored with K not contiguous: NT is a linear layer's."""
    layout, memory, values = w.option("layout", "NT"), w.option("memory", "contiguous"), w.option("values", "normal")
    m, k, rows = w["M"], w["K"], w["N"] * (2 if gated(w) else 1)

    def operand(shape: tuple[int, int], across: bool, values: str) -> Tensor:
        at = shape[::-1] if across else shape
        made = random_tensor(g, at, w.dtype, device, layout=memory, values=values)
        return made.t() if across else made

    weight = operand((rows, k), layout[1] == "N", "normal")
    once = weight[tuple(slice(1) if step == 0 else slice(None) for step in weight.stride())]  # an expanded one shares
    once.mul_(max(k, 1) ** -0.5)
    bias = random_tensor(g, (rows,), w.dtype, device, layout=of_vectors(memory)) if has(w, "bias") else None
    residual = random_tensor(g, (m, w["N"]), w.dtype, device, layout=memory) if has(w, "residual") else None
    x = operand((m, k), layout[0] == "T", values)
    return {"x": x, "weight": weight, "bias": bias, "residual": residual, "activation": activation_of(w)}


def cost(w: Workload, direction: str) -> Cost:
    """Backward reads what forward kept of an activation, [M, N] or [M, 2N]; the residual's gradient is that of y itself."""
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    rows = n * (2 if gated(w) else 1)
    bias = rows if has(w, "bias") else 0
    flops = 2.0 * m * rows * k
    if direction == "forward":
        residual = m * n if has(w, "residual") else 0
        return Cost((m * k + rows * k + bias + residual) * size, m * n * size, {w.dtype: flops})
    kept = m * rows if activation_of(w) else 0
    return Cost((m * k + rows * k + m * n + kept) * size, (m * k + rows * k + bias) * size, {w.dtype: 2 * flops})


def _other_half(of_both: Tensor | None) -> Tensor | None:
    return None if of_both is None else of_both.roll(of_both.shape[0] // 2, 0)


def _halves_exchanged(weight: Tensor, bias: Tensor | None, activation: str | None, **named: Any) -> Tensor:
    if activations.of(activation).gated:
        weight, bias = weight.roll(weight.shape[0] // 2, 0), _other_half(bias)
    return reference(weight=weight, bias=bias, activation=activation, **named)


def _last_slice_left_out(x: Tensor, weight: Tensor, **named: Any) -> Tensor:
    k = max(x.shape[-1] - 1, 0) // 8 * 8
    return reference(x[..., :k], weight[:, :k], **named)


def _only_gated(activation: str | None) -> str | None:
    return activation if activations.of(activation).gated else None


def _residual_before_activation(residual: Tensor | None, activation: str | None, **named: Any) -> Tensor:
    chosen = activations.of(activation)
    if residual is None or chosen.gated:
        return reference(**named, residual=residual, activation=activation)
    return chosen.reference(F.linear(named["x"], named["weight"], named["bias"]) + residual)


gradients = mutants.gradient_of(reference, "x", "weight", "bias", "residual")


def _first_row_left_out(dy: Tensor, **named: Any) -> tuple[Tensor, ...]:
    """Of the bias's gradient."""
    found = gradients(dy, **named)
    if named["bias"] is None:
        return found
    shorter = {name: None if named[name] is None else named[name][1:] for name in ("x", "residual")}
    return (*found[:2], gradients(dy[1:], **{**named, **shorter})[2], *found[3:])


OTHER_FORM = {"gelu": "gelu_tanh", "gelu_tanh": "gelu", "geglu": "geglu_tanh", "geglu_tanh": "geglu"}
MUTANTS = [
    *mutants.usual(reference),
    Mutant("bias left out", mutants.changed(reference, bias=lambda bias: None)),
    Mutant("bias added twice", mutants.changed(reference, bias=lambda bias: None if bias is None else 2 * bias)),
    Mutant("bias of the other half", mutants.changed(reference, bias=_other_half)),
    Mutant("residual left out", mutants.changed(reference, residual=lambda residual: None)),
    Mutant("residual before the activation", _residual_before_activation),
    Mutant("activation left out", mutants.changed(reference, activation=_only_gated)),
    Mutant("activation of the wrong half", _halves_exchanged),
    Mutant("gelu of the other form", mutants.changed(reference, activation=lambda name: OTHER_FORM.get(name, name))),
    Mutant("last slice of K left out", _last_slice_left_out),
    *mutants.usual(gradients, "backward"),
    Mutant("slope of the activation left out", mutants.changed(gradients, activation=_only_gated), "backward"),
    Mutant("bias gradient without the first row", _first_row_left_out, "backward"),
]


UP = ((14336, 4096), (28672, 8192))  # (N, K) of Llama 8B's and 70B's way up in an MLP, one of gate and up
SMALL: dict[str, Any] = {"M": 40, "N": 48, "K": 72}
NONFINITE: dict[str, Any] = {"M": 32, "N": 48, "K": 16, "values": "nonfinite"}


def up(m: int, n: int, k: int, activation: str, plus: str = "bias", dtype: str = "bf16") -> Workload:
    return workload(dtype, M=m, N=n, K=k, activation=activation, plus=plus)


DOWN = workload("bf16", M=4096, N=4096, K=14336, activation="none")

BENCH = (
    *(up(m, n, k, "gelu_tanh") for m in (4096, 16384) for n, k in UP),
    up(4096, *UP[0], "gelu"),
    *(up(m, n, k, "swiglu", "none") for m in (512, 4096, 16384) for n, k in UP),
    DOWN,
    *(up(n, n, n, "gelu") for n in (4096, 8192)),
)
WORKLOADS = {
    "verify": [
        *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), (33, 65, 17), (64, 72, 64), (7, 1, 130))),
        *(workload(M=m, N=n, K=k, activation="gelu") for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0))),
        *(workload(**SMALL, activation=name, plus="bias") for name in ACTIVATIONS),
        *(workload(M=33, N=41, K=50, activation=name) for name in ("none", "relu", "gelu", "swiglu")),
        *(workload(**SMALL, activation=name, plus="none") for name in ("none", "swiglu")),
        workload(**SMALL, activation="none", plus="bias"),
        *(workload(**SMALL, layout=layout) for layout in ("NN", "TN", "TT")),
        workload(**SMALL, activation="swiglu", layout="NN"),
        *(
            workload(M=1, N=n, K=k, activation=name, plus="none")
            for n, k, name in ((41, 130, "swiglu"), (64, 256, "geglu"))
        ),
        *(workload(M=40, N=48, K=32, memory=memory) for memory in LAYOUTS[1:]),
        workload(**NONFINITE, activation="none"),
        *(workload(**NONFINITE, activation=name, plus="none") for name in ("relu", "gelu_tanh", "swiglu")),
    ],
    "full": [
        workload(M=257, N=264, K=520, activation=name, plus=plus)
        for name in ("none", *ACTIVATIONS)
        for plus in ("none", "bias+residual")
    ],
    "huge": [workload("bf16", M=2**16 + 8, N=2**15 + 8, K=64, activation="gelu_tanh", plus="bias")],
    "bench": [*BENCH, up(4096, 4096, 4096, "gelu", dtype="fp16")],
    "quick": [up(4096, 4096, 4096, "gelu")],
    "compile": [
        up(4096, 4096, 4096, "gelu"),
        up(4096, *UP[0], "swiglu", "none"),
        DOWN,
        up(1, *UP[0], "swiglu", "none"),
        workload("fp16", M=512, N=512, K=500, activation="silu", plus="bias"),
        workload("bf16", M=2047, N=2049, K=2050, activation="swiglu", plus="bias"),
        workload("fp32", M=512, N=512, K=512, activation="gelu", plus="bias"),
    ],
    "tune": BENCH,
    "model": [up(16384, *UP[0], "silu"), up(4096, *UP[0], "geglu_tanh", "none")],
}

"""``weight_only_matmul(x, weight, bias=None)``: a linear layer's product for few rows with a weight of int8, int4 or fp8 codes.

Reads N·K codes of 8 or 4 bits and their scales; x and y have 16 bits, sums 32. Reading the codes is the limit (theory and
measurements: README.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants
from weft.operators.call import Choice, check_device, check_same, check_tensor, eager, on_gpu
from weft.operators.launch import Plans, compile_request, target_sm
from weft.operators.matmul import skinny_hopper, weight_only_cuda
from weft.operators.matmul.quantized_weight import (
    BITS,
    GROUPS,
    SCALES,
    QuantizedWeight,
    block,
    dequantize_weight,
    quantize_weight,
)
from weft.operators.matmul.weight_only_kernels import plans
from weft.operators.matmul.weight_only_peers import dense, int8pack, tinygemm
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

MOST_ROWS = 64  # of x, up to which the rate of the memory is the limit

# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::weight_only_matmul", mutates_args=())
def weight_only_matmul_op(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, format: str, group: int
) -> Tensor:
    weight = QuantizedWeight(words, scale, zero, format, group, x.shape[1])
    return _launched(x, weight, bias) if on_gpu(x) else reference(x, weight, bias)


def _launched(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, plans: Plans = plans) -> Tensor:
    y = torch.empty((x.shape[0], weight.words.shape[0]), dtype=x.dtype, device=x.device)
    if y.numel():
        operands, options = _operands(x, weight, bias), _options(weight, bias)
        plans.of(operands, *options)(*operands, y)
    return y


def _operands(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> tuple[Tensor, ...]:
    """What the kernel's five pointers are: ``words`` where it reads nothing."""
    words, scale, zero, *_ = weight
    return x, words, scale, words if zero is None else zero, words if bias is None else bias


def _options(weight: QuantizedWeight, bias: Tensor | None) -> tuple[Any, ...]:
    return weight.zero is not None, bias is not None, weight.format, weight.group


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, words, scale, zero, _, *form = inputs
    ctx.save_for_backward(words, scale, zero)
    ctx.form = (*form, x.shape[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.mm(dy, dequantize_weight(QuantizedWeight(*ctx.saved_tensors, *ctx.form), dy.dtype))
    return dx, None, None, None, dy.sum(0) if ctx.needs_input_grad[4] else None, None, None


@torch.library.custom_op("weft::weight_only_matmul_cuda", mutates_args=())
def cuda_op(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, format: str, group: int
) -> Tensor:
    weight = QuantizedWeight(words, scale, zero, format, group, x.shape[1])
    # the choice may have been made while tracing, when alignment was not known
    return _launched(x, weight, bias, plans if weight_only_cuda.why_not(x, words) else weight_only_cuda.plans)


@cuda_op.register_fake
def _(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, format: str, group: int
) -> Tensor:
    return x.new_empty((x.shape[0], words.shape[0]))


for _op in (weight_only_matmul_op, cuda_op):
    _op.register_autograd(_backward, setup_context=_save)

# ---- implementations -------------------------------------------------------------------------------------------------


def reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, dequantize_weight(weight, x.dtype), bias)


def weight_only_matmul_triton(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    if eager(*_operands(x, weight, bias)):
        return _launched(x, weight, bias)
    words, scale, zero, format, group, _ = weight
    y: Tensor = torch.ops.weft.weight_only_matmul(x, words, scale, zero, bias, format, group)
    return y


def weight_only_matmul_cuda(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    of_cuda = _cuda_plans(x, weight.words)
    if eager(*_operands(x, weight, bias)) or compile_request():
        return _launched(x, weight, bias, of_cuda)
    words, scale, zero, format, group, _ = weight
    y: Tensor = torch.ops.weft.weight_only_matmul_cuda(x, words, scale, zero, bias, format, group)
    return y


def _cuda_plans(x: Tensor, words: Tensor) -> Plans:
    """Of the kernel in CUDA C++ for these tensors: Hopper's own where it takes them."""
    if not skinny_hopper.why_not(x, words):
        return skinny_hopper.plans
    if reason := weight_only_cuda.why_not(x, words):
        raise Declined(reason)
    return weight_only_cuda.plans


# ---- definition ------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [M, K] and a weight [N, K] of normal random numbers, quantised. Options: ``format``, ``group`` (of int4 128, else whole
    rows), ``zero`` (int4 with zero points), ``bias``, ``layout`` (of x and the bias) and ``values`` (of x)."""
    m, n, k = (w[a] for a in "MNK")
    layout = w.option("layout", "contiguous")
    x = random_tensor(g, (m, k), w.dtype, device, layout=layout, values=w.option("values", "normal"))
    bias = None
    if w.option("bias", True):
        of_vectors = layout if layout in ("unaligned", "strided") else "contiguous"
        bias = random_tensor(g, (n,), w.dtype, device, layout=of_vectors)
    return {"x": x, "weight": _weight(w, g, device, n, k), "bias": bias}


def _form(w: Workload) -> tuple[str, int]:
    format = w.option("format", "int8")
    return format, w.option("group", 128 if format == "int4" else 0)


def _weight(w: Workload, g: Any, device: str, n: int, k: int) -> QuantizedWeight:
    (format, group), zero_points = _form(w), w.option("zero", False)
    if device != "meta":
        return quantize_weight(random_tensor(g, (n, k), w.dtype, device), format, group, zero_points=zero_points)
    words = torch.empty((n, -(-k // block(format)) * 64), dtype=torch.int32, device=device)
    if not group:
        return QuantizedWeight(words, torch.empty(n, device=device), None, format, 0, k)
    scale = torch.empty((k // group, n), dtype=torch_dtype(w.dtype), device=device).t()
    zero = torch.empty((k // group, n), dtype=torch.uint8, device=device).t() if zero_points else None
    return QuantizedWeight(words, scale, zero, format, group, k)


def cost(w: Workload, direction: str) -> Cost:
    (m, n, k), size, (format, group) = (w[a] for a in "MNK"), w.bytes_per_element, _form(w)
    bias = n if w.option("bias", True) else 0
    scales = n * (k // group) * (size + w.option("zero", False)) if group else n * 4
    reads = n * k * BITS[format] // 8 + scales + (m * k + bias) * size
    return Cost(reads, m * n * size, {w.dtype: 2.0 * m * n * k + m * bias})


def _with(weight: QuantizedWeight, **changed: Any) -> QuantizedWeight:
    return weight._replace(**changed)


def _last_block_left_out(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    k = max(x.shape[1] - 1, 0) // block(weight.format) * block(weight.format)
    return F.linear(x[:, :k], dequantize_weight(weight, x.dtype)[:, :k], bias)


def _halves_swapped(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    words = weight.words << 16 | weight.words >> 16 & 0xFFFF
    return reference(x, _with(weight, words=words), bias)


def _next_groups_scale(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return reference(x, _with(weight, scale=weight.scale.roll(1, -1)), bias)


def _zero_points_left_out(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return reference(x, _with(weight, zero=None), bias)


def quantised(dtype: str, m: int, n: int, k: int, format: str, group: int = 0, **options: Any) -> Workload:
    """As decoder layers are: without a bias."""
    return workload(dtype, M=m, N=n, K=k, format=format, group=group, bias=False, **options)


FORMS = (("int8", 0), ("fp8", 0), ("int4", 128))
DECODE = (1, 4, 8, 16, 32, 64)  # sequences that decode at once
# Llama 3 8B and 70B: queries, keys and values; output; gate and up; down
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (8192, 28672))

weight_only_matmul = Operator(
    name="weight_only_matmul",
    axes={"M": "rows of x", "N": "rows of the weight", "K": "columns of both"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "format": tuple(BITS),
        "group": (0, *GROUPS),
        "zero": (False, True),
        "bias": (False, True),
        "layout": LAYOUTS,
        "values": VALUES,
    },
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w.axes.values())),
    workloads={
        "verify": [
            *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), (1, 40, 256), (3, 33, 17), (9, 16, 300), (33, 5, 70))),
            *(workload(M=m, N=n, K=k) for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (70, 9, 33))),
            *(workload(M=2, N=20, K=k, format="fp8") for k in (33, 256)),
            *(workload(M=3, N=20, K=384, format="int8", group=g) for g in GROUPS),
            workload(M=3, N=20, K=128, format="fp8", group=64),
            *(
                workload(M=2, N=20, K=k, format="int4", group=g)
                for k, g in ((512, 128), (640, 128), (192, 64), (96, 32))
            ),
            *(workload(M=4, N=7, K=256, format="int4", group=g, zero=True) for g in GROUPS),
            workload(M=17, N=20, K=1152, format="int4", group=128, zero=True, bias=False),
            workload(M=64, N=66, K=256, format="int4", group=32, zero=True),
            *(workload(M=40, N=70, K=200, format=f) for f in ("int8", "fp8")),
            *(workload(M=3, N=20, K=72, layout=at) for at in LAYOUTS[1:]),
            *(workload(M=4, N=20, K=128, format=f, values="nonfinite") for f in BITS),
        ],
        "full": [workload(M=m, N=300, K=1280, format=f, group=g) for m in (1, 7, 64) for f, g in FORMS],
        "huge": [quantised("bf16", m, 2**17 + 8, 2**14 + 128, f, g) for m in (1, 16) for f, g in FORMS],
        "bench": [quantised("bf16", m, 8192, 8192, f, g) for f, g in FORMS for m in DECODE],
        "quick": [quantised("bf16", 1, 8192, 8192, f, g) for f, g in FORMS],
        "compile": [
            *(quantised("bf16", m, 8192, 8192, f, g) for f, g in FORMS for m in (1, 16)),
            *(quantised("bf16", 64, 8192, 8192, f, g) for f, g in FORMS[1:]),
            *(quantised("fp16", 16, 8192, 8192, f, g) for f, g in FORMS[1:]),
            *(quantised("bf16", 16, 4096, 4096, "int4", g, zero=True) for g in GROUPS),
            quantised("bf16", 5, 4096, 4096, "int8", 64),
            quantised("fp32", 16, 8192, 8192, "int4", 128),
            workload("bf16", M=3, N=500, K=1000, format="fp8"),
        ],
        "tune": [
            *(quantised("bf16", m, n, n, f, g) for f, g in FORMS for m in (1, 8, 16, 64) for n in (4096, 8192)),
            *(quantised("bf16", 1, n, k, f, g) for f, g in FORMS for n, k in LAYERS),
            *(quantised("bf16", m, 8192, 8192, "int4", g) for m in (1, 16) for g in (32, 64)),
        ],
        "model": [quantised("bf16", m, n, k, f, g) for f, g in FORMS for m in (1, 16) for n, k in LAYERS],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("last block left out", _last_block_left_out),
        Mutant("halves of a word swapped", _halves_swapped),
        Mutant("the next group's scale", _next_groups_scale),
        Mutant("zero points left out", _zero_points_left_out),
    ],
)

weight_only_matmul.implementation("triton", arch=">=sm_80")(weight_only_matmul_triton)
weight_only_matmul.implementation("cuda", arch=">=sm_80", devices=("cuda",), dtypes=("fp16", "bf16"))(
    weight_only_matmul_cuda
)
weight_only_matmul.implementation("torch")(reference)
weight_only_matmul.implementation("dense", devices=("cuda",))(dense)
weight_only_matmul.implementation("tinygemm", devices=("cuda",), dtypes=("bf16",))(tinygemm)
weight_only_matmul.implementation("int8pack", devices=("cuda",), dtypes=("bf16",))(int8pack)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    check_tensor("weight_only_matmul", "x", x)
    if x.ndim != 2:
        raise ValueError(
            f"weight_only_matmul: argument 'x' has shape {tuple(x.shape)}; expected a matrix (two dimensions)"
        )
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(
            f"weight_only_matmul: argument 'weight' is a {type(weight).__name__}; expected a QuantizedWeight, as "
            "quantize_weight or prepare_weight of weft.operators.matmul.quantized_weight make one"
        )
    _check_weight(x, weight)
    if x.shape[1] != weight.columns:
        raise ValueError(
            f"weight_only_matmul: 'x' has shape {tuple(x.shape)} and 'weight' {weight.columns} columns; expected as many"
        )
    if bias is not None:
        check_tensor("weight_only_matmul", "bias", bias)
        check_same("weight_only_matmul", "bias", bias, "x", x)
        n = weight.words.shape[0]
        if tuple(bias.shape) != (n,):
            raise ValueError(
                f"weight_only_matmul: argument 'bias' has shape {tuple(bias.shape)}; expected ({n},), an element for each "
                "row of 'weight'"
            )


def _check_weight(x: Tensor, weight: QuantizedWeight) -> None:
    """That the parts of a weight fit each other: somebody may have put them together."""
    words, scale, zero, format, group, k = weight
    if format not in BITS or group not in ((0, *GROUPS) if format != "int4" else GROUPS) or (group and k % group):
        raise ValueError(
            f"weight_only_matmul: 'weight' has format {format!r}, group {group!r} and {k} columns; expected one of "
            f"{', '.join(BITS)} and a group of 0 (not int4), 32, 64 or 128 that divides the columns"
        )
    check_tensor("weight_only_matmul", "weight.words", words, (torch.int32,))
    check_tensor("weight_only_matmul", "weight.scale", scale, SCALES)
    n = words.shape[0] if words.ndim else 0
    wanted = {"words": (n, -(-k // block(format)) * 64), "scale": (n, k // group) if group else (n,)}
    parts = {"words": words, "scale": scale}
    if zero is not None:
        check_tensor("weight_only_matmul", "weight.zero", zero, (torch.uint8,))
        wanted["zero"], parts["zero"] = wanted["scale"], zero
    for name, t in parts.items():
        check_device("weight_only_matmul", f"weight.{name}", t, "x", x)
        if tuple(t.shape) != wanted[name]:
            raise ValueError(
                f"weight_only_matmul: 'weight.{name}' has shape {tuple(t.shape)}; expected {wanted[name]} for {format} with "
                f"group {group} and {k} columns"
            )
    if not words.is_contiguous():
        raise ValueError(
            f"weight_only_matmul: 'weight.words' has strides {words.stride()}; expected a contiguous tensor"
        )
    if torch.is_grad_enabled() and scale.requires_grad:
        raise ValueError(
            "weight_only_matmul: 'weight.scale' requires a gradient; expected a constant weight (gradients are of x and bias)"
        )


@weight_only_matmul.choice
def choose(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Choice:
    check(x, weight, bias)
    if not on_gpu(x):
        return Choice(
            "torch", "the tensors are on the CPU, where weft runs PyTorch's product with the dequantised weight"
        )
    if x.shape[0] * weight.words.shape[0] == 0:
        return Choice("torch", "empty: nothing to launch")
    if x.shape[0] > MOST_ROWS:
        return Choice("torch", f"over {MOST_ROWS} rows of x: the weight is dequantised and the product is cuBLAS's")
    one = x.shape[0] == 1 and weight.format == "int4"  # where an H200 found it faster: 17.7 us for 21.2 at 8192 x 8192
    if one and x.is_cuda and target_sm(x.device) >= 80 and not weight_only_cuda.why_not(x, weight.words):
        return Choice(
            "cuda", "one row of x: codes go from memory into the registers that unpack them", weight_only_cuda.plans
        )
    return Choice("triton", "few rows of x: codes are read once and unpacked in registers", plans)


def _public_plan(*arguments: Any) -> Any:
    x, words, scale, zero, bias, has_zero, has_bias, format, group, columns = arguments
    weight = QuantizedWeight(words, scale, zero if has_zero else None, format, group, columns)
    plans = choose(x, weight, bias if has_bias else None).plans
    return None if plans is None else plans.build(*arguments[:-1])


public_plans = Plans(_public_plan)


@weight_only_matmul.function
def weight_only_matmul_function(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """A linear layer's product for few rows with a quantised weight: x · wᵀ + bias.

    Args:
        x: [M, K]; float16 or bfloat16 (float32 is right, but multiplied without tensor cores), any strides. Made for M up to
            64; for more the weight is dequantised and multiplied by PyTorch.
        weight: [N, K] in int8, int4 or fp8, made once by ``quantize_weight`` or ``prepare_weight`` of
            ``weft.operators.matmul.quantized_weight``.
        bias: [N], of x's dtype and device, or None.

    Returns:
        [M, N] of x's dtype, accumulated in fp32; codes are multiplied without rounding, scales in fp32. Under autocast x and
        the bias are cast as ``torch.nn.functional.linear`` does. Gradients are of x and the bias.

    Raises:
        TypeError: x or the bias of another dtype, a weight that is not prepared.
        ValueError: shapes, devices or parts of the weight that do not fit, a scale that wants a gradient.
    """
    if weight.__class__ is QuantizedWeight:
        operands = _operands(x, weight, bias)
        if eager(*operands):
            ready = public_plans.of(operands, *_options(weight, bias), weight.columns)
            if ready is not None:
                y = torch.empty((x.shape[0], weight.words.shape[0]), dtype=x.dtype, device=x.device)
                ready(*operands, y)
                return y
    chosen = choose(x, weight, bias).implementation
    if chosen == "torch":
        return reference(x, weight, bias)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    words, scale, zero, format, group, _ = weight
    launch = torch.ops.weft.weight_only_matmul_cuda if chosen == "cuda" else torch.ops.weft.weight_only_matmul
    out: Tensor = launch(x, words, scale, zero, bias, format, group)
    return out

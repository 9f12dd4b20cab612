"""The compulsory work of an operator that PyTorch recorded with its inputs' shapes: bytes and FLOPs.

Bytes: every input read once, every output written once. What an operator's outputs are follows from its name; an operator that
is not listed has no known work. FLOPs count a multiply-add twice, as :class:`weft.definition.Cost` does.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from weft.definition import BYTES, Cost

DTYPES = {
    "double": "fp64",
    "float": "fp32",
    "c10::half": "fp16",
    "c10::bfloat16": "bf16",
    "c10::float8_e4m3fn": "fp8",
    "c10::float8_e5m2": "fp8",
    "signed char": "int8",
    "unsigned char": "int8",
    "bool": "int8",
    "int": "int32",
    "long int": "int64",
    "long": "int64",
}
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0, "matmul": 0}  # where the first factor stands
CONVOLUTIONS = (
    "conv2d",
    "convolution",
    "_convolution",
    "cudnn_convolution",
    "mkldnn_convolution",
    "convolution_overrideable",
)
PADDING_FIRST = ("cudnn_convolution", "mkldnn_convolution")
ATTENTION = re.compile(r"_(scaled_dot_product_)?(flash|efficient|cudnn)_attention(_for_cpu)?(_forward)?(_backward)?")
CAUSAL = {  # where is_causal, or the kind of mask, stands among the arguments
    "_flash_attention_forward": 8,
    "_flash_attention_backward": 11,
    "_efficient_attention_forward": 9,
    "_efficient_attention_backward": 14,
    "_cudnn_attention_forward": 10,
    "_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
}
# one output, of the broadcast shape and the first input's dtype
ELEMENTWISE = frozenset(
    """
    add sub mul div neg abs sqrt rsqrt exp log pow tanh sigmoid relu gelu silu clamp_min clamp where maximum
    minimum threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward mse_loss addcmul addcdiv
    lerp masked_fill native_dropout_backward _softmax _log_softmax _softmax_backward_data
    _log_softmax_backward_data native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm copy_ clone
    _fused_rms_norm _fused_rms_norm_backward native_layer_norm_backward
    leaky_relu
    """.split()  # noqa: SIM905
)

Shape = tuple[int, ...]
# weft's autograd functions that are bound by memory, how often the larger tensors among their inputs are read and written in
# backward, beside the gradients that come in: (read, written). Forward each is read once.
OURS = {"NormFunction": (1, 1), "Rotation": (0, 1), "Map": (1, 1)}


def of(name: str, args: dict[str, Any]) -> Cost | None:
    """The work of an operator by its name (``aten::mm``) and a trace's ``Input Dims`` and ``Input type``; None if not known."""
    base = name.removeprefix("aten::")
    tensors = _tensors(args.get("Input Dims"), args.get("Input type"))
    if base in PRODUCTS and "Input Dims" in args:
        return _product([t for t in tensors if t][PRODUCTS[base] :][:2])
    if base in CONVOLUTIONS:
        return _convolution(base, tensors, args.get("Concrete Inputs"))
    if base == "convolution_backward" and len(tensors) >= 3:
        return _convolution_backward(tensors[:3])
    if ATTENTION.fullmatch(base):
        return _pytorchs_attention(base, tensors, args.get("Concrete Inputs"))
    if base == "Attention":
        return _attention(_heads(tensors))
    if base in OURS:
        large = _large(tensors)
        written = large if base == "Rotation" else large[:1]
        return Cost(sum(map(_size, large)), sum(map(_size, written))) if large else None
    if base.removesuffix("_") in ELEMENTWISE or base in ELEMENTWISE:
        return _elementwise(base, [t for t in tensors if t])
    return None


def of_backward(name: str, args: dict[str, Any]) -> Cost | None:
    """The work of the gradient of one of weft's operators, by the shapes of its forward call."""
    tensors = _tensors(args.get("Input Dims"), args.get("Input type"))
    if name == "Attention":
        return _gradients(_attention(_heads(tensors)))
    large = _large(tensors)
    if name not in OURS or not large:
        return None
    read, written = OURS[name]
    all_of_it = sum(map(_size, large))
    gradients = all_of_it if name == "Rotation" else _size(large[0])
    return Cost(gradients + read * all_of_it, written * all_of_it)


def _heads(tensors: Sequence[tuple[Shape, str] | None]) -> list[tuple[Shape, str]]:
    """q, k and v, which lead the tensors of four dimensions."""
    return [t for t in tensors if t and len(t[0]) == 4]


def _large(tensors: Sequence[tuple[Shape, str] | None]) -> list[tuple[Shape, str]]:
    """Those with more than two dimensions, which have a batch: not weights, angles or seeds; of x [rows, columns] those of its
    size."""
    known = [t for t in tensors if t and t[0]]
    most = max((math.prod(t[0]) for t in known), default=0)
    return [t for t in known if len(t[0]) > 2 or math.prod(t[0]) == most]


def dtype(args: dict[str, Any]) -> str:
    """Of the first tensor among an operator's inputs: ``bf16``; empty if there is none."""
    return next((t[1] for t in _tensors(args.get("Input Dims"), args.get("Input type")) if t), "")


def _tensors(dims: Any, types: Any) -> list[tuple[Shape, str] | None]:
    """(shape, dtype) of each input that is a tensor, None for the others."""
    if not isinstance(dims, list) or not isinstance(types, list):
        return []
    found: list[tuple[Shape, str] | None] = []
    for shape, kind in zip(dims, types, strict=False):
        known = DTYPES.get(str(kind).lower())
        fits = isinstance(shape, list) and all(isinstance(n, int) and 0 <= n < 2**40 for n in shape)
        found.append((tuple(shape), known) if known and fits else None)
    return found


def _size(tensor: tuple[Shape, str]) -> int:
    return math.prod(tensor[0]) * BYTES[tensor[1]]


def _product(factors: Sequence[tuple[Shape, str] | None]) -> Cost | None:
    if len(factors) < 2 or factors[0] is None or factors[1] is None:
        return None
    (a, kind), b = factors[0], factors[1][0]
    if not 2 <= len(a) <= 3 or len(a) != len(b) or a[-1] != b[-2]:
        return None
    out = (*a[:-1], b[-1])
    flops = 2.0 * math.prod(out) * a[-1]
    return Cost(_size(factors[0]) + _size(factors[1]), math.prod(out) * BYTES[kind], {kind: flops})


def _convolution(base: str, tensors: Sequence[tuple[Shape, str] | None], concrete: Any) -> Cost | None:
    """Of [B, C, *space] with weights [K, C / groups, *window]; stride, padding and dilation as the trace writes them."""
    if len(tensors) < 2 or tensors[0] is None or tensors[1] is None or not isinstance(concrete, list):
        return None
    (x, kind), (w, _) = tensors[0], tensors[1]
    lists = [_integers(text) for text in concrete[2:]]
    options = [found for found in lists if found is not None and len(found) == len(x) - 2][:3]
    if len(x) < 3 or len(x) != len(w) or len(options) < 3 or "True" in concrete[6:7]:  # 6: transposed
        return None
    stride, padding, dilation = (options[1], options[0], options[2]) if base in PADDING_FIRST else options
    if min(stride) < 1:
        return None
    space = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(x[2:], w[2:], stride, padding, dilation, strict=True)
    ]
    if min(space) < 1:
        return None
    out = (x[0], w[0], *space)
    return Cost(
        _size(tensors[0]) + _size(tensors[1]),
        math.prod(out) * BYTES[kind],
        {kind: 2.0 * math.prod(out) * math.prod(w[1:])},
    )


def _convolution_backward(tensors: Sequence[tuple[Shape, str] | None]) -> Cost | None:
    """Of the gradient [B, K, *space], the input and the weights: a product for each of the two gradients."""
    dy, x, w = tensors
    if dy is None or x is None or w is None or len(w[0]) < 3:
        return None
    flops = 2 * 2.0 * math.prod(dy[0]) * math.prod(w[0][1:])
    return Cost(_size(dy) + _size(x) + _size(w), _size(x) + _size(w), {dy[1]: flops})


def _integers(text: Any) -> list[int] | None:
    """``"[1, 1]"`` → ``[1, 1]``."""
    if not isinstance(text, str) or not text.startswith("[") or text.startswith("[]"):
        return None
    try:
        return [int(part) for part in text.strip("[]").split(",")]
    except ValueError:
        return None


def _attention(tensors: Sequence[tuple[Shape, str] | None]) -> Cost | None:
    """Of q, k, v [B, H, S, D]: both products, as if nothing were masked."""
    q, k, v = (*tensors, None, None, None)[:3]
    if q is None or k is None or v is None or not len(q[0]) == len(k[0]) == len(v[0]) == 4:
        return None
    (b, h, s, d), keys = q[0], k[0][2]
    flops = 2.0 * b * h * s * keys * (d + v[0][3])
    return Cost(_size(q) + _size(k) + _size(v), b * h * s * v[0][3] * BYTES[q[1]], {q[1]: flops})


def _pytorchs_attention(base: str, tensors: Sequence[tuple[Shape, str] | None], concrete: Any) -> Cost | None:
    """The outer operators have [B, H, S, D], the inner ones [B, S, H, D]; a backward's first tensor is the gradient."""
    backward = base.endswith("_backward")
    found = _heads(tensors)[backward:]
    if base.startswith(("_flash", "_efficient")):
        found = [((b, h, s, d), kind) for (b, s, h, d), kind in found]
    work = _attention(found)
    at = CAUSAL.get(base)
    if work and at is not None and isinstance(concrete, list) and concrete[at : at + 1] in (["True"], ["1"]):
        work = Cost(work.reads, work.writes, {kind: n / 2 for kind, n in work.matrix_flops.items()})
    return _gradients(work) if backward else work


def _gradients(forward: Cost | None) -> Cost | None:
    """Five products in place of two: the scores again, and the gradients of scores, q, k and v. Reads q, k, v, the result and
    its gradient; writes three gradients."""
    if forward is None:
        return None
    flops = {kind: 2.5 * n for kind, n in forward.matrix_flops.items()}
    return Cost(forward.reads + 2 * forward.writes, forward.reads, flops)


def _elementwise(base: str, tensors: Sequence[tuple[Shape, str]]) -> Cost | None:
    if not tensors:
        return None
    most = max(tensors, key=lambda t: math.prod(t[0]))
    out = math.prod(most[0]) * BYTES[tensors[0][1]]
    read = tensors[1:] if base == "copy_" else tensors
    return Cost(sum(map(_size, read)), out)

"""Which kernel computes a linear layer, one whose result leaves as codes, and one of a row or two: the tables are ``FORWARD``,
``QUANTIZED``, ``FEW_ROWS`` and ``FEW_ROWS_WEIGHT`` (the gradient of its weight).

x [..., K], weight [N, K] ([2N, K] of a gated activation), y and residual [..., N]; M is the product of x's leading dimensions.
"""

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor

from weft.operators.autograd import KernelFunction, reference_gradients
from weft.operators.checks import check_device, check_same, check_shape, check_tensor
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.elementwise.dispatch import map_plan
from weft.operators.hopper import gemm, padded
from weft.operators.hopper.gemm import SIXTEEN_BITS, HopperPlan
from weft.operators.launch import INTERPRETING, Plan, Plans, target_sm
from weft.operators.layout import rows_of
from weft.operators.linear import activations, few_rows, gemv, kernels
from weft.operators.linear.activations import ACTIVATIONS, Activation, halves
from weft.operators.linear.reference import E4M3, NAMES, reference
from weft.operators.matmul.dispatch import SMALL, default_precision, product
from weft.operators.quantization.dispatch import QUANTIZE
from weft.operators.quantization.formats import FORMATS, Scheme, format_of
from weft.operators.reduction.sum import sum as column_sum

LONGEST_K = 1024  # terms up to which an epilogue saves more than Triton's loop loses to cuBLAS's, counted (notes)
FEW = 64  # rows up to which the weight's bytes are the limit
DTYPES = tuple(FORMATS[name].dtype for name in NAMES)


class LinearCall(Call):
    """A call, checked: any tensor is passed for a bias or a residual that there is not. Plans are called with ``(x, weight,
    bias, residual, y, pre)``, y and pre contiguous; ``keep`` asks for pre, what the activation is applied to."""

    name = "linear"

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, biased: bool, added: bool, activation: str | None,
        keep: bool = False, precision: str | None = None,
    ):  # fmt: skip
        self.x, self.weight, self.keep, self.precision = x, weight, keep, precision
        self.bias, self.residual = bias if biased else None, residual if added else None
        check(self.name, x, weight, self.bias, self.residual, activation)
        self.device = x.device  # also of the call of copies, which are on none
        self.activation = activations.of(activation)
        self.m, self.k = math.prod(x.shape[:-1]), x.shape[-1]

    @property
    def empty(self) -> bool:
        return self.m * self.weight.shape[0] == 0

    @property
    def sm(self) -> int:
        return target_sm(self.device)

    @property
    def needs_copy(self) -> bool:
        return any(t is not None and rows_of(t) is None for t in (self.x, self.residual))

    @property
    def matrix(self) -> Tensor:
        return flat(self.x)

    @property
    def small(self) -> bool:
        return self.m * self.weight.numel() < SMALL

    @property
    def on_lines(self) -> bool:
        """Whether rows of x, the weight and y begin on lines of 128 bytes, as :class:`MatmulCall` wants."""
        return gemm.on_lines(self.matrix, self.weight) and self.weight.shape[0] * self.x.element_size() % 128 == 0

    @functools.cached_property
    def stored_anywhere(self) -> bool:
        """Whether the main loop stores rows that begin anywhere, in place of copies; a residual's rows come by TMA."""
        weight = self.weight.chunk(2)[0] if self.activation.gated else self.weight
        return self.residual is None and padded.by_loop(self.matrix, weight.t())

    @property
    def has_epilogue(self) -> bool:
        """More than a bias, which cuBLAS adds itself."""
        return self.activation is not activations.NONE or self.residual is not None

    @property
    def epilogue(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The scalars and constants that the Triton kernel's epilogue has of its own."""
        added = (0, 0) if self.residual is None else flat(self.residual).stride()
        return added, {"RESIDUAL": self.residual is not None, "KEEP": self.keep}


class QuantizedCall(LinearCall):
    """Of ``linear_quantized``. Plans are called with ``(x, weight, bias, scale, q, amax)``: q contiguous bytes, amax fp32 [1]
    and 0."""

    name = "linear_quantized"
    stored_anywhere = False  # what makes codes of it was not measured so

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, biased: bool, activation: str | None, dtype: torch.dtype,
        precision: str | None = None,
    ):  # fmt: skip
        super().__init__(x, weight, bias, x, biased, False, activation, precision=precision)
        self.scale, self.dtype = scale, dtype
        if dtype not in DTYPES:
            raise TypeError(f"{self.name}: argument 'dtype' is {dtype!r:.40}; expected {', '.join(map(str, DTYPES))}")
        check_tensor(self.name, "scale", scale, (torch.float32,))
        check_device(self.name, "scale", scale, "x", x)
        check_shape(self.name, "scale", scale, scale.numel() == 1 and scale.ndim <= 1, "(1,) or ()")

    @property
    def epilogue(self) -> tuple[tuple[int, ...], dict[str, Any]]:
        format = format_of(self.dtype)
        hardware = FORMATS[format].mantissa > 0 and self.sm >= 89 and not INTERPRETING
        return (), {"FORMAT": format, "HARDWARE": hardware}


def arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str | None = None
) -> tuple[Any, tuple[Any, ...]]:
    """The tensors and the options of a :class:`LinearCall`."""
    tensors = (x, weight, x if bias is None else bias, x if residual is None else residual)
    return tensors, (bias is not None, residual is not None, activation)


def flat(t: Tensor) -> Tensor:
    """[..., K] as a matrix: a view."""
    return t if t.ndim == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def check(name: str, x: Any, weight: Any, bias: Any, residual: Any, activation: Any) -> None:
    """Raises TypeError or ValueError, naming the argument."""
    check_tensor(name, "x", x)
    check_tensor(name, "weight", weight)
    check_same(name, "weight", weight, "x", x)
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{name}: argument 'activation' is {activation!r:.40}; expected {known} or None")
    gated = activations.of(activation).gated
    if not x.ndim:
        raise ValueError(f"{name}: argument 'x' is a scalar; expected [..., K]")
    k, rows = x.shape[-1], "2N" if gated else "N"
    if weight.ndim != 2 or weight.shape[1] != k or (gated and weight.shape[0] % 2):
        why = f" (gate, then up, for {activation!r})" if gated else ""
        raise ValueError(
            f"{name}: argument 'weight' has shape {tuple(weight.shape)} and 'x' {tuple(x.shape)}; expected weight "
            f"[{rows}, {k}]{why}"
        )
    check_bias(name, bias, x, "weight", weight.shape[0])
    if residual is not None:
        check_tensor(name, "residual", residual)
        check_same(name, "residual", residual, "x", x)
        wanted = (*x.shape[:-1], weight.shape[0] // (2 if gated else 1))
        expected = f"{wanted}, that of the result (it is not broadcast)"
        check_shape(name, "residual", residual, tuple(residual.shape) == wanted, expected)


def check_bias(name: str, bias: Any, x: Tensor, weight: str, n: int) -> None:
    """Raises TypeError or ValueError unless there is no bias, or one for the n rows of the argument ``weight``."""
    if bias is not None:
        check_tensor(name, "bias", bias)
        check_same(name, "bias", bias, "x", x)
        expected = f"({n},), an element for each row of '{weight}'"
        check_shape(name, "bias", bias, tuple(bias.shape) == (n,), expected)


# ---- Hopper's main loop ----------------------------------------------------------------------------------------------


def hopper_unsupported(c: LinearCall, out: torch.dtype | None = None) -> str:
    """Why the main loop cannot take a call; ``out`` is the dtype of y, x's when None."""
    if c.sm != 90:
        return f"wgmma and TMA as it uses them are of sm_90, this is sm_{c.sm}"
    if c.x.dtype not in SIXTEEN_BITS:
        return f"{c.x.dtype}: Hopper's main loop takes 16-bit floats here"
    if c.needs_copy:
        return COPY
    for half in c.weight.chunk(2) if c.activation.gated else (c.weight,):
        if reason := gemm.why_not(c.matrix, half.t(), out or c.x.dtype, loose=c.stored_anywhere):
            return reason
    if c.bias is not None and not c.bias.is_contiguous():
        return "a bias with gaps"
    return "" if c.residual is None else gemm.map_why_not("residual", flat(c.residual), c.x.element_size(), False)


class HopperLaunch:
    """The main loop with a linear layer's epilogue, of the plans that :class:`LinearCall` describes."""

    def __init__(self, c: LinearCall, out: torch.dtype | None = None, *, amax: bool = False):
        self.n = c.weight.shape[0] // 2 if c.activation.gated else 0
        self.biased, self.added = c.bias is not None, c.residual is not None
        gate, up = self.halves(c.weight)
        epilogue = gemm.Epilogue(biased=self.biased, activation=c.activation.on_hopper, amax=amax)
        residual, up = None if c.residual is None else flat(c.residual), None if up is None else up.t()
        self.plan = HopperPlan(c.matrix, gate.t(), out, epilogue, residual=residual, up=up, loose=True, device=c.device)

    def halves(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return (weight[: self.n], weight[self.n :]) if self.n else (weight, None)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, y: Tensor, pre: Tensor) -> None:
        gate, up = self.halves(weight)
        bias_or_none, residual_or_none = bias if self.biased else None, residual if self.added else None
        self.plan(x, gate, y, bias=bias_or_none, residual=residual_or_none, up=up)  # the plan reads addresses alone


class Copies:
    """A linear layer's tensors with rows that begin on 16 bytes: copies of those that TMA does not take, and of all that have a
    row or column for each of the N results where 8 does not divide N, unless the main loop stores such rows."""

    def __init__(self, c: LinearCall):
        self.parts = 2 if c.activation.gated else 1  # of weight and bias: gate and up
        self.n = c.weight.shape[0] // self.parts
        self.columns = self.n if c.stored_anywhere else padded.up_to(self.n)

    def call(self, c: LinearCall) -> LinearCall:
        """The call of the copies, on no device."""
        made = copy.copy(c)
        made.x, made.weight, made.bias, made.residual = self.of(c.matrix, c.weight, c.bias, c.residual, "meta")
        return made

    def of(self, x: Tensor, weight: Tensor, bias: Any, residual: Any, device: str | None = None) -> tuple[Any, ...]:
        """The tensors, with a ``device`` empty ones."""
        rows, wide = self.columns * self.parts, self.columns != self.n
        if not padded.fits(x):
            x = self._copy(x, x.shape, 1, device)
        if wide or not padded.fits(weight):
            weight = self._copy(weight, (rows, weight.shape[1]), self.parts, device)
        if bias is not None and (wide or not bias.is_contiguous()):
            bias = self._copy(bias, (rows,), self.parts, device)
        if residual is not None and (wide or not padded.fits(flat(residual))):
            residual = self._copy(flat(residual), (x.shape[0], self.columns), 1, device)
        return x, weight, bias, residual

    def _copy(self, t: Tensor, shape: Any, parts: int, device: str | None) -> Tensor:
        *rows, columns = shape
        made = t.new_empty((*rows, padded.up_to(columns)), device=device or t.device)
        if device is None and t.ndim == 2:
            padded.copy(t.unflatten(0, (parts, -1)), made.unflatten(0, (parts, -1)))
        elif device is None:
            for to, of in zip(made.chunk(parts), t.chunk(parts), strict=True):
                to[: len(of)].copy_(of)
        return made[..., :columns]


class PaddedLaunch:
    """That launch of copies, of the plans that :class:`LinearCall` describes."""

    def __init__(self, c: LinearCall):
        self.copies = Copies(c)
        self.launch = HopperLaunch(self.copies.call(c))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, y: Tensor, pre: Tensor) -> None:
        n, columns = self.copies.n, self.copies.columns
        given = (bias if self.launch.biased else None, residual if self.launch.added else None)
        x, weight, bias, residual = self.copies.of(flat(x), weight, *given)
        wide = y if columns == n else y.new_empty((x.shape[0], columns))
        self.launch(x, weight, x if bias is None else bias, x if residual is None else residual, wide, wide)
        if wide is not y:
            padded.copy(wide, flat(y))


def padded_unsupported(c: LinearCall) -> str:
    reason = hopper_unsupported(c)
    if not reason or c.sm != 90 or c.x.dtype not in SIXTEEN_BITS or c.needs_copy:
        return reason
    return hopper_unsupported(Copies(c).call(c))


class QuantizedLaunch(HopperLaunch):
    """With the largest |y|, of the plans that :class:`QuantizedCall` describes. ``codes``: they leave the main loop in e4m3;
    else y does, of which a second launch makes codes."""

    def __init__(self, c: QuantizedCall, codes: bool):
        super().__init__(c, E4M3 if codes else None, amax=True)
        self.codes, self.scheme = codes, Scheme(format_of(c.dtype), "tensor")
        self.shape = (c.m, c.weight.shape[0] // (2 if c.activation.gated else 1))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, q: Tensor, amax: Tensor) -> None:
        gate, up = self.halves(weight)
        y = q.view(E4M3) if self.codes else torch.empty(self.shape, dtype=x.dtype, device=x.device)
        self.plan(x, gate, y, scale if self.codes else None, bias=bias if self.biased else None, up=up, amax=amax)
        if not self.codes:
            QUANTIZE.kernel("triton").of((y, scale), *self.scheme)(y, q, scale, y, 0, 0)


def codes_unsupported(c: QuantizedCall) -> str:
    if c.dtype != E4M3:
        return f"codes in {c.dtype}; the main loop leaves float8_e4m3fn"
    return hopper_unsupported(c, E4M3)


# ---- Triton ----------------------------------------------------------------------------------------------------------


def copy_unsupported(c: LinearCall) -> str:
    return COPY if c.needs_copy else ""


def quantized_tiled_launch(c: QuantizedCall, given: bool = False) -> Any:
    if given:
        return of_product(c, lambda row: _quantizing(c, row))
    return _quantizing(c)


def _quantizing(c: QuantizedCall, given: int = 0) -> Any:
    plan = kernels.tiled_plan(kernels.linear_quantized_tiled, c, given)

    def run(*tensors: Tensor) -> None:
        *operands, amax = tensors
        plan(*operands, amax.view(torch.int32))  # the largest value is found of bits as integers

    return run


def copies_pay(c: LinearCall) -> bool:
    """Whether operands' copies do; the epilogue reads a product's longer rows."""
    return c.sm == 90 and c.x.dtype in SIXTEEN_BITS and padded.pays(c.matrix, c.weight.t(), result=False)


def of_product(c: LinearCall, planned: Any) -> Any:
    """A launch of the epilogue, on cuBLAS's product in fp32, of copies where they pay. ``planned`` makes the epilogue's plan
    for a length of the product's rows."""
    filled = padded.PaddedPlan(c.matrix, c.weight.t()) if copies_pay(c) else None
    plan = planned(c.weight.shape[0] if filled is None else filled.n)

    def run(x: Tensor, weight: Tensor, *others: Tensor) -> None:
        x, columns = flat(x), weight.t()
        if filled is not None:
            x, columns = filled.operands(x, columns)
        if x.dtype == torch.float32:
            made = torch.mm(x, columns)
        elif x.is_cuda:
            made = torch.mm(x, columns, out_dtype=torch.float32)
        else:  # PyTorch has the mixed product on GPUs only
            made = torch.mm(x.float(), columns.float())
        plan(made, weight, *others)

    return run


def epilogue_launch(c: LinearCall) -> Any:
    return of_product(c, functools.partial(kernels.tiled_plan, kernels.linear_tiled, c))


def one_row_launch(c: LinearCall) -> Any:
    residual = None if c.residual is None else flat(c.residual)
    plan = gemv.plan(c.matrix, c.weight, c.bias, c.activation, residual=residual)

    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, y: Tensor, pre: Tensor) -> None:
        plan(x, weight, bias, x, residual, y)  # the plan reads addresses alone

    return run


def one_row_unsupported(c: LinearCall) -> str:
    if c.keep:
        return "what the activation is applied to is to be kept, for a gradient"
    return few_rows_unsupported(c)


def few_rows_unsupported(c: LinearCall) -> str:
    if c.m > gemv.MOST_ROWS or c.needs_copy:
        return f"{c.m} rows of x, or ones for which a copy would be needed; expected up to {gemv.MOST_ROWS}"
    return "" if c.weight.stride(1) == 1 or c.k == 1 else "rows of the weight are not contiguous"


COPY = "leading dimensions that do not collapse into rows of one stride, for which a copy would be needed"
SHORT = "up to 1024 terms an epilogue saves more than the loop loses to cuBLAS's"
EPILOGUE = "cuBLAS's product, and the epilogue in one launch"
HANDED_OVER = (ON_CPU, TRACED, EMPTY, Route("torch", lambda c: c.needs_copy, COPY))

FORWARD = Dispatch(
    LinearCall, *HANDED_OVER,
    Route("gemv", lambda c: c.m == 1 and c.has_epilogue and c.x.dtype in SIXTEEN_BITS,
          "one row of x: the weight is read once, and what follows is done on the sums", one_row_launch, one_row_unsupported),
    Route("epilogue", lambda c: c.has_epilogue and (c.x.dtype == torch.float32 or c.m <= FEW), f"fp32, or few rows: {EPILOGUE}",
          epilogue_launch, copy_unsupported),
    Route("torch", lambda c: c.x.dtype == torch.float32, "cuBLAS's fp32 product is the fastest"),
    Route("torch", lambda c: c.m <= FEW, "few rows: the weight's bytes are the limit, see skinny_matmul"),
    Route("torch", lambda c: (c.small or not c.on_lines) and not (c.has_epilogue or c.stored_anywhere or hopper_unsupported(c)),
          "a small product, or rows that do not begin on lines: cuBLAS"),
    Route("cuda", lambda c: True, "TMA and wgmma, with the epilogue in registers",
          HopperLaunch, hopper_unsupported, sm=90),
    Route("cuda-padded", lambda c: c.stored_anywhere or padded.pays(c.matrix, c.weight.t()),
          "copies, as matmul's", PaddedLaunch, padded_unsupported, sm=90),
    Route("triton", lambda c: c.k <= LONGEST_K, SHORT,
          lambda c: kernels.tiled_plan(kernels.linear_tiled, c), copy_unsupported),
    Route("epilogue", lambda c: c.has_epilogue, EPILOGUE, epilogue_launch, copy_unsupported),
    Route("torch", lambda c: True, "cuBLAS's product"),
)  # fmt: skip
QUANTIZED = Dispatch(
    QuantizedCall, *HANDED_OVER,
    Route("epilogue", lambda c: c.x.dtype == torch.float32, f"fp32: {EPILOGUE}",
          functools.partial(quantized_tiled_launch, given=True), copy_unsupported),
    Route("cuda", lambda c: True, "Hopper's main loop, which leaves codes and finds the largest value",
          lambda c: QuantizedLaunch(c, True), codes_unsupported, sm=90),
    Route("cuda-unfused", lambda c: True, "Hopper's main loop finds the largest value; codes in a second launch",
          lambda c: QuantizedLaunch(c, False), hopper_unsupported, sm=90),
    Route("epilogue", copies_pay, "copies, as matmul's; the epilogue in one launch",
          functools.partial(quantized_tiled_launch, given=True), copy_unsupported),
    Route("triton", lambda c: c.k <= LONGEST_K, SHORT, quantized_tiled_launch, copy_unsupported),
    Route("epilogue", lambda c: True, EPILOGUE, functools.partial(quantized_tiled_launch, given=True), copy_unsupported),
)  # fmt: skip


class NormLinearCall(LinearCall):
    """Of ``norm_linear``. Plans are called with ``(x, weight, norm, bias, residual, y)``, y contiguous."""

    name = "norm_linear"

    def __init__(
        self, x: Tensor, weight: Tensor, norm: Tensor, bias: Tensor, residual: Tensor, normed: bool, biased: bool, added: bool,
        eps: float, activation: str | None,
    ):  # fmt: skip
        super().__init__(x, weight, bias, residual, biased, added, activation)
        self.norm, self.eps = norm if normed else None, eps
        if self.norm is not None:
            check_tensor(self.name, "norm", norm)
            check_same(self.name, "norm", norm, "x", x)
            check_shape(
                self.name, "norm", norm, norm.shape == (self.k,), f"({self.k},), an element for each column of 'x'"
            )
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
            raise ValueError(f"{self.name}: argument 'eps' is {eps!r:.40}; expected a number that is not negative")


def norm_linear_launch(c: NormLinearCall) -> Any:
    residual = None if c.residual is None else flat(c.residual)
    plan = gemv.plan(c.matrix, c.weight, c.bias, c.activation, c.norm, residual, c.eps)

    def run(x: Tensor, weight: Tensor, norm: Tensor, bias: Tensor, residual: Tensor, y: Tensor) -> None:
        plan(x, weight, bias, norm, residual, y)

    return run


def norm_linear_unsupported(c: NormLinearCall) -> str:
    return few_rows_unsupported(c) if c.k else "no columns, of which there is no mean"


def tensor_cores_launch(c: NormLinearCall) -> Any:
    residual = None if c.residual is None else flat(c.residual)
    plan = few_rows.FewRowsPlan(c.matrix, c.weight, c.bias, c.norm, residual, c.eps, c.activation)

    def run(x: Tensor, weight: Tensor, norm: Tensor, bias: Tensor, residual: Tensor, y: Tensor) -> None:
        plan(x, weight, bias, norm, residual, y)  # the plan reads addresses alone

    return run


def tensor_cores_unsupported(c: NormLinearCall) -> str:
    if c.needs_copy:
        return COPY
    return few_rows.why_not(c.matrix, c.weight, c.norm, None if c.residual is None else flat(c.residual))


def by_tensor_cores(c: NormLinearCall) -> bool:
    """Where they were sooner on an H200, in graphs with early starts. One row: 4096 x 4096 9.5 us, Triton 12.6; 28672 x 4096
    62.3 and 55.7, 37888 x 3584, whose columns are no whole steps there, 71.2 and 80.8. Of 16 rows 4096 x 14336 44.5 us,
    cuBLAS 35.1; with a norm, where x is in shared memory, and for small weights the launches saved count for more."""
    size = c.weight.numel()
    if c.m == 1:
        return 2048 < c.k < 8192 and (size < 50e6 or -c.k % 1024 * 20 > c.k)
    return c.m <= 8 or c.norm is not None or size < 20e6


NORM_LINEAR = Dispatch(
    NormLinearCall, *HANDED_OVER,
    Route("cuda", by_tensor_cores, "up to 16 rows of 16 bits on tensor cores: norm, product and what follows it in one launch",
          tensor_cores_launch, tensor_cores_unsupported, sm=90),
    Route("triton", lambda c: c.m == 1, "one row of x: the same without tensor cores",
          norm_linear_launch, norm_linear_unsupported),
    Route("torch", lambda c: True, "the norm, and a product of cuBLAS"),
)  # fmt: skip


# ---- autograd in eager mode ------------------------------------------------------------------------------------------


def computed(kernel: str, activation: str | None, keep: bool, *call: Any) -> tuple[Tensor, Tensor]:
    """y [M, N] of matrices (x, weight, bias, residual), and with ``keep`` what the activation was applied to.

    Hopper's main loop writes one result: what is kept is a product of its own, from which an element-wise kernel makes y."""
    tensors, (biased, added, _) = arguments(*call)
    (x, weight, *_), chosen = tensors, activations.of(activation)
    y = x.new_empty(x.shape[0], weight.shape[0] // (2 if chosen.gated else 1))
    pre = x.new_empty(x.shape[0], weight.shape[0]) if keep else y
    if not y.numel():
        return y, pre
    keeps = kernel in ("triton", "epilogue")
    if keeps or not keep:
        how = (keep, default_precision()) if keeps else ()
        FORWARD.kernel(kernel).of(tensors, biased, added, activation, *how)(*tensors, y, pre)
        return y, pre
    FORWARD.kernel(kernel).of(tensors, biased, False, None)(*tensors, pre, pre)
    mapped(chosen, chosen.forward, halves(pre, chosen), (y,))
    return y if call[3] is None else y.add_(call[3]), pre


def mapped(chosen: Activation, formula: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """A formula of an activation over memory, in one pass."""
    tensors = (*inputs, *outputs)
    maps.of(tensors, formula, len(inputs), chosen.heavy)(*tensors)


def _map(*call: Any) -> Plan:
    *tensors, formula, inputs, heavy = call
    return map_plan(formula, tuple(tensors[:inputs]), tuple(tensors[inputs:]), heavy)


maps = Plans(_map)


class Linear(KernelFunction):
    """``(kernel, activation, x, weight, bias, residual)`` of matrices, in eager mode. Where a gradient is wanted, what the
    activation was applied to is kept; of relu without a residual the result says enough."""

    @staticmethod
    def forward(ctx: Any, kernel: str, activation: str | None, *call: Tensor | None) -> Tensor:
        wanted = any(ctx.needs_input_grad[2:5])
        keep = wanted and activation is not None and not (activation == "relu" and call[3] is None)
        y, kept = computed(kernel, activation, keep, *call)
        if wanted:
            ctx.save_for_backward(*call[:3], None if activation is None else kept)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias, of_residual = ctx.needs_input_grad[2:]
        dresidual = dy if of_residual else None
        if not (of_x or of_weight or of_bias):
            return None, None, None, None, None, dresidual
        x, weight, bias, kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            without_residual = functools.partial(reference, activation=ctx.activation)
            wanted = (of_x, of_weight, of_bias)
            return None, None, *reference_gradients(without_residual, (x, weight, bias), wanted, (dy,)), dresidual
        dpre = dy
        if ctx.activation is not None:  # the activation's slope: one pass over what was kept and dy
            chosen, dpre = activations.of(ctx.activation), torch.empty_like(kept)
            if dpre.numel():
                mapped(chosen, chosen.backward, (*halves(kept, chosen), dy), halves(dpre, chosen))
        dx = product(dpre, weight) if of_x else None
        dweight = None
        if of_weight and weight.stride(0) == 1 and weight.stride(1) != 1:  # stored [K, N]: so is its gradient
            dweight = product(x.t(), dpre).t()
        elif of_weight:
            dweight = product(dpre.t(), x)
        dbias = column_sum.public(dpre, 0).to(dy.dtype) if of_bias and column_sum.public is not None else None
        return None, None, dx, dweight, dbias, dresidual


# ---- few rows --------------------------------------------------------------------------------------------------------


class FewRowsCall(Call):
    """Of ``skinny_matmul``, checked: x [M, K], w [N, K]. Plans are called with ``(x, w, bias, y)``; without a bias any tensor
    is passed for it."""

    def __init__(self, x: Tensor, w: Tensor, bias: Tensor | None = None):
        self.x, self.w, self.bias = x, w, bias
        for name, t in (("x", x), ("w", w)):
            check_tensor("skinny_matmul", name, t)
            check_shape("skinny_matmul", name, t, t.ndim == 2, "a matrix (two dimensions)")
        check_same("skinny_matmul", "w", w, "x", x)
        if x.shape[1] != w.shape[1]:
            raise ValueError(
                f"skinny_matmul: 'x' has shape {tuple(x.shape)} and 'w' {tuple(w.shape)}; expected w with {x.shape[1]} "
                "columns, as many as 'x' has"
            )
        check_bias("skinny_matmul", bias, x, "w", w.shape[0])

    @property
    def empty(self) -> bool:
        return len(self.x) * len(self.w) == 0


def many_rows(c: "FewRowsCall | WeightGradientCall") -> str:
    return (
        f"{len(c.x)} rows of x; sums of up to {gemv.MOST_ROWS} stay in registers" if len(c.x) > gemv.MOST_ROWS else ""
    )


def few_rows_launch(c: FewRowsCall) -> Any:
    plan = gemv.plan(c.x, c.w, c.bias)
    return lambda x, w, bias, y: plan(x, w, bias, w, x, y)


FEW_ROWS = Dispatch(
    FewRowsCall, ON_CPU, EMPTY,
    Route("torch", lambda c: c.w.stride(1) != 1 and c.w.shape[1] > 1,
          "rows of w are not contiguous along K, so they cannot be read 16 bytes at a time"),
    Route("triton", lambda c: len(c.x) <= (2 if c.x.dtype == torch.float32 else 1),
          "one row of x, or two in fp32: w is read once",
          few_rows_launch, many_rows),
    Route("torch", lambda c: True, "more rows: no kernel of ours is faster than cuBLAS"),
)  # fmt: skip


class WeightGradientCall(Call):
    """dw = dyᵀ · x. Plans are called with ``(dy, x, dw)``, dw row-major."""

    def __init__(self, dy: Tensor, x: Tensor):
        self.dy, self.x = dy, x

    @property
    def empty(self) -> bool:
        return self.dy.shape[1] * self.x.shape[1] * len(self.x) == 0


FEW_ROWS_WEIGHT = Dispatch(
    WeightGradientCall, ON_CPU, EMPTY, TRACED,
    Route("triton", lambda c: True, "dw of a row or two is written once, from registers; dx is cuBLAS's",
          lambda c: gemv.outer_plan(c.dy, c.x), many_rows),
    Route("torch", lambda c: True, "more rows: two products of cuBLAS"),
)  # fmt: skip

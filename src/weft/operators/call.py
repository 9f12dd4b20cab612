"""What the public functions share: argument checks, the test for the eager fast path, and the choice that they report."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from weft.definition import Declined
from weft.operators.launch import INTERPRETING, PLAIN, compile_request

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # what kernels take
FLOATS_AND_64 = (*FLOATS, torch.float64)  # what public functions take: float64 is computed by PyTorch


@dataclass(frozen=True)
class Choice:
    """Which implementation a call takes and why."""

    implementation: str
    reason: str


def on_gpu(x: torch.Tensor) -> bool:
    """Whether our kernels run on this tensor: on a CUDA device, in the interpreter, or while compiling for an architecture."""
    return x.is_cuda or INTERPRETING or compile_request() is not None


def eager(*tensors: torch.Tensor, gradient: bool = False, autocast: bool = False) -> bool:
    """True in plain eager mode: real CUDA tensors of the current device, nothing tracing, no modes, no gradient wanted
    unless ``gradient``, no autocast unless ``autocast`` (for operators that it does not cast). Then a plan may be launched
    without the dispatcher."""
    if torch.compiler.is_compiling():
        return False
    grad = torch.is_grad_enabled() and not gradient
    if compile_request() is not None:  # tensors are on `meta`; a plan compiles instead of launching
        return not (grad and any(t.requires_grad for t in tensors)) and not gradient
    if torch._C._len_torch_dispatch_stack() or transformed():
        return False
    if not autocast and torch.is_autocast_enabled("cuda"):
        return False
    for t in tensors:
        if t.__class__ not in PLAIN or not t.is_cuda or (grad and t.requires_grad) or t.is_neg():
            return False
    return tensors[0].get_device() == torch._C._cuda_getDevice()


def is_distributed(a: Any) -> bool:
    """Whether this is a DTensor."""
    return isinstance(a, torch.Tensor) and hasattr(a, "device_mesh")


def beside(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A tensor that an operator makes for x: where x is a DTensor, a replicated one, which every rank has made alike."""
    if not is_distributed(x):
        return t
    from torch.distributed.tensor import DTensor, Replicate

    mesh = x.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)


def negated_lazily(*args: Any) -> bool:
    """Whether a tensor's memory holds its negative (``Tensor.is_neg``: the imaginary part of a conjugate)."""
    if not torch.compiler.is_compiling():
        for a in args:
            if isinstance(a, torch.Tensor) and a.is_neg():
                return True
    return False


def guarded(choose: Callable[..., Choice]) -> Callable[..., Choice]:
    """A function that chooses, with what holds for every operator: PyTorch where ``torch.func`` or forward-mode differentiation
    looks on, for which only PyTorch's operators have rules, and for tensors that PyTorch negates when it reads them."""

    @functools.wraps(choose)
    def chosen(*args: Any, **named: Any) -> Choice:
        choice = choose(*args, **named)
        if choice.implementation == "torch":
            return choice
        if transformed():
            why = "within torch.func or forward-mode differentiation, for which PyTorch's own operators have rules"
        elif any(map(is_distributed, (*args, *named.values()))):
            why = "a DTensor: PyTorch's own operators know how its shards are placed"
        elif negated_lazily(*args, *named.values()):
            why = "a tensor that PyTorch negates when it is read (Tensor.is_neg), which its own operators do"
        else:
            return choice
        return Choice("torch", why)

    return chosen


def materialised(*args: Any) -> tuple[Any, ...]:
    """The arguments, with lazily negated tensors materialised."""
    if not negated_lazily(*args):
        return args
    return tuple(a.resolve_neg() if isinstance(a, torch.Tensor) else a for a in args)


def widened(*tensors: Any) -> tuple[Any, ...]:
    """The arguments, with 16-bit floats on a GPU cast to float32 under autocast, as it does for operators in its fp32 list."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    half = (torch.float16, torch.bfloat16)
    return tuple(t.float() if isinstance(t, torch.Tensor) and t.is_cuda and t.dtype in half else t for t in tensors)


def promoted(*tensors: Any) -> tuple[Any, ...]:
    """The arguments, with floating-point tensors whose dtypes differ cast to the one that PyTorch's arithmetic gives: under
    autocast a bf16 branch meets an fp32 residual."""
    floats = [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype in FLOATS_AND_64]
    if len({t.dtype for t in floats}) < 2:
        return tensors
    deciding = [t for t in floats if t.ndim] or floats  # a tensor without dimensions decides as little as a number
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in deciding))
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in FLOATS_AND_64 else t for t in tensors)


def transformed() -> bool:
    """Whether the call is inside ``torch.func`` (grad, jvp, vmap …) or forward-mode differentiation, for which our kernels have
    no rules."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def cast_for_products(*tensors: Any) -> tuple[Any, ...]:
    """The arguments, with floats cast as autocast casts them for ``torch.mm`` on their device."""

    return tuple(t.to(product_dtype(t)) if isinstance(t, torch.Tensor) else t for t in tensors)


def product_dtype(t: torch.Tensor) -> torch.dtype:
    """Of a product with this tensor: its own, or autocast's."""
    if t.dtype in FLOATS and t.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(t.device.type):
        return torch.get_autocast_dtype(t.device.type)
    return t.dtype


def traced(*tensors: torch.Tensor) -> bool:
    """Whether the call is traced rather than run: by ``torch.compile``, ``export``, ``vmap``, ``make_fx``, or with fake or
    wrapped tensors. PyTorch's own operators have rules for all of these, and a compiler fuses them with their neighbours."""
    if compile_request() is not None:
        return False
    if torch.compiler.is_compiling() or transformed():
        return True
    return any(t.__class__ not in PLAIN for t in tensors) or get_proxy_mode() is not None


is_batched = torch._C._functorch.is_legacy_batchedtensor  # of ``torch.autograd.grad(…, is_grads_batched=True)``


def _one_by_one(backward: Callable[..., Any], ctx: Any, gradients: Sequence[Any]) -> Any:
    """``backward`` of each gradient of a batch, whose memory kernels cannot read; the results as a batch again."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batches = [torch._remove_batch_dim(g, level, 1, 0) if isinstance(g, torch.Tensor) and is_batched(g) else None
               for g in gradients]  # fmt: skip
    size = next(len(b) for b in batches if b is not None)
    found = []
    for i in range(size):
        one = backward(ctx, *(g if b is None else b[i] for g, b in zip(gradients, batches, strict=True)))
        found.append(one if isinstance(one, tuple) else (one,))
    return tuple(
        None if of[0] is None else torch._add_batch_dim(torch.stack(of), 0, level) for of in zip(*found, strict=True)
    )


class _Untracked:
    """Autograd's context for a call without gradients: saves nothing."""

    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        pass

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        torch.autograd.graph.increment_version(tensors)  # backward of a graph that saved them raises


class KernelFunction(torch.autograd.Function):
    """An autograd function whose kernels read raw memory: ``backward`` gets materialised gradients."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (backward := cls.__dict__.get("backward")) is not None:
            given = backward.__func__

            @functools.wraps(given)
            def of_memory(ctx: Any, *gradients: Any) -> Any:
                if any(isinstance(g, torch.Tensor) and is_batched(g) for g in gradients):
                    return _one_by_one(of_memory, ctx, gradients)
                return given(ctx, *materialised(*gradients))

            cls.backward = staticmethod(of_memory)  # type: ignore[method-assign]


def differentiable(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Runs an autograd function: through autograd if a gradient is wanted, else its forward alone (an unused node costs
    5 us)."""
    args = materialised(*args)
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        return function.apply(*args)
    return function.forward(_Untracked(), *args)


def reference_gradients(
    reference: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[bool], gradients: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``inputs`` by autograd of the reference, themselves differentiable: what backward returns when a
    gradient of the gradient is wanted (grad mode is on in backward then)."""
    # views, so that no input is reached through another one's history: a saved result has the call itself in its own
    views = [a.view_as(a) if w else a for a, w in zip(inputs, wanted, strict=True)]
    leaves = [a for a, w in zip(views, wanted, strict=True) if w]
    out = reference(*views)
    found = iter(torch.autograd.grad(out, leaves, gradients, create_graph=True, allow_unused=True))
    return tuple(next(found) if w else None for w in wanted)


def check_tensor(
    operator: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...] = FLOATS_AND_64, *, sharded: bool = True
) -> None:
    """Raises TypeError unless ``value`` is a tensor of one of the dtypes, and no DTensor unless ``sharded``."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{operator}: argument '{name}' is a {type(value).__name__}; expected a torch.Tensor")
    if value.is_nested:
        raise TypeError(f"{operator}: argument '{name}' is a nested tensor; expected a dense one")
    if not sharded and is_distributed(value):
        raise TypeError(
            f"{operator}: argument '{name}' is a DTensor; expected a plain tensor, such as its full_tensor(), or to_local() "
            "where each rank computes its own rows"
        )
    if value.dtype not in dtypes:
        raise TypeError(f"{operator}: argument '{name}' has dtype {_short(value.dtype)}; expected {either(dtypes)}")
    if value.layout != torch.strided:
        raise TypeError(f"{operator}: argument '{name}' has layout {value.layout}; expected a dense (strided) tensor")


def check_same(operator: str, name: str, value: torch.Tensor, other: str, reference: torch.Tensor) -> None:
    """Raises unless ``value`` has the dtype (TypeError) and device (ValueError) of ``reference``."""
    if value.dtype != reference.dtype:
        dtypes = f"has dtype {_short(value.dtype)} and '{other}' has {_short(reference.dtype)}"
        raise TypeError(f"{operator}: argument '{name}' {dtypes}; expected the same dtype")
    check_device(operator, name, value, other, reference)


def check_alike(operator: str, name: str, value: torch.Tensor, other: str, reference: torch.Tensor) -> None:
    """Raises unless ``value`` also has the shape (ValueError) of ``reference``."""
    check_same(operator, name, value, other, reference)
    if value.shape != reference.shape:
        shapes = f"has shape {tuple(value.shape)} and '{other}' has {tuple(reference.shape)}"
        raise ValueError(f"{operator}: argument '{name}' {shapes}; expected the same shape")


def check_device(operator: str, name: str, value: torch.Tensor, other: str, reference: torch.Tensor) -> None:
    """Raises ValueError unless both are on one device."""
    if value.device != reference.device:
        devices = f"is on {value.device} and '{other}' is on {reference.device}"
        raise ValueError(f"{operator}: argument '{name}' {devices}; expected one device")


def check_vector(
    operator: str, name: str, value: Any, size: int, what: str, other: str, x: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:  # fmt: skip
    """Raises unless ``value`` is [size], of x's dtype or float32 (or of ``dtypes``), on the device of x, the argument
    ``other``. ``what`` says in the error what it holds a number for."""
    check_tensor(operator, name, value, dtypes or tuple(dict.fromkeys((x.dtype, torch.float32))))
    check_device(operator, name, value, other, x)
    check_shape(operator, name, value, tuple(value.shape) == (size,), f"({size},), {what}")


def check_dtype(operator: str, dtype: Any) -> None:
    """Raises TypeError unless the ``dtype`` that a caller asks for is a floating-point one, or None."""
    if dtype is not None and dtype not in FLOATS_AND_64:
        raise TypeError(f"{operator}: argument 'dtype' is {dtype!r:.40}; expected {either(FLOATS_AND_64)}, or None")


def check_eps(operator: str, eps: Any) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= 3e38:
        raise ValueError(f"{operator}: argument 'eps' is {eps!r}; expected a number of at least 0 that fp32 can hold")


def check_shape(operator: str, name: str, value: torch.Tensor, fits: bool, expected: str) -> None:
    """Raises ValueError unless the shape ``fits``; ``expected`` says which one would."""
    if not fits:
        raise ValueError(f"{operator}: argument '{name}' has shape {tuple(value.shape)}; expected {expected}")


def check_dim(operator: str, dim: Any, ndim: int) -> int:
    """``dim`` as a position from the front. Raises TypeError or ValueError (PyTorch's IndexError is not one)."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{operator}: argument 'dim' is {dim!r}; expected an int")
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise ValueError(
            f"{operator}: argument 'dim' is {dim}; expected {-max(ndim, 1)} … {max(ndim, 1) - 1} "
            f"for a tensor of {ndim} dimensions"
        )
    return dim % max(ndim, 1)


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    words = [_short(d) for d in dtypes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows_of(x: torch.Tensor) -> tuple[int, int, int, int] | None:
    """A tensor as rows of its last dimension: ``(M, N, row_stride, column_stride)``, or None if the leading dimensions do not
    collapse into one stride."""
    *sizes, n = x.shape
    *strides, column_stride = x.stride()
    m, row_stride = 1, None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if row_stride is None:
            row_stride = stride
        elif stride != row_stride * m:
            return None
        m *= size
    if 0 in sizes:
        m = 0
    return m, n, n if row_stride is None else row_stride, column_stride


def dense(x: torch.Tensor) -> bool:
    """Whether x's elements fill contiguous memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(x.stride(), x.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def check_flag(operator: str, argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{operator}: argument '{argument}' is {value!r:.40}; expected True or False")


def check_values(
    operator: str, argument: str, value: torch.Tensor, wrong: Callable[..., torch.Tensor], *, flag: str, expected: str
) -> None:
    """Raises ValueError where ``wrong(value)`` marks an element, which waits for the device, or where the call is traced.
    ``flag`` is the argument that asks for this check; ``expected`` says in the error what the elements must be."""
    if traced(value):
        raise ValueError(
            f"{operator}: {flag}=True needs the values of '{argument}', which tracing does not know; expected False there"
        )
    found = wrong(value)
    if bool(found.any()):
        at = tuple(found.nonzero()[0].tolist())
        raise ValueError(
            f"{operator}: argument '{argument}' has {value[at].item()} at {at} ({int(found.sum())} such in all); "
            f"expected {expected}"
        )


def overlapping(x: torch.Tensor) -> bool:
    """Whether elements of x may share memory, as those of an expanded tensor do: a dimension's stride is shorter than the span
    of the dimensions with shorter strides."""
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < span:
            return x.numel() > 0
        span += stride * (size - 1)
    return False


def check_places(operator: str, argument: str, x: torch.Tensor, why: str) -> None:
    """Raises ValueError if x is written in place and its elements may share memory."""
    if overlapping(x):
        raise ValueError(
            f"{operator}: {why} and argument '{argument}' of shape {tuple(x.shape)} with strides {x.stride()}; expected "
            "separate memory for each element"
        )


def sharing(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of a shares memory with one of b; interleaved views of one tensor may share none."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return np.shares_memory(np.asarray(_Layout(a)), np.asarray(_Layout(b)))


class _Layout:
    """A tensor's memory layout as a NumPy array; nothing is read."""

    def __init__(self, t: torch.Tensor):
        size = t.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (t.data_ptr(), False),
            "shape": tuple(t.shape),
            "strides": tuple(stride * size for stride in t.stride()),
        }


def readable(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A gradient of x's shape that row kernels can read: copied if its strides (expanded, say) do not collapse into rows."""
    return torch.empty_like(x).copy_(dy) if rows_of(dy) is None else dy


def views(*tensors: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Each tensor as rows. Raises Declined for strides that do not collapse into rows, for which a copy would be needed."""
    found = [rows_of(t) for t in tensors]
    if None in found:
        raise Declined("the leading dimensions do not collapse into rows of one stride, so a copy would be needed")
    return found  # type: ignore[return-value]

"""What the public functions share: the test for the eager fast path, casts, and the choice that they report."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

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
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        return tensors
    return tuple(t.to(product_dtype(t)) if isinstance(t, torch.Tensor) else t for t in tensors)


def product_dtype(t: torch.Tensor) -> torch.dtype:
    """Of a product with this tensor: its own, or autocast's."""
    if t.dtype in FLOATS and t.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(t.device.type):
        return torch.get_autocast_dtype(t.device.type)
    return t.dtype


_as_if_traced = False  # by ``as_if_traced``


@contextlib.contextmanager
def as_if_traced() -> Iterator[None]:
    """Within it the tables are asked what a call takes under a compiler."""
    global _as_if_traced
    previous, _as_if_traced = _as_if_traced, True
    try:
        yield
    finally:
        _as_if_traced = previous


def traced(*tensors: torch.Tensor) -> bool:
    """Whether the call is traced rather than run: by ``torch.compile``, ``export``, ``vmap``, ``make_fx``, or with fake or
    wrapped tensors. PyTorch's own operators have rules for all of these, and a compiler fuses them with their neighbours."""
    if compile_request() is not None:
        return False
    if torch.compiler.is_compiling() or _as_if_traced or transformed():
        return True
    return any(t.__class__ not in PLAIN for t in tensors) or get_proxy_mode() is not None

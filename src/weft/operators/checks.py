"""Checks of arguments, whose errors name the operator and the argument, what came in and what was expected."""

from collections.abc import Callable
from typing import Any

import torch

from weft.operators.call import FLOATS_AND_64, is_distributed, traced
from weft.operators.layout import overlapping


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
    # in a gradient that a compiler traces a layout cannot be asked for; it takes dense tensors alone
    if not torch.compiler.is_compiling() and value.layout != torch.strided:
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
    fits = dtype is None or dtype in FLOATS_AND_64
    check_value(operator, "dtype", dtype, fits, f"{either(FLOATS_AND_64)}, or None", TypeError)


def check_value(
    operator: str, name: str, value: Any, fits: bool, expected: str, error: type[Exception] = ValueError
) -> None:
    """Raises ``error`` unless the value ``fits``; ``expected`` says which one would."""
    if not fits:
        raise error(f"{operator}: argument '{name}' is {value!r:.40}; expected {expected}")


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_eps(operator: str, eps: Any, name: str = "eps") -> None:
    fits = is_number(eps) and 0 <= eps <= 3e38
    check_value(operator, name, eps, fits, "a number of at least 0 that fp32 can hold")


def check_shape(operator: str, name: str, value: torch.Tensor, fits: bool, expected: str) -> None:
    """Raises ValueError unless the shape ``fits``; ``expected`` says which one would."""
    if not fits:
        raise ValueError(f"{operator}: argument '{name}' has shape {tuple(value.shape)}; expected {expected}")


def check_dim(operator: str, dim: Any, ndim: int) -> int:
    """``dim`` as a position from the front. Raises TypeError or ValueError (PyTorch's IndexError is not one)."""
    check_value(operator, "dim", dim, is_int(dim), "an int", TypeError)
    most = max(ndim, 1)
    expected = f"{-most} … {most - 1} for a tensor of {ndim} dimensions"
    check_value(operator, "dim", dim, -most <= dim < most, expected)
    return dim % most


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    words = [_short(d) for d in dtypes]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_flag(operator: str, argument: str, value: Any) -> None:
    check_value(operator, argument, value, isinstance(value, bool), "True or False", TypeError)


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


def check_places(operator: str, argument: str, x: torch.Tensor, why: str) -> None:
    """Raises ValueError if x is written in place and its elements may share memory."""
    if overlapping(x):
        raise ValueError(
            f"{operator}: {why} and argument '{argument}' of shape {tuple(x.shape)} with strides {x.stride()}; expected "
            "separate memory for each element"
        )

"""Parameters that the kernels do not take (on a CPU, float64, with gaps …), stepped by PyTorch's functions: their gradients
unscaled and clipped, 16-bit weights with options that PyTorch does not have on fp32 copies, as in the kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.operators.optimizer.blockwise import random_bits
from weft.optim.state import local

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
NOISE = 3  # the stream of the weights' random numbers; those of the rule's states have the numbers below

State = dict[str, Any]


def unscaled(p: Tensor, optimizer: str, scale: Tensor | None, factor: Tensor | None) -> Tensor:
    """A parameter's gradient, divided by the loss's scale and clipped."""
    grad = p.grad
    assert grad is not None  # the caller has checked
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{optimizer} does not support sparse gradients; torch.optim.SparseAdam and torch.optim.SGD take them"
        )
    if scale is not None:
        grad = grad / scale.to(grad.device).view(())
    return grad if factor is None else grad * factor.to(grad.dtype)


def zero(params: list[Tensor]) -> None:
    """Sets gradients to 0."""
    torch._foreach_zero_([p.grad for p in params if p.grad is not None])


def step(
    plain: Callable[..., None], params: list[Tensor], grads: list[Tensor], states: list[State], group: Any
) -> None:
    """``plain`` of all parameters of a group, of which those with a rounding or a ``state_dtype`` of ours are in fp32."""
    wide = {row: opened(p, states[row], group) for row, p in enumerate(params) if needs_fp32(p, group)}
    if not wide:
        plain(params, grads, states, group)
        return
    counts = [int(state.get("step", 0)) for state in states]
    own = [{n: _float(x) for n, x in state.items()} if row in wide else state for row, state in enumerate(states)]
    grads = [g.float() if row in wide else g for row, g in enumerate(grads)]
    plain([wide.get(row, p) for row, p in enumerate(params)], grads, own, group)
    for row, stepped in wide.items():
        p, state = params[row], states[row]
        for name, x in own[row].items():
            if name in state and isinstance(state[name], Tensor) and state[name].dtype in SIXTEEN_BITS:
                state[name].copy_(x)
            elif state.get(name) is not x:
                state[name] = x
        close(p, stepped, state, group, row, counts[row])
        if "step" in state and int(state["step"]) == counts[row]:  # of a rule that does not count
            state["step"].add_(1)  # in place: a new item would make the tables outdated


def _float(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in SIXTEEN_BITS else x


def needs_fp32(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether a step of this parameter needs an fp32 copy. The bits of a DTensor are not taken apart."""
    if p.dtype not in SIXTEEN_BITS or group["differentiable"]:
        return False
    return group["state_dtype"] == torch.float32 or (group["rounding"] != "nearest" and local(p) is p)


def opened(p: Tensor, state: State, group: dict[str, Any]) -> Tensor:
    """The weight in fp32; with ``rounding="split"`` the one that ``lower_bits`` complete."""
    if group["rounding"] == "split" and local(p) is p:
        return ((p.view(torch.int16).int() << 16) + state["lower_bits"].int()).view(torch.float32)
    return p.float()


def close(p: Tensor, wide: Tensor, state: State, group: dict[str, Any], row: int, count: int) -> None:
    """Rounds a stepped fp32 copy into its weight, as the kernel does.

    Args:
        row: of the parameter among those of its step.
        count: steps done before this one; only for random numbers.
    """
    if group["rounding"] == "nearest" or local(p) is not p:
        p.copy_(wide)
        return
    bits = torch.where(wide.isnan(), 0x7FC00000, wide.view(torch.int32))
    if group["rounding"] == "split":
        p.view(torch.int16).copy_((bits + 0x8000) >> 16)
        state["lower_bits"].copy_(bits)
        return
    noise = random_bits(p.numel(), group["seed"], NOISE, row, count, p.device).view(p.shape)
    p.view(torch.int16).copy_((bits + noise.int()) >> 16)

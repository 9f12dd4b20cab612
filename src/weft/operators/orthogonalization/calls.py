"""What the family's operators share: their PyTorch operators, how the two symmetric products are called, what is drawn and
registered for them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator, Workload
from weft.operators import peers
from weft.operators.call import cast_for_products, eager, guarded, on_gpu
from weft.operators.dispatch import Dispatch
from weft.operators.random_inputs import drawn


def pytorch_operators(
    name: str, by: Callable[[str], Callable[..., Tensor]], fake: Callable[..., Tensor], gradient: Callable[..., Tensor]
) -> dict[str, Callable[..., Tensor]]:
    """By back end: ``weft::name``, whose Triton kernels a compiler sees; ``weft::name_hopper`` and ``weft::name_strips``, which
    it does not. Made of ``by(back end)``, annotated with the operator's schema (a tensor, then options), the same on ``fake``
    tensors, and its ``gradient`` of ``(gradient of the result, tensor, *options)``."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.options = inputs
        ctx.save_for_backward(x)

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return gradient(dy, *ctx.saved_tensors, *ctx.options), *(None,) * len(ctx.options)

    made: dict[str, Any] = {
        "triton": torch.library.triton_op(f"weft::{name}", by("triton"), mutates_args=()),
        "cuda": torch.library.custom_op(f"weft::{name}_hopper", by("cuda"), mutates_args=()),
        "strips": torch.library.custom_op(f"weft::{name}_strips", by("strips"), mutates_args=()),
    }
    made["cuda"].register_fake(fake)
    made["strips"].register_fake(fake)
    for operator in made.values():
        operator.register_autograd(backward, setup_context=save)
    return made


class SymmetricProduct:
    """The calls of ``gram(x)`` and ``gram_polynomial(a, alpha, beta)``: by a plan in eager mode, else by a PyTorch operator
    with the schema of ``reference``, the product in PyTorch."""

    def __init__(self, name: str, table: Dispatch, reference: Callable[..., Tensor], gradient: Callable[..., Tensor]):
        self.table, self.reference = table, reference

        def by(backend: str) -> Callable[..., Tensor]:
            @functools.wraps(reference)
            def product(x: Tensor, *factors: float) -> Tensor:
                if on_gpu(x) or backend not in ("triton", "strips"):
                    return table.kernel(backend).of((x,), *factors)(x)
                return reference(x, *factors)

            return product

        def fake(x: Tensor, *factors: float) -> Tensor:
            return x.new_empty((*x.shape[:-1], x.shape[-2]))

        self.operators = pytorch_operators(name, by, fake, gradient)

    def kernel(self, name: str) -> Callable[..., Tensor]:
        def implementation(*call: Any, **named: Any) -> Tensor:
            x, *factors = (*call, *named.values())
            plan = self.table.kernel(name).of((x,), *factors)  # declines what the kernel does not support
            return plan(x) if eager(x) else self.operators[name](x, *map(float, factors))

        return implementation

    def __call__(self, x: Tensor, *factors: float) -> Tensor:
        if eager(x):
            plan = self.table.of((x,), *factors)
            return self.reference(x, *map(float, factors)) if plan is None else plan(x)
        (x,) = cast_for_products(x)  # before the choice: which kernels there are depends on the dtype
        chosen = guarded(self.table.choose)(x, *factors).implementation
        by = self.reference if chosen == "torch" else self.operators[chosen]
        return by(x, *map(float, factors))


def matrices(w: Workload, g: Any, device: str, columns: str = "N") -> Tensor:
    """[B, M, N], or [M, N] where B is 1."""
    shape = (w["M"], w[columns]) if w["B"] == 1 else (w["B"], w["M"], w[columns])
    return drawn(w, g, device, *shape)


def quack(a: Tensor, b: Tensor, *c: Tensor, **factors: float) -> Tensor:
    from quack.gemm_interface import gemm_symmetric

    if a.ndim > 3:
        raise Declined("QuACK's symmetric GEMM takes one batch dimension")
    return gemm_symmetric(a, b, *c, **factors)


def implement(operator: Operator, kernel: Callable[[str], Any], quack: Callable[..., Tensor], *names: str) -> None:
    """Registers kernels by their names (those that end in ``-gram`` are for bf16 alone), PyTorch's and QuACK's products."""
    sixteen_bits = ("bf16", "fp16")
    for name in names:
        backend, _, form = name.partition("-")
        dtypes = ("bf16",) if form else {"cuda": sixteen_bits, "strips": ("fp32",)}.get(backend, ())
        only = {"arch": "==sm_90", "devices": ("cuda",)} if backend == "cuda" else {"arch": ">=sm_80"}
        operator.implementation(name, backend="cuda" if backend == "cuda" else "triton", dtypes=dtypes, **only)(
            kernel(name)
        )
    peers.register(operator, operator.reference)
    operator.implementation("quack", requires="quack-kernels", devices=("cuda",), dtypes=sixteen_bits)(quack)

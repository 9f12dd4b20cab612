"""The first of the sketches of docs/architecture.md, AdamW over many tensors: stateful, in place, no output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from where import DEVICE

torch = pytest.importorskip("torch")

from verdicts import assert_right, assert_wrong  # noqa: E402

from weft.bench import compare  # noqa: E402
from weft.definition import Cost, Operator, Tolerance, Workload, workload  # noqa: E402
from weft.hardware.ceilings import Ceilings  # noqa: E402
from weft.operators.random_inputs import random_tensor  # noqa: E402

pytestmark = pytest.mark.device

BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01


def adamw_inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    def tensors() -> list[torch.Tensor]:
        return [random_tensor(g, (w["P"] + i,), w.dtype, device) for i in range(w["T"])]

    return {
        "params": tensors(),
        "grads": tensors(),
        "exp_avg": tensors(),
        "exp_avg_sq": [t.square_() for t in tensors()],
        "step": 3,
        "lr": 1e-1,
    }


def adamw_reference(params, grads, exp_avg, exp_avg_sq, step, lr) -> None:
    for p, g, m, v in zip(params, grads, exp_avg, exp_avg_sq, strict=True):
        m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        update = m / (1 - BETAS[0] ** step) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        p.mul_(1 - lr * DECAY).sub_(update, alpha=lr)


def adamw_cost(w: Workload, direction: str) -> Cost:
    n = sum(w["P"] + i for i in range(w["T"]))
    size = n * w.bytes_per_element
    return Cost(reads=4 * size, writes=3 * size, vector_flops=12 * n, special_ops=2 * n)


def adamw_operator(**changed: Any) -> Operator:
    return Operator(
        **{
            "name": "adamw",
            "axes": {"T": "tensors", "P": "parameters in each"},
            "inputs": adamw_inputs,
            "reference": adamw_reference,
            "mutates": ("params", "exp_avg", "exp_avg_sq"),
            "cost": adamw_cost,
            "tolerance": Tolerance(scale="tensor", ulps=8.0),
            "dtypes": ("fp32",),
            "workloads": {"verify": [workload(T=1, P=1), workload(T=3, P=100), workload(T=4, P=1000)]},
            **changed,
        }
    )


adamw = adamw_operator()


def adamw_foreach(params, grads, exp_avg, exp_avg_sq, step, lr) -> None:
    """Another order of operations than the reference's, over all tensors at once."""
    torch._foreach_lerp_(exp_avg, grads, 1 - BETAS[0])
    torch._foreach_mul_(exp_avg_sq, BETAS[1])
    torch._foreach_addcmul_(exp_avg_sq, grads, grads, 1 - BETAS[1])
    denominator = torch._foreach_sqrt(exp_avg_sq)
    torch._foreach_div_(denominator, math.sqrt(1 - BETAS[1] ** step))
    torch._foreach_add_(denominator, EPS)
    torch._foreach_mul_(params, 1 - lr * DECAY)
    torch._foreach_addcdiv_(params, exp_avg, denominator, -lr / (1 - BETAS[0] ** step))


def adamw_with(change: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """AdamW on changed arguments."""

    def wrong(**arguments: Any) -> None:
        change(arguments)
        adamw_foreach(**arguments)

    return wrong


def copied(name: str) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = [t.clone() for t in arguments[name]]

    return change


def test_adamw_passes():
    assert_right(adamw, adamw_foreach)
    assert_right(adamw, adamw_reference)


@pytest.mark.parametrize("name", ["params", "exp_avg", "exp_avg_sq"])
def test_adamw_that_does_not_update_one_of_its_arguments_fails(name):
    assert_wrong(adamw, adamw_with(copied(name)), "allowed")


@pytest.mark.parametrize("name", ["params", "exp_avg", "exp_avg_sq", "grads"])
def test_adamw_that_leaves_out_the_last_tensor_fails(name):
    def last_is_another(arguments):
        arguments[name] = [*arguments[name][:-1], arguments[name][-1].clone().zero_()]

    assert_wrong(adamw, adamw_with(last_is_another), "allowed")


def test_adamw_without_bias_correction_fails():
    assert_wrong(adamw, lambda **arguments: adamw_foreach(**{**arguments, "step": 10**9}), "allowed")


def test_an_argument_that_is_changed_undeclared_fails():
    def consumes_gradients(grads, **arguments):
        adamw_foreach(grads=grads, **arguments)
        grads[-1][-1] += 1

    assert_wrong(adamw, consumes_gradients, "argument 'grads' was changed")


def test_adamw_that_returns_what_nobody_asked_for_fails():
    def chatty(**arguments):
        adamw_foreach(**arguments)
        return arguments["params"][0].sum()

    assert_wrong(adamw, chatty, "results; expected")


def test_in_place_operators_hold_in_float64():
    """The reference's own type: it must not be run on the arguments that the implementation is then given."""
    assert_right(adamw_operator(dtypes=("fp64",)), adamw_foreach)


def test_integers_may_be_mutated():
    """A step counter on the device, as capturable optimizers keep it."""

    def inputs(w, g, device):
        return {"x": random_tensor(g, (w["N"],), w.dtype, device), "step": torch.tensor([w["N"]], device=device)}

    def reference(x, step):
        step += 1
        x /= step

    counted = Operator(
        name="counted",
        axes={"N": "elements"},
        inputs=inputs,
        reference=reference,
        mutates=("x", "step"),
        cost=lambda w, d: Cost(4 * w["N"], 4 * w["N"]),
        dtypes=("fp32",),
        workloads={"verify": [workload(N=5)]},
    )

    def forgetful(x, step):
        x /= step + 1

    assert_right(counted, reference)
    assert_wrong(counted, forgetful)


def test_in_place_operators_are_judged_fairly_in_a_bench():
    """Every implementation of a comparison is judged on the arguments that it was given."""
    timed = adamw_operator()
    timed.implementation("foreach")(adamw_foreach)
    timed.implementation("torch")(adamw_reference)
    timed.implementation("wrong")(adamw_with(copied("exp_avg")))
    said: list[str] = []
    bench = compare.Bench(DEVICE, Ceilings(DEVICE), budget_s=0.0, say=said.append)
    measured = bench.compare(timed, timed.parse("T=3,P=100", "fp32"), "forward", timed.implementations.values())
    assert [m.implementation for m in measured] == ["foreach", "torch", "wrong"]
    assert len(said) == 1 and said[0].startswith("adamw/wrong")
    assert all(m.error <= 1 for m in measured[:2]) and measured[2].error > 1

"""CPU against GPU, with and without the transfers, of the operators that have a set of workloads ``transfers``."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from weft.bench import cases
from weft.definition import Implementation, Operator, Workload
from weft.records import Measurement
from weft.timing import Timer

Call = Callable[[], torch.Tensor]


def measure(bench: Any, op: Operator, *, quick: bool = False) -> list[Measurement]:
    """The peers that run on a CPU (NumPy, PyTorch) and, with a GPU, PyTorch and our first kernel on it, these two also with
    the copies to the GPU and back. ``details`` holds the speed-up over NumPy and the largest error, as a multiple of the
    root mean square of the float64 result.

    Wall time on the host until the result is there, fp32 throughout, warm caches. The operator returns one tensor.
    """
    found: list[Measurement] = []
    timer = Timer("cpu", budget_s=0.3, least=3, most=20)
    for w in op.cases("transfers"):
        if quick and max(w.axes.values()) > 1024:
            continue
        arguments = op.inputs(w, torch.Generator().manual_seed(3), "cpu")
        want = op.reference(**cases.map_tensors(torch.Tensor.double, arguments))
        calls = _calls(bench, op, w, arguments)
        times = timer.measure({name: [call] for name, call in calls.items()})
        numpy_us = times["numpy"].median_us
        for name, call in calls.items():
            us = times[name].median_us
            error = float((call().cpu().double() - want).abs().max() / want.square().mean().sqrt())
            found.append(
                Measurement(
                    operator=op.name,
                    implementation=name,
                    direction="forward",
                    workload=str(w),
                    dtype="fp32",
                    time_us=float(f"{us:.5g}"),
                    metric="wall time",
                    cache="warm",
                    time_p20_us=times[name].quantile(0.2),
                    time_p80_us=times[name].quantile(0.8),
                    repetitions=len(times[name].times_us),
                    host_us=float(f"{times[name].host_us:.5g}"),
                    flops=op.cost(w, "forward").flops,
                    **bench.context(),
                    details={"speedup_over_numpy": float(f"{numpy_us / us:.4g}"), "max_error": float(f"{error:.3g}")},
                )
            )
    return found


def _calls(bench: Any, op: Operator, w: Workload, arguments: dict[str, Any]) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for made in op.implementations.values():
        if not made.ours and "cpu" in made.devices:
            name = made.name if "cuda" not in made.devices else f"{made.name}, CPU"
            calls[name] = functools.partial(made.function, **arguments)
    if bench.device != "cuda":
        return calls
    ours = (i for i in op.implementations.values() if i.ours and i.rung is None and bench.present(op, i, w, "forward"))
    there = cases.map_tensors(torch.Tensor.cuda, arguments)
    for made in (op.find("torch"), *list(ours)[:1]):
        calls[f"{made.name}, GPU"] = functools.partial(_finished, made, there)
        calls[f"{made.name}, GPU with transfers"] = functools.partial(_with_transfers, made, arguments)
    return calls


def _finished(made: Implementation, arguments: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = made.function(**arguments)
    torch.cuda.synchronize()
    return result


def _with_transfers(made: Implementation, arguments: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = made.function(**cases.map_tensors(torch.Tensor.cuda, arguments)).cpu()
    return result

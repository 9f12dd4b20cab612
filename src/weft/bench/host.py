"""``weft bench --host``: what a call costs on the host, on inputs so small that this is all it costs.

Timed for the public function and for PyTorch, each without and with a gradient wanted, and for the bare launch of the same
kernel through Triton (``kernel[grid](…)``, output already allocated), the baseline. They are interleaved, so that
what slows the host for a while slows all of them; times and ratios are medians over the rounds.
"""

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weft.bench import cases
from weft.definition import Operator, Workload
from weft.operators.launch import Plan
from weft.records import Measurement
from weft.timing import host_time_us


def measure(bench: Any, operators: Iterable[Operator]) -> Iterator[Measurement]:
    """Host time of each operator in fp32, as it is measured: on its first ``host`` workload, or without one on its first
    ``quick`` one shrunk to at most 32 Ki elements."""
    for op in operators:
        w = small(op)
        arguments = op.inputs(w, torch.Generator(bench.device).manual_seed(4), bench.device)
        calls = _calls(op, arguments)
        rounds = [{name: host_time_us(call, 60) for name, call in calls.items()} for _ in range(ROUNDS)]
        for name in calls:
            us = statistics.median(times[name] for times in rounds)
            ratios = [times[name] / times[BARE] for times in rounds if BARE in times]
            details = {"ratio_to_bare_launch": round(statistics.median(ratios), 3)} if ratios else {}
            yield Measurement(
                operator=op.name,
                implementation=name,
                direction="forward",
                workload=str(w),
                dtype=w.dtype,
                time_us=float(f"{us:.4g}"),
                ours=name.startswith("weft"),
                metric="host time",
                cache="warm",
                host_us=float(f"{us:.4g}"),
                details=details,
                **bench.context(),
            )


BARE = "bare Triton launch"
ROUNDS = 9


def small(op: Operator) -> Workload:
    if "host" in op.workloads:
        return next(iter(op.cases("host"))).at("fp32")
    w = next(iter(op.cases("quick"))).at("fp32")
    axes = dict(w.axes)
    while _product(axes) > 2**15:
        largest = max(axes, key=lambda a: axes[a])
        axes[largest] //= 2
    return Workload(axes, w.dtype, w.options)


def _product(axes: dict[str, int]) -> int:
    size = 1
    for value in axes.values():
        size *= value
    return size


def _calls(op: Operator, arguments: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    assert op.public is not None  # every operator has one
    functions = {"weft.ops": op.public}
    if "torch" in op.implementations:
        functions["torch"] = op.implementations["torch"].function
    wanted = {n: cases.map_tensors(cases.leaf, a) if n in op.differentiable else a for n, a in arguments.items()}
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(function, **arguments) for name, function in functions.items()
    }
    if op.differentiable:
        for name, function in functions.items():
            calls[f"{name}, gradient wanted"] = functools.partial(function, **wanted)
    calls["weft.ops"]()
    with _recording() as launches:
        calls["weft.ops"]()
    if launches:
        plan, tensors = launches[-1]
        kernel, options = plan.kernel, {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
        rest, constants, grid = plan.scalars, plan.constants, plan.grid
        calls[BARE] = lambda: kernel[grid](*tensors, *rest, **constants, **options)
    return calls


@contextlib.contextmanager
def _recording() -> Iterator[list[tuple[Plan, tuple[torch.Tensor, ...]]]]:
    """Collects the Triton launches made within it."""
    launches: list[tuple[Plan, tuple[torch.Tensor, ...]]] = []
    launch = Plan.__call__

    def call(self: Plan, *tensors: torch.Tensor) -> None:
        launches.append((self, tensors))
        launch(self, *tensors)

    Plan.__call__ = call  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        Plan.__call__ = launch  # type: ignore[method-assign]

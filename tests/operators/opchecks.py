"""Finds every PyTorch operator that weft's implementations call, with arguments as they were called, and puts each through
``torch.library.opcheck``: schema, autograd registration, fake tensors, and the same under AOT autograd with dynamic shapes.

    python opchecks.py               # on the CPU, where the operators run their references; the interpreter must not be on
    python opchecks.py FIRST STEP    # every STEP-th form of an operator, beginning with FIRST
"""

import contextlib
import functools
import itertools
import sys
import unittest.mock
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft import registry
from weft.bench import cases
from weft.definition import Declined

# called while a compiler traces and not otherwise: test_compiler_operators.py
BY_COMPILERS = {
    f"weft::{name}" for name in ("attention", "attention_backward", "linear_cross_entropy", "rotary_embedding")
}
Sample = tuple[Any, tuple[Any, ...], str]  # operator overload, arguments, direction it was called in


@contextlib.contextmanager
def what_runs_here():
    """Leaves out what declines, and on a CPU what launches its kernel itself instead of calling an operator."""
    try:
        yield
    except Declined:
        pass
    except RuntimeError as error:
        if "active drivers" not in str(error):
            raise


class Recorder(TorchDispatchMode):
    """Notes each weft operator that is called, with copies of its arguments: of each operator and form the largest call,
    so that kernels for long rows are launched as such."""

    def __init__(self):
        super().__init__()
        self.direction, self.samples, self.elements = "", {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "weft":
            form = (str(func), *(a is None for a in args))
            elements = sum(t.numel() for t in cases.tensors(args))
            if elements > self.elements.get(form, 0):
                copies = tuple(cases.map_tensors(cases.clone, cases.map_tensors(torch.detach, a)) for a in args)
                self.samples[form], self.elements[form] = (func, copies, self.direction), elements
        return func(*args, **(kwargs or {}))


def as_if_traced(function: Any, tracing: bool) -> Any:
    """Within it, what a function's module does only where a compiler looks on, it does with plain tensors."""
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", ""))
    if not tracing or not hasattr(module, "traced"):
        return contextlib.nullcontext()
    return unittest.mock.patch.object(module, "traced", lambda *tensors: True)


def registered() -> set[str]:
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("weft::")}


def samples(device: str) -> list[Sample]:
    """Runs what is ours and runs on the device, in both directions, on the verify workloads."""
    recorder = Recorder()
    for op in registry.select():
        if f"weft::{op.name}" not in registered():
            continue  # where something traces, it stands back for PyTorch's own operators
        for made in op.implementations.values():
            if not made.ours or made.rung is not None or made.absent(device):
                continue
            dtype = "fp32" if not made.dtypes or "fp32" in made.dtypes else made.dtypes[0]
            for w in op.cases("verify", [dtype]):
                drawn = op.inputs(w, torch.Generator(device).manual_seed(0), device)
                if not all(t.numel() for t in cases.tensors(drawn)) or w.option("values"):
                    continue
                directions = made.directions or op.directions
                for recorder.direction, tracing in itertools.product(directions, (False, True)):
                    with recorder, what_runs_here(), as_if_traced(made.function, tracing):
                        cases.results(op, made.function, recorder.direction, cases.map_tensors(cases.clone, drawn))
                        if recorder.direction == "forward" and "backward" in directions:
                            cases.results(op, made.function, "backward", cases.map_tensors(cases.clone, drawn))
    return list(recorder.samples.values())


def opcheck(sample: Sample) -> None:
    """Raises what PyTorch finds wrong; arguments of operators called in the forward direction want gradients."""
    func, arguments, direction = sample
    if direction == "forward" and "backward" not in str(func):
        for t in cases.tensors(arguments):
            if t.is_floating_point():
                t.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about what opcheck itself calls
        torch.library.opcheck(func, arguments)


def main(first: int = 0, step: int = 1) -> int:
    # with more, how a reference's product is divided, and so its last bits, differs between calls
    torch.set_num_threads(1)
    found = samples("cpu")
    for sample in found[first::step]:
        opcheck(sample)
    sys.stdout.write(" ".join(sorted({sample[0].name() for sample in found})) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

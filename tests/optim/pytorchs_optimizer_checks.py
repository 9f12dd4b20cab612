"""PyTorch's own list of what its optimizers take and refuse (``torch.testing._internal.common_optimizers``), put to those of
``weft.optim``: what tests of the optimizers start.

python pytorchs_optimizer_checks.py [FIRST STEP]    # all mistakes, and every STEP-th way to take, beginning with FIRST

In a process of its own: the module that the list comes from forbids flags of ``torch.backends`` to be set for good.
"""

import copy
import io
import re
import sys
import types
import unittest
import warnings

import torch

from weft import optim
from weft.hardware.query import has_gpu
from weft.operators.orthogonalization.dispatch import IterationCall

try:
    import expecttest  # noqa: F401
except ModuleNotFoundError:  # which the list's module inherits its test cases from, and the list has none
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)

warnings.simplefilter("ignore")  # of the list's module
from torch.testing._internal import common_optimizers as pytorchs  # noqa: E402

DEVICE = "cuda" if has_gpu() else "cpu"
if DEVICE == "cpu":
    import quick_interpreter  # noqa: F401
SHAPES = ((4, 6), (8, 3), (1, 5))
STEPS = 3
IterationCall.on_gpu = property(lambda call: call.x.is_cuda)  # PyTorch's products: interpreted ones in bf16 are wrong
OURS = ("Adam", "AdamW", "MuonW", "SGD")
# What ours take all the same: their one way needs no flag for tensors, and a parameter that is no matrix takes AdamW.
TAKEN = ("as a Tensor is not supported", "must be either both floats or both Tensors", "only supports 2D parameters")


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(DEVICE)) for s in SHAPES]


def steps(params, optimizer, of=range(STEPS)):
    for step in of:
        generator = torch.Generator().manual_seed(1 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)
        optimizer.step()


def apart(mine, theirs) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(mine, theirs, strict=True))


def compared(kind, theirs, options, bound):
    """Problems with a configuration that PyTorch's optimizer has to take."""
    mine, other = parameters(), parameters()
    a, b = kind(mine, **copy.deepcopy(options)), theirs(other, **copy.deepcopy(options))
    steps(mine, a)
    steps(other, b)
    if not apart(mine, other) <= bound:
        yield f"weights are {apart(mine, other):.1e} apart"
    for p in mine:
        p.grad = None
    before = [p.detach().clone() for p in mine]
    a.step()
    if apart(mine, before):
        yield "a step without gradients changes weights"
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    went_on = {}
    for who, make in (("weft.optim", kind), ("torch.optim", theirs)):
        went_on[who] = [torch.nn.Parameter(p.detach().clone()) for p in mine]
        loaded = make(went_on[who], **copy.deepcopy(options))
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        steps(went_on[who], loaded, [STEPS])
    steps(mine, a, [STEPS])
    for who, params in went_on.items():
        if not apart(params, mine) <= (0 if who == "weft.optim" else bound):
            yield f"saved and resumed by {who}, weights are {apart(params, mine):.1e} apart"


def refused(ours, given):
    """Problems with a mistake that PyTorch's optimizer has to refuse."""
    wrong = given.optimizer_error_input
    params = parameters() if wrong.params is None else wrong.params
    late = given.error_on == pytorchs.OptimizerErrorEnum.STEP_ERROR
    kind = ValueError if given.error_type is UserWarning else given.error_type  # we refuse what PyTorch only warns of
    try:
        optimizer = ours(params, **wrong.kwargs)
        if late:
            optimizer.step()
    except Exception as error:
        if not isinstance(error, kind) or not re.search(given.error_regex, str(error)):
            yield f"expected {kind.__name__} {given.error_regex!r}; there was {type(error).__name__} {str(error)!r}"
    else:
        yield f"expected {kind.__name__} {given.error_regex!r}; there was none"


def main(first: int = 0, step: int = 1) -> None:
    count, found = 0, []
    known = {info.optim_cls.__name__: info for info in pytorchs.optim_db}
    for name in OURS:
        info = known.get("Muon" if name == "MuonW" else name)
        if info is None:  # an older PyTorch without it
            continue
        bound = 0.05 if name == "MuonW" else 1e-5  # an orthogonalisation in 16 bits, of which each rounds its own way
        named = {"skip": ("differentiable",)}
        inputs = pytorchs._get_optim_inputs_including_global_cliquey_kwargs(DEVICE, torch.float32, info, **named)
        inputs = inputs[first % len(inputs) :: step]
        kind = getattr(optim, name)
        cases = [(of.desc or "", of.kwargs, compared(kind, info.optim_cls, of.kwargs, bound)) for of in inputs]
        for given in info.optim_error_inputs_func(DEVICE, torch.float32):
            if not any(words in given.error_regex for words in TAKEN):
                wrong = given.optimizer_error_input
                cases.append((wrong.desc, wrong.kwargs, refused(kind, given)))
        for what, options, problems in cases:
            count += 1
            found += [f"{name}, {what} {options}: {problem}" for problem in problems]
    sys.stdout.write("\n".join([*found, f"{count} cases\n"]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

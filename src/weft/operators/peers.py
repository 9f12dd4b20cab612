"""What a user has without weft: implementations that ours are compared with."""

import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch

from weft.definition import Operator

MODES = ("default", "max-autotune-no-cudagraphs")


def register(
    operator: Operator, eager: Callable[..., Any], compiled: Callable[..., Any] | None = None, **declared: Any
) -> None:
    """What a user writes in PyTorch as ``torch``, and that (or ``compiled``, as ``declared``) as ``torch.compile``."""
    operator.implementation("torch")(eager)
    operator.implementation("torch.compile", devices=("cuda",), **declared)(Compiled(compiled or eager))


class Compiled:
    """``torch.compile`` in its better mode: compiles a function in each mode on first use, keeps the faster.

    CUDA graphs are left out of the autotuned mode so that all implementations are launched alike. ``mode`` says which
    one won the last choice. Call :meth:`reset` before another shape: each is compiled as static.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.chosen: Callable[..., Any] | None = None
        self.modes: tuple[str, ...] = MODES
        self.mode = ""

    def __call__(self, **args: Any) -> Any:
        if self.chosen is None:
            self.choose(**args)
        assert self.chosen is not None  # choose() set it
        return self.chosen(**args)

    def reset(self, modes: tuple[str, ...] = MODES) -> None:
        torch._dynamo.reset()
        self.chosen, self.modes = None, modes

    def choose(self, **args: Any) -> None:
        """Times each mode on these arguments (forward, and backward where an argument wants a gradient)."""
        modes = self.modes
        if not any(isinstance(a, torch.Tensor) and a.is_cuda for a in args.values()):
            modes = modes[:1]  # on a CPU the second mode brings nothing and doubles a slow compilation
        timed = []
        functorch.donated_buffer = False  # the timer calls one graph's backward many times
        for mode in modes:
            candidate = torch.compile(self.function, dynamic=False, mode=mode)
            seconds = 0.0
            if len(modes) > 1:
                with _autotuner_silent():
                    for _ in range(3):
                        _once(candidate, args)
                    seconds = self.seconds(candidate, args)
            timed.append((seconds, mode, candidate))
        _, self.mode, self.chosen = min(timed, key=lambda t: t[0])

    @staticmethod
    def seconds(function: Callable[..., Any], args: dict[str, Any]) -> float:
        """That five calls take, at best."""
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                _once(function, args)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best


@contextlib.contextmanager
def _autotuner_silent() -> Iterator[None]:
    """Without Inductor's table of every matrix product that it tried, and the errors of those that do not fit."""
    logger = logging.getLogger("torch._inductor.select_algorithm")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _once(function: Callable[..., Any], args: dict[str, Any]) -> None:
    out = function(**args)
    wanted = [a for a in args.values() if isinstance(a, torch.Tensor) and a.requires_grad]
    if wanted:
        outputs = (out,) if isinstance(out, torch.Tensor) else out
        torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs])

"""Time on a GPU, taken by the checker's clock: half of this runs in the learner's process, half in the checker's.

The learner's process stages copies of the inputs, each rolled by another secret number, so that none is in cache from the call
before. In each round all of them are changed by a secret amount; then the checker asks for one call on each copy, and stops
its own clock when the whole device is idle and the answer has come. The shortest empty round trip is subtracted: on a busy
machine the usual one may take longer than the calls, which would then take no time. After the last round
some outputs, drawn only then, must be right. So it helps nothing to patch a timer, to work on another stream, to remember
outputs, or to compute fewer of them.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROUNDS = 9
COPIES = 16
LOOKED_AT = 8  # of 4, all were right in 1 of 26 runs that left out every second call; of 8 in 1 of 12,870


class Runs:
    """In the learner's process: the staged inputs, and the calls on them."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.wait = torch.cuda.synchronize  # for all streams; kept before the learner's file is loaded
        self.change = changed

    def do(self, request: dict[str, Any], target: Any) -> Any:
        what = request["do"]
        if what == "stage":
            self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
            self.target = target
            args = [x.to(self.device) if isinstance(x, self.torch.Tensor) else x for x in request["args"]]
            self.sets = [rolled(args, by) for by in request["rolls"]]
            self.outputs = [target(*args) for args in self.sets]  # compiles, and fills the allocator
        elif what == "change":
            for args in self.sets:
                self.change(args, request["by"])
        elif what == "go":
            self.outputs = [self.target(*args) for args in self.sets]
        elif what == "outputs":
            chosen = [self.outputs[i] for i in request["which"]]
            return [x.cpu() if type(x) is self.torch.Tensor else x for x in chosen]
        if self.device == "cuda":
            self.wait()
        return None


def rolled(args: list[Any], by: int) -> list[Any]:
    """Copies of the arguments, the elements of float tensors moved along by so many places."""
    return [x.flatten().roll(by).view(x.shape) if _floats(x) else x for x in args]


def changed(args: list[Any], by: float) -> None:
    """Adds 0 to 7 times ``by`` to the elements of float tensors, in turn: what adds a constant may leave a result as it was."""
    import torch

    for x in args:
        if _floats(x):
            pattern = (torch.arange(x.numel(), device=x.device) % 8).view(x.shape)
            x.add_((pattern * by).to(x.dtype))


def _floats(x: Any) -> bool:
    return hasattr(x, "is_floating_point") and x.is_floating_point()


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call, cold, and some outputs with the inputs that they belong to."""

    us: float
    outputs: list[Any]
    inputs: list[list[Any]]


def measure(request: Callable[..., Any], base: int | None, path: list[str], args: list[Any], rng: Any) -> Timing:
    """In the checker: stages the inputs, and times rounds of one call on each copy.

    Args:
        request: ``Process.request``.
        args: Of a call. Float tensors in them are rolled and changed, in the learner's process and here alike.
        rng: NumPy's generator, for the secret numbers.
    """
    rolls = [int(r) for r in rng.integers(0, 1 << 20, COPIES)]
    request(do="stage", base=base, path=path, args=args, rolls=rolls)
    rounds: list[float] = []
    idle: list[float] = []
    amounts = [float(k) / 1024 for k in rng.integers(-63, 64, ROUNDS) | 1]  # small, and exact in every float type
    for by in amounts:
        request(do="change", by=by)
        for kept, what in ((idle, "idle"), (rounds, "go")):
            start = time.perf_counter()
            request(do=what)
            kept.append(time.perf_counter() - start)
    seconds = max(statistics.median(rounds) - min(idle), 1e-9) / COPIES
    which = [int(i) for i in rng.choice(COPIES, LOOKED_AT, replace=False)]
    inputs = [rolled(args, rolls[i]) for i in which]
    for by in amounts:
        for copy in inputs:
            changed(copy, by)
    return Timing(seconds * 1e6, request(do="outputs", which=which), inputs)

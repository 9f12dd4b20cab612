"""Time on a GPU, taken by the checker's clock: half of this runs in the learner's process, half in the checker's.

The learner's process stages several sets of inputs, so that none is in cache from the call before. In each round all inputs
are changed by a secret number, then the checker asks for one call on each set, and stops its own clock when the whole device
is idle and the answer has come. An empty round trip is subtracted. After the last round all outputs must be right. So it helps
nothing to patch a timer, to work on another stream, to remember outputs, or to compute fewer of them.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROUNDS = 9


class Runs:
    """In the learner's process: the staged inputs, and the calls on them."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.wait = torch.cuda.synchronize  # all streams; kept before the learner's file is loaded
        self.add = torch.Tensor.add_

    def do(self, request: dict[str, Any], target: Any) -> Any:
        what = request["do"]
        if what == "stage":
            self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
            self.target = target
            self.sets = [[self._moved(x) for x in args] for args in request["sets"]]
            self.outputs = [target(*args) for args in self.sets]  # compiles, and fills the allocator
        elif what == "nudge":
            for x in (x for args in self.sets for x in args):
                if isinstance(x, self.torch.Tensor) and x.is_floating_point():
                    self.add(x, request["by"])
        elif what == "go":
            self.outputs = [self.target(*args) for args in self.sets]
        elif what == "outputs":
            return [x.cpu() if type(x) is self.torch.Tensor else x for x in self.outputs]
        if self.device == "cuda":
            self.wait()
        return None

    def _moved(self, x: Any) -> Any:
        return x.to(self.device) if isinstance(x, self.torch.Tensor) else x


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call, cold, and the outputs with the inputs that they belong to."""

    us: float
    outputs: list[Any]
    inputs: list[list[Any]]


def measure(request: Callable[..., Any], base: int | None, path: list[str], sets: list[list[Any]], rng: Any) -> Timing:
    """In the checker: stages the sets, and times rounds of one call on each.

    Args:
        request: ``Process.request``.
        sets: Arguments of each call; float tensors in them are changed between rounds, here and there alike.
        rng: NumPy's generator, for the secret numbers.
    """
    import torch

    request(do="stage", base=base, path=path, sets=sets)
    rounds: list[float] = []
    idle: list[float] = []
    for _ in range(ROUNDS):
        by = float(rng.integers(1, 64)) / 64  # exact in every float type
        request(do="nudge", by=by)
        for args in sets:
            for x in args:
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    x.add_(by)
        for kept, what in ((idle, "idle"), (rounds, "go")):
            start = time.perf_counter()
            request(do=what)
            kept.append(time.perf_counter() - start)
    seconds = max(statistics.median(rounds) - statistics.median(idle), 1e-9) / len(sets)
    return Timing(seconds * 1e6, request(do="outputs"), sets)

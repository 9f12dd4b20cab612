"""``weft bench``: times implementations side by side, as a share of the ceiling and against the best peer in the run.

For one workload, dtype and direction all implementations are bound to the same input sets, checked against float64,
timed in turn, and checked again after timing.
"""

import gc
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.bench import cases
from weft.bench.gpu_lock import GpuLock, NoLock
from weft.bench.time_limit import time_limit
from weft.definition import Declined, Implementation, Operator, UnknownName, Workload
from weft.hardware import query
from weft.hardware.ceilings import Ceilings
from weft.operators.peers import MODES, Compiled
from weft.records import Measurement
from weft.timing import ImpossibleTime, Timer, Timing, paired_ratio

IN_CACHE_BYTES = 2**28  # warm working sets below this may lie in a CPU's or GPU's last-level cache
PREPARE_S = 180.0  # that a peer may compile, tune itself and run once, also while other processes are at work
CHECK_BYTES_PER_ELEMENT = 96  # of the largest argument


class LostDevice(RuntimeError):
    """A kernel's fault, after which a process can do nothing on the device; ``implementation`` made it."""

    def __init__(self, message: str, implementation: str):
        super().__init__(message)
        self.implementation = implementation


@dataclass
class Bench:
    """One run on one machine: what is measured in it is comparable."""

    device: str  # ``cuda`` or ``cpu``
    ceilings: Ceilings  # this machine's
    cold: bool = True  # flush the L2 before each call
    budget_s: float = 0.5  # time for the repetitions of one comparison
    quick: bool = (
        False  # ``torch.compile`` in its default mode only; autotuning a matrix product takes most of a minute
    )
    say: Callable[[str], None] = lambda text: None  # called with what is left out, and why
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    sets: int = 2
    lock: GpuLock | NoLock = field(default_factory=NoLock)  # held while timing, where other processes measure here too

    def __post_init__(self) -> None:
        self.timer = Timer(self.device, cold=self.cold, budget_s=self.budget_s)
        self.sm = (
            torch.cuda.get_device_capability()[0] * 10 + torch.cuda.get_device_capability()[1]
            if self.device == "cuda"
            else None
        )

    def compare(
        self, op: Operator, w: Workload, direction: str, implementations: Iterable[Implementation]
    ) -> list[Measurement]:
        """Measures one workload in one direction. Implementations that cannot run are left out, with a message."""
        present = [i for i in implementations if self.present(op, i, w, direction)]
        if not present:
            return []
        g = torch.Generator(self.device).manual_seed(1)
        try:
            drawn = [op.inputs(w, g, self.device) for _ in range(self.sets)]
        except ValueError as error:
            self.say(f"{op.name} {w} {w.dtype}: {error}")
            return []
        gradients: list[Any] = [None] * self.sets
        if direction == "backward":
            with torch.no_grad():
                gradients = [cases.output_gradients(op, w, op.reference(**d), g) for d in drawn]
        calls: dict[str, Sequence[Callable[[], Any]]] = {}
        fresh = cases.map_tensors(cases.clone, drawn[0]) if op.mutates else drawn[0]  # timing changes what it mutates
        for made in present:
            if isinstance(made.function, Compiled):
                made.function.reset(MODES[:1] if self.quick else MODES)
            try:
                with time_limit(PREPARE_S if not made.ours else 0.0):
                    ready = [
                        cases.bind(op, made.function, direction, d, grads)
                        for d, grads in zip(drawn, gradients, strict=True)
                    ]
                    ready[0][0]()
                    self._finish()  # a lock holder waits, with all others stopped, for what is queued
            except Declined as declined:
                self.say(f"{op.name}/{made.name} declines {w}: {declined}")
                continue
            except torch.cuda.OutOfMemoryError:
                self.say(f"{op.name}/{made.name} at {w} {w.dtype}: out of memory")
                continue
            except Exception as error:  # a failing peer is left out; a failing kernel of ours fails in verify
                self.say(f"{op.name}/{made.name} at {w} {w.dtype} failed: {type(error).__name__}: {str(error)[:200]}")
                self._still_there(made.name)
                continue
            calls[made.name] = [call for call, _ in ready]
        if not calls:
            return []
        least_us = self._least_us(op.cost(w, direction))
        timings: dict[str, Timing] = {}
        while calls and not timings:
            try:
                with self.lock.timing():
                    timings = self.timer.measure(calls, least_us=least_us)
            except ImpossibleTime as impossible:  # it begins with the name
                self.say(f"left out of {op.name} {direction} at {w} {w.dtype}: {impossible}")
                del calls[str(impossible).partition(":")[0]]
        if not calls:
            return []
        ran = [i for i in present if i.name in calls]
        memory = {name: self._peak_mib(sets[0]) for name, sets in calls.items()}
        calls.clear()
        del drawn, ready  # a float64 check takes several times the memory of what was timed
        with self.lock.checking():
            errors, wrong = self._check(op, w, direction, fresh, gradients[0], ran)
        for name in wrong:
            self.say(f"{op.name}/{name} at {w} {w.dtype} {direction} is wrong: {wrong[name]}")
        return list(self._measurements(op, w, direction, ran, timings, errors, wrong, memory))

    def present(self, op: Operator, made: Implementation, w: Workload, direction: str) -> bool:
        """Whether an implementation takes this point on this machine; if not, ``say`` gets the reason."""
        if made.directions and direction not in made.directions:
            return False
        if made.dtypes and w.dtype not in made.dtypes:
            self.say(f"{op.name}/{made.name}: takes {', '.join(made.dtypes)}, not {w.dtype}")
            return False
        if made.ours and self.device == "cpu":
            self.say(f"{op.name}/{made.name}: needs a GPU; the interpreter's time says nothing")
            return False
        if reason := made.absent(self.device, self.sm):
            self.say(f"{op.name}/{made.name}: {reason}")
            return False
        return True

    def _least_us(self, cost: Any) -> float:
        bandwidth = query.theoretical_bandwidth() if self.timer.cold else 0.0
        return cost.bytes_moved / bandwidth * 1e6 if bandwidth else 0.0

    def _check(
        self, op: Operator, w: Workload, direction: str, arguments: Any, gradients: Any, bound: list[Implementation]
    ) -> tuple[dict[str, float | None], dict[str, str]]:
        """Errors as shares of the tolerance, and for each wrong result the reason."""
        try:
            if self.device == "cuda" and bytes_of_check(arguments) > torch.cuda.mem_get_info()[0]:
                raise torch.cuda.OutOfMemoryError
            return self._judged(op, w, direction, arguments, gradients, bound)
        except torch.cuda.OutOfMemoryError:
            self.say(f"{op.name} at {w} {w.dtype}: too little memory for a float64 check; times are unchecked")
            return {made.name: None for made in bound}, {}

    def _judged(
        self, op: Operator, w: Workload, direction: str, arguments: Any, gradients: Any, bound: list[Implementation]
    ) -> tuple[dict[str, float | None], dict[str, str]]:
        baseline = cases.Baseline.of(op, w, direction, arguments, gradients)
        errors: dict[str, float | None] = {}
        wrong: dict[str, str] = {}
        for made in bound:
            mine = cases.map_tensors(cases.clone, arguments)
            verdict = baseline.judge(cases.results(op, made.function, direction, mine, gradients))
            del mine
            errors[made.name] = verdict.share
            if not verdict.ok:
                wrong[made.name] = verdict.reason
        return errors, wrong

    def _peak_mib(self, call: Callable[[], Any]) -> float | None:
        """Peak memory of one call above what was allocated before, its result included."""
        if self.device != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 3)

    def _measurements(
        self,
        op: Operator,
        w: Workload,
        direction: str,
        present: Sequence[Implementation],
        timings: dict[str, Timing],
        errors: dict[str, float | None],
        wrong: dict[str, str],
        memory: dict[str, float | None],
    ) -> Iterator[Measurement]:
        cost = op.cost(w, direction)
        limit_us, limit_name = self.ceilings.limit(cost)
        if self.timer.cache == "warm" and limit_name.startswith("memory") and cost.bytes_moved < IN_CACHE_BYTES:
            limit_us, limit_name = 0.0, ""  # the caches may hold it: memory is not its limit
            self.say(
                f"no share of the ceiling where caches may hold the data: points of less than {IN_CACHE_BYTES >> 20} MiB"
            )
        peers = [i.name for i in present if not i.ours and i.name not in wrong]
        best = min(peers, key=lambda name: timings[name].median_us, default=None)
        for made in present:
            t = timings[made.name]
            right = made.name not in wrong  # a wrong result has no share and no ratio, and is no peer
            ratio = paired_ratio(timings[best], t) if made.ours and right and best else (None, None, None)
            details: dict[str, Any] = {"mode": made.function.mode} if isinstance(made.function, Compiled) else {}
            if op.predicted:
                details["predicted_share"] = _short(op.predicted(w, direction))
            if made.name in wrong:
                details["wrong"] = wrong[made.name]
            yield Measurement(
                operator=op.name,
                implementation=made.name,
                direction=direction,
                workload=str(w),
                dtype=w.dtype,
                time_us=float(f"{t.median_us:.5g}"),
                ours=made.ours,
                cache=self.timer.cache,
                time_p20_us=_short(t.quantile(0.2)),
                time_p80_us=_short(t.quantile(0.8)),
                repetitions=len(t.times_us),
                host_us=_short(t.host_us),
                limit_us=_short(limit_us) if limit_us else None,
                limit_name=limit_name or None,
                share_of_ceiling=round(limit_us / t.median_us, 4) if limit_us and right else None,
                ratio_to_best_peer=_short(ratio[0]),
                ratio_p20=_short(ratio[1]),
                ratio_p80=_short(ratio[2]),
                best_peer=best if made.ours else None,
                bytes_moved=cost.bytes_moved,
                flops=cost.flops,
                peak_memory_mib=memory[made.name],
                error=_short(errors[made.name]),
                **self.context(),
                details=details,
            )

    def context(self) -> dict[str, Any]:
        """The fields of a record that name machine, versions, commit, run and time."""
        return query.context(self.device, self.run_id)

    def _still_there(self, after: str) -> None:
        """Raises LostDevice if this process cannot use the device any more after an implementation's failure."""
        try:
            self._finish()
        except torch.AcceleratorError as error:
            raise LostDevice(str(error).splitlines()[0], after) from error

    def _finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Gives cached device memory back between workloads."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def bytes_of_check(arguments: Any) -> float:
    """Memory that a float64 check takes at its peak."""
    return CHECK_BYTES_PER_ELEMENT * max((t.numel() for t in cases.tensors(arguments)), default=0)


def _short(value: float | None) -> float | None:
    """Five significant digits: what a measurement is worth."""
    return None if value is None else float(f"{value:.5g}")


def points(
    operators: Iterable[Operator],
    which: str,
    *,
    dtypes: Iterable[str] = (),
    directions: Iterable[str] = (),
    workload: str = "",
) -> Iterator[tuple[Operator, Workload, str]]:
    """(operator, workload, direction) of a set, or of one workload that the user names."""
    dtypes, directions, operators = tuple(dtypes), tuple(directions), list(operators)
    known = {name for op in operators for name in op.workloads}
    if which not in known:
        raise UnknownName("workload set", which, known)
    for op in operators:
        if workload:
            wanted = [op.parse(workload, d) for d in dtypes or op.dtypes]
        else:
            wanted = list(op.cases(which if which in op.workloads else "bench", dtypes))
        for w in wanted:
            for direction in op.directions:
                if not directions or direction in directions:
                    yield op, w, direction

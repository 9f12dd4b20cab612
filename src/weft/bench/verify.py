"""``weft verify``: every implementation that is ours against the float64 reference, and every mutant rejected.

Without a GPU, Triton kernels run in Triton's interpreter in fp32 and fp16; what cannot be verified so (bf16, CUDA C++)
is reported as *unverifiable*, never as passed.
"""

import functools
import itertools
import math
import multiprocessing
import queue
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from weft.bench import cases
from weft.bench.errors import Verdict
from weft.definition import Declined, Implementation, Mutant, Operator, UnknownName, Workload

MUTANTS_SHARE = 1 / 3  # of the budget, spent on mutants after the first check of each implementation
PUBLIC = "weft.ops"  # the public function, verified like an implementation: it covers the hand-over and the CPU path


@dataclass(frozen=True)
class Result:
    """One check. ``status`` is pass, fail, unverifiable or declined; ``error`` is a share of what is allowed."""

    operator: str
    implementation: str
    direction: str
    workload: str
    dtype: str
    status: str
    error: float | None = None
    reason: str = ""
    reproduce: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """What is to be run for one result."""

    operator: Operator
    implementation: str
    direction: str
    workload: Workload
    run: Callable[..., Any]

    def result(self, status: str, verdict: Verdict | None = None, reason: str = "", **more: Any) -> Result:
        share = verdict.share if verdict and verdict.share is not None and math.isfinite(verdict.share) else None
        reason = reason or (verdict.reason if verdict else "")
        named = (self.operator.name, self.implementation, self.direction, str(self.workload), self.workload.dtype)
        return Result(*named, status, share, reason, self.command(), **more)

    def command(self) -> str:
        return (
            f"weft verify {self.operator.name} --implementation {self.implementation} --direction {self.direction} "
            f"--dtype {self.workload.dtype} --workload {self.workload}"
        )


def unverifiable(implementation: Implementation, dtype: str, device: str) -> str:
    """Why this implementation cannot be verified on this machine (an empty string when it can)."""
    if device == "cuda":
        return implementation.absent(
            "cuda", torch.cuda.get_device_capability()[0] * 10 + torch.cuda.get_device_capability()[1]
        )
    if implementation.backend != "triton":
        return f"{implementation.backend} code runs on a GPU only"
    if dtype == "bf16":
        return "Triton's interpreter computes bf16 wrongly"
    return ""


def checks(
    operators: Iterable[Operator],
    device: str,
    *,
    implementation: str = "",
    direction: str = "",
    dtypes: Iterable[str] = (),
    workload: str = "",
    full: bool = False,
) -> Iterator[Check | Result]:
    """A result for what cannot be checked here, then all that is to be checked, breadth first (every operator's first workload
    before any second)."""
    per_operator = [list(_of(op, device, implementation, direction, tuple(dtypes), workload, full)) for op in operators]
    yield from (c for each in per_operator for c in each if isinstance(c, Result))
    for row in itertools.zip_longest(*([c for c in each if isinstance(c, Check)] for each in per_operator)):
        yield from (c for c in row if c is not None)


def _of(
    op: Operator, device: str, named: str, direction: str, dtypes: tuple[str, ...], workload: str, full: bool
) -> Iterator[Check | Result]:
    if direction and direction not in ("forward", "backward"):
        raise UnknownName("direction", direction, ("forward", "backward"))
    if named and named != PUBLIC:
        op.find(named)
    sets = ["verify", *(["full"] if full and "full" in op.workloads else [])]
    if full and device == "cuda" and "huge" in op.workloads:
        sets.append("huge")
    points = (
        [op.parse(workload, d) for d in dtypes or op.dtypes]
        if workload
        else [w for s in sets for w in op.cases(s, dtypes)]
    )
    ours = [i for i in op.implementations.values() if i.ours and (not named or i.name == named)]
    for d in op.directions:
        if direction and d != direction:
            continue
        for made in ours:
            if made.directions and d not in made.directions:
                continue
            for dtype in dict.fromkeys(w.dtype for w in points):
                if made.dtypes and dtype not in made.dtypes:
                    continue
                if reason := unverifiable(made, dtype, device):
                    yield Result(op.name, made.name, d, "*", dtype, "unverifiable", reason=reason)
    for w in points:
        for d in op.directions:
            if direction and d != direction:
                continue
            for made in ours:
                takes = (not made.directions or d in made.directions) and (not made.dtypes or w.dtype in made.dtypes)
                if takes and not unverifiable(made, w.dtype, device):
                    yield Check(op, made.name, d, w, made.function)
            if op.public and named in ("", PUBLIC) and not (device == "cpu" and w.dtype == "bf16"):
                yield Check(op, PUBLIC, d, w, op.public)


class Draw:
    """A workload's inputs, drawn once, and the baseline that results on them are compared with.

    Raises:
        ValueError: the workload itself is wrong (an unknown layout, say): the operator cannot draw inputs for it.
    """

    def __init__(self, op: Operator, workload: Workload, direction: str, device: str, seed: int):
        self.operator, self.workload, self.direction = op, workload, direction
        self.generator = torch.Generator(device).manual_seed(seed)
        self.arguments = op.inputs(workload, self.generator, device)

    @functools.cached_property
    def gradients(self) -> list[torch.Tensor] | None:
        if self.direction == "forward":
            return None
        with torch.no_grad():
            out = self.operator.reference(**cases.map_tensors(cases.clone, self.arguments))
        return cases.output_gradients(self.operator, self.workload, out, self.generator)

    @functools.cached_property
    def baseline(self) -> cases.Baseline:
        # Computed without PoisonedEmpty: under a dispatch mode PyTorch's gradient of cumprod takes one step an element, and
        # some gradients round differently, which matters where a public function hands over to PyTorch.
        return cases.Baseline.of(self.operator, self.workload, self.direction, self.arguments, self.gradients)

    def judge(self, function: Callable[..., Any]) -> Verdict:
        mine, baseline = cases.map_tensors(cases.clone, self.arguments), self.baseline
        with cases.PoisonedEmpty():
            got = cases.results(self.operator, function, self.direction, mine, self.gradients)
        for name, drawn in self.arguments.items():
            if name not in self.operator.mutates and not _unchanged(drawn, mine[name]):
                return Verdict(False, None, f"argument '{name}' was changed")
        return baseline.judge(got)


def run(check: Check, device: str, seed: int = 0, draws: int = 2, drawn: Callable[[int], Draw] | None = None) -> Result:
    """Runs one check on fresh random inputs, ``draws`` times with different ones (so that stale output shows).

    Args:
        drawn: gives the draw of a seed, where several checks share them.

    Raises:
        ValueError: as :class:`Draw` does.
    """
    start = time.perf_counter()
    worst: Verdict | None = None
    for each in range(seed, seed + draws):
        try:
            draw = drawn(each) if drawn else Draw(check.operator, check.workload, check.direction, device, each)
        except torch.cuda.OutOfMemoryError as error:
            return check.result("unverifiable", reason=_memory(error))
        try:
            verdict = draw.judge(check.run)
        except Declined as declined:
            return check.result("declined", reason=str(declined), seconds=time.perf_counter() - start)
        except torch.cuda.OutOfMemoryError as error:
            return check.result("unverifiable", reason=_memory(error))
        except Exception as error:  # any failure of an implementation is a result
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            return check.result("fail", reason=reason, seconds=time.perf_counter() - start)
        if not verdict.ok:
            return check.result("fail", verdict, seconds=time.perf_counter() - start)
        worst = verdict if worst is None or (verdict.share or 0) > (worst.share or 0) else worst
    return check.result("pass", worst, seconds=time.perf_counter() - start)


def _memory(error: Exception) -> str:
    return f"needs more memory than is free: {str(error).splitlines()[0][:120]}"


def _unchanged(before: Any, after: Any) -> bool:
    return all(
        bool(((b == a) | ((b != b) & (a != a))).all())
        for b, a in zip(cases.tensors(before), cases.tensors(after), strict=True)
    )


def surviving_mutants(op: Operator, mutants: Iterable[Mutant], device: str) -> list[Mutant]:
    """The mutants that pass every ``verify`` workload: for them the verifier or the workloads are too weak."""
    alive = list(mutants)
    for w in op.cases("verify", ("fp32", "fp16") if device == "cpu" else ()):
        for direction in dict.fromkeys(m.direction for m in alive):
            drawn = functools.cache(functools.partial(Draw, op, w, direction, device))
            for mutant in [m for m in alive if m.direction == direction]:
                function = _differentiable(op, mutant.function) if direction == "backward" else mutant.function
                check = Check(op, f"mutant: {mutant.name}", direction, w, function)
                if run(check, device, drawn=drawn).status == "fail":
                    alive.remove(mutant)
    return alive


def _differentiable(op: Operator, gradient: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the reference's forward and a mutant's gradient."""

    def function(**arguments: Any) -> Any:
        leaves = [t for t in cases.tensors([arguments[n] for n in op.differentiable]) if t.is_floating_point()]

        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *_: Any) -> Any:
                return op.reference(**cases.map_tensors(lambda t: t.detach(), arguments))

            @staticmethod
            def backward(ctx: Any, *dy: Any) -> Any:
                return tuple(gradient(*dy, **cases.map_tensors(lambda t: t.detach(), arguments)))

        return Wrong.apply(*leaves)

    return function


def verify(
    operators: list[Operator],
    device: str,
    *,
    seed: int = 0,
    budget_s: float | None = None,
    mutants: bool = True,
    on_result: Callable[[Result], None] | None = None,
    **selection: Any,
) -> dict[str, Any]:
    """Runs all checks and mutants and returns what ``weft verify --json`` prints.

    Args:
        budget_s: start nothing more after this long; what is left is counted under ``not_reached`` (never as passed) and
            ``mutants_not_reached``. The first check of each implementation and direction comes first, then a third of the
            budget goes to mutants, then the other checks follow, breadth first.
        selection: passed on to :func:`checks`.
    """
    begin, budget = time.perf_counter(), budget_s or math.inf
    found: list[Result] = []
    not_reached = tried = survived = 0
    wrong = [(op, op.mutants) for op in operators if mutants]
    seen: set[tuple[str, str, str]] = set()
    first: list[Check | Result] = []  # of each implementation and direction, and what cannot be verified
    rest: list[Check | Result] = []
    for check in checks(operators, device, **selection):
        key = (check.operator.name, check.implementation, check.direction) if isinstance(check, Check) else None
        (rest if key in seen else first).append(check)
        if key:
            seen.add(key)

    def take(some: list[Check | Result], until_s: float) -> None:
        nonlocal not_reached
        for check in some:
            if isinstance(check, Check):
                if time.perf_counter() - begin > until_s:
                    not_reached += 1
                    continue
                check = run(check, device, seed)
            found.append(check)
            if on_result:
                on_result(check)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, from the interpreter's arithmetic on NaN and inf
        take(first, budget)
        mutants_until_s = time.perf_counter() - begin + budget * MUTANTS_SHARE
        for op, made in wrong:
            if time.perf_counter() - begin > min(mutants_until_s, budget):
                break
            tried += len(made)
            for mutant in surviving_mutants(op, made, device):
                survived += 1
                why = "a mutant passed every verify workload"
                found.append(Result(op.name, f"mutant: {mutant.name}", mutant.direction, "*", "*", "fail", None, why))
                if on_result:
                    on_result(found[-1])
        take(rest, budget)
    count = {s: sum(r.status == s for r in found) for s in ("pass", "fail", "unverifiable", "declined")}
    return {
        "checked": count["pass"] + count["fail"],
        "passed": count["pass"],
        "failed": count["fail"],
        "unverifiable": count["unverifiable"],
        "declined": count["declined"],
        "not_reached": not_reached,
        "mutants": tried,
        "mutants_not_reached": sum(len(made) for _, made in wrong) - tried,
        "mutants_survived": survived,
        "device": device if device == "cuda" else "cpu, Triton's interpreter",
        "results": [asdict(r) for r in found],
    }


COUNTS = (
    "checked",
    "passed",
    "failed",
    "unverifiable",
    "declined",
    "not_reached",
    "mutants",
    "mutants_not_reached",
    "mutants_survived",
)


def verify_in_processes(
    operators: list[Operator],
    device: str,
    processes: int,
    *,
    budget_s: float,
    on_result: Callable[[Result], None] = lambda result: None,
) -> dict[str, Any]:
    """:func:`verify` of operators in several processes, each with a share of them: compiling and interpreting take one core.

    Args:
        budget_s: seconds after which no process begins another check, once it has imported its operators.
    """
    processes = min(processes, len(operators))
    context = multiprocessing.get_context("spawn")
    parts = [[op.name for op in operators[i::processes]] for i in range(processes)]
    results = context.Queue()
    rest = (device, budget_s, results)
    workers = [context.Process(target=_verify_part, args=(part, *rest), daemon=True) for part in parts]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    while len(found) < processes:
        try:
            message = results.get(timeout=1.0)
        except queue.Empty:
            if dead := [w.exitcode for w in workers if w.exitcode]:
                raise RuntimeError(f"a process that verified operators ended with status {dead[0]}") from None
            continue
        if isinstance(message, Result):
            on_result(message)
        else:
            found.append(message)
    for worker in workers:
        worker.join()
    whole: dict[str, Any] = {name: sum(part[name] for part in found) for name in COUNTS}
    order = {op.name: i for i, op in enumerate(operators)}
    rows = sorted((r for part in found for r in part["results"]), key=lambda r: order[r["operator"]])
    return {**whole, "device": found[0]["device"], "results": rows}


def _verify_part(names: list[str], device: str, budget_s: float, results: Any) -> None:
    from weft import registry

    operators = registry.select(names)
    results.put(verify(operators, device, budget_s=budget_s, on_result=results.put))

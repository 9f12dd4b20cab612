"""``weft tune``: measures configurations on this card and writes ``configs/sm_XX.json`` beside each operator."""

import contextlib
import json
import multiprocessing
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from weft import registry
from weft.bench import cases
from weft.definition import Declined, Implementation, Operator, Workload
from weft.operators.configs import Config, Configurations
from weft.operators.launch import Plans, compiling_for
from weft.timing import Timer

FINALISTS = 5  # of a key's configurations: the fastest, timed again in turn with the heuristic's
GAIN = 0.995  # of the heuristic's time: what takes more is no reason to leave it

Key = tuple[Any, ...]
Job = tuple[str, str, str, Workload]  # operator, implementation, direction, workload


def jobs(
    operators: Iterable[Operator], dtypes: Iterable[str] = (), implementation: str = "", directions: Iterable[str] = ()
) -> Iterator[Job]:
    """Every implementation of ours on its ``tune`` workloads."""
    for op in operators:
        for made in op.implementations.values():
            if not made.ours or made.rung is not None or (implementation and made.name != implementation):
                continue
            for w in op.cases("tune", dtypes):
                if made.dtypes and w.dtype not in made.dtypes:
                    continue
                for direction in made.directions or op.directions:
                    if directions and direction not in directions:
                        continue
                    yield op.name, made.name, direction, w


def keys_of(job: Job, device: str, sm: int) -> list[tuple[Configurations, Key]]:
    """The configurations that a job looks up, found by running it on ``meta``."""
    op = registry.get(job[0])
    made = op.find(job[1])
    for c in Configurations.all:
        c.asked = []
    try:
        with compiling_for(sm, lambda *kernel: None):
            _run_meta(op, made, job[2], job[3])
        return [(c, key) for c in Configurations.all for key in dict.fromkeys(c.asked or ())]
    except Declined:
        return []
    finally:
        for c in Configurations.all:
            c.asked = None


def _run_meta(op: Operator, made: Implementation, direction: str, w: Workload) -> None:
    call, _ = cases.bind(op, made.function, direction, op.inputs(w, None, "meta"))
    call()


def compile_ahead(job: Job, index: int, config: Config, sm: int) -> None:
    """Compiles one candidate into the caches on disk, in a separate process: compiling takes most of the time of tuning."""
    op = registry.get(job[0])
    found = keys_of(job, "meta", sm)
    if index >= len(found):
        return
    c, key = found[index]
    # what does not compile is left out when it is timed
    with contextlib.suppress(Exception), _trying(c, key, config), compiling_for(sm, lambda *kernel: None):
        _run_meta(op, op.find(job[1]), job[2], job[3])


@contextlib.contextmanager
def _trying(c: Configurations, key: Key, config: Config) -> Iterator[None]:
    """A configuration for one key alone; plans are made afresh, inside and after."""
    c.trial, c.trial_key = config, key
    forget_plans()
    try:
        yield
    finally:
        c.trial = c.trial_key = None
        forget_plans()


def forget_plans() -> None:
    for plans in Plans.all:
        plans.known.clear()


def tune(
    wanted: Iterable[Job],
    sm: int,
    *,
    kernels: Collection[str] = (),
    processes: int = 8,
    budget_s: float = 0.02,
    on_result: Callable[[str, Config, float, float], None] = lambda key, config, best_us, heuristic_us: None,
) -> dict[str, Config]:
    """Times the candidates of every key that the jobs look up and writes the fastest that is right.

    Args:
        sm: this card's architecture.
        kernels: whose configurations, by the first word of their keys; all when none is named.
        processes: that compile ahead.
        budget_s: time for the repetitions of one candidate.
        on_result: called with each key, its best configuration, and the microseconds of that one and of the heuristic.
    """
    plan: dict[tuple[str, Key], tuple[Job, int, Configurations, list[Config]]] = {}
    for job in sorted(wanted, key=lambda job: job[2] == "backward"):  # a key that both look up is timed alone
        for index, (c, key) in enumerate(keys_of(job, "meta", sm)):
            if kernels and c.name not in kernels:
                continue
            heuristic = c.heuristic(*key)
            rest = [x for x in c.candidates(*key) if x != heuristic]
            if rest:
                plan.setdefault((str(c.folder) + c.name, key), (job, index, c, [heuristic, *rest]))
    ahead = [(job, index, config, sm) for job, index, _, configs in plan.values() for config in configs]
    if processes > 1 and ahead:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            pool.starmap(compile_ahead, ahead, chunksize=2)
    written: dict[str, Config] = {}
    for (_, key), (job, _, c, configs) in plan.items():
        times = _time(job, c, key, configs, budget_s)
        usual, best = json.dumps(configs[0]), min(times, key=lambda text: times[text])
        if usual in times and times[best] > GAIN * times[usual]:
            best = usual
        config, name = json.loads(best), c.key(*key[1:])
        c.write(sm, {name: config})
        written[name] = config
        on_result(name, config, times[best], times.get(usual, float("nan")))
    return written


def _time(job: Job, c: Configurations, key: Key, configs: list[Config], budget_s: float) -> dict[str, float]:
    """Median microseconds of each configuration (by its JSON); those that fail or give other results are left out.

    All in a row, then the fastest in turn with the first, the heuristic's: a clock that sinks meanwhile decides nothing.

    Raises:
        RuntimeError: none ran.
    """
    op = registry.get(job[0])
    made, direction, w = op.find(job[1]), job[2], job[3]
    arguments = op.inputs(w, torch.Generator("cuda").manual_seed(2), "cuda")
    timer = Timer("cuda", budget_s=budget_s, least=3, most=25)
    times: dict[str, float] = {}
    first: list[torch.Tensor] | None = None
    failure: Exception | None = None
    for config in configs:
        try:
            with _trying(c, key, config):
                call, _ = cases.bind(op, made.function, direction, arguments)
                results = list(cases.tensors(call()))
                if first is None:
                    first = results
                elif not all(
                    torch.allclose(a, b, rtol=0.05, atol=0.05, equal_nan=True)
                    for a, b in zip(results, first, strict=True)
                ):
                    continue
                del results
                times[json.dumps(config)] = timer.measure({"": [call]})[""].median_us
        except Exception as error:  # out of resources, say: not a candidate on this card
            failure = error
    if not times:
        raise RuntimeError(f"no configuration of {c.name} runs at {w} {w.dtype} {direction}") from failure
    usual, best = json.dumps(configs[0]), sorted(times, key=lambda text: times[text])[:FINALISTS]
    finalists = best if usual not in times or usual in best else [usual, *best]
    call, _ = cases.bind(op, made.function, direction, arguments)

    def trying(text: str) -> Callable[[], Any]:
        def run() -> Any:
            with _trying(c, key, json.loads(text)):
                return call()

        return run

    final = Timer("cuda", budget_s=FINALISTS * budget_s, least=9, most=25)
    return {text: t.median_us for text, t in final.measure({text: [trying(text)] for text in finalists}).items()}

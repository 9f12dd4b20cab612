"""The headline numbers of the page, each with a sentence."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.drawing.quantities import distinct, is_rung, known, listing, percent, ratio, si
from weft.records import Measurement
from weft.words import count

DOUBTFUL = 1.1  # from this share of a ceiling on, the ceiling was measured too low
LEVEL = 0.99  # from this ratio on, a kernel counts as level with the best peer


@dataclass
class Tile:
    """One headline number; ``tone`` is good, bad or plain."""

    name: str
    number: str
    text: str
    tone: str = "plain"


def tiles(ceilings: Sequence[Measurement], verification: dict[str, Any], measured: Sequence[Measurement]) -> list[Tile]:
    """What the machine gives, what is right, how close to the limit and to the peers."""
    return [_gives(ceilings), _right(verification), _limit(measured), _peers(measured)]


def _gives(ceilings: Sequence[Measurement]) -> Tile:
    def best(unit: str) -> Measurement | None:
        chosen = [m for m in ceilings if m.details.get("unit") == unit and known(m.details.get("value"))]
        copies = [m for m in chosen if "copy" in m.implementation]  # the usual mix
        return max(copies or chosen, key=lambda m: m.details["value"], default=None)

    memory, matrix = best("B/s"), best("FLOP/s")
    if memory is None and matrix is None:
        return Tile("The machine", "–", "No ceiling was measured.")
    written = [
        (si(m.details["value"], m.details["unit"]), f"{'of memory ' if m is memory else ''}({m.implementation})")
        for m in (memory, matrix)
        if m is not None
    ]
    (number, what), *more = written
    return Tile("The machine gives", number, what + "".join(f" and {rate} {of}" for rate, of in more) + ".")


def _right(verification: dict[str, Any]) -> Tile:
    results = verification.get("results") or []
    if not results:
        return Tile("Right", "–", "Nothing was verified.")
    by_status = Counter(r.get("status") for r in results)
    operators = distinct(r.get("operator", "") for r in results)
    wrong = distinct(r.get("operator", "") for r in results if r.get("status") == "fail")
    right = [
        o
        for o in operators
        if o not in wrong and any(r.get("operator") == o and r.get("status") == "pass" for r in results)
    ]
    survived = verification.get("mutants_survived") or 0
    not_reached = verification.get("not_reached") or 0
    checks = f"{count(by_status['pass'], 'check')} passed"
    if wrong:
        verb = "is" if len(wrong) == 1 else "are"
        text = f"operators are right; {listing(wrong)} {verb} not: {count(by_status['fail'], 'check')} failed."
    else:
        text = f"operators are right: {checks}, none failed"
        text += f", {by_status['unverifiable']:,} not verifiable here." if by_status["unverifiable"] else "."
    if not_reached:
        text += f" {count(not_reached, 'check')} not reached in the time budget."
    if survived:
        text += f" {count(survived, 'wrong-on-purpose kernel')} passed the verifier."
    tone = "bad" if wrong or survived else "good" if len(right) == len(operators) else "plain"
    return Tile("Right", f"{len(right)} of {len(operators)}", text, tone)


def _limit(measured: Sequence[Measurement]) -> Tile:
    chosen = sorted(candidates(measured), key=lambda m: m.share_of_ceiling or 0)
    if not chosen:
        return Tile("Nearest to the limit", "–", "Nothing was measured against a ceiling.")
    impossible = [m for m in chosen if (m.share_of_ceiling or 0) > DOUBTFUL]
    if impossible:
        text = (
            f"Too noisy to judge: {count(len(impossible), 'point')} of {len(chosen)} took less time than the measured ceiling "
            "allows, so other work slowed the machine while it was measured. Measure again on an idle machine."
        )
        return Tile("Nearest to the limit", "–", text)
    far, near = chosen[0], chosen[-1]
    text = f"of what the machine allows: {_named(near)}."
    if far is not near:
        text += f" Farthest: {_named(far)} at {percent(far.share_of_ceiling)}."
    return Tile("Nearest to the limit", percent(near.share_of_ceiling), text)


def _peers(measured: Sequence[Measurement]) -> Tile:
    chosen = [m for m in measured if m.ours and not is_rung(m) and known(m.ratio_to_best_peer)]
    if not chosen:
        return Tile("Against the best peer", "–", "weft's kernels were not timed beside a peer here.")
    level = sum((m.ratio_to_best_peer or 0) >= LEVEL for m in chosen)
    slowest, fastest = (pick(chosen, key=lambda m: m.ratio_to_best_peer or 0) for pick in (min, max))
    text = f"points at least level (≥ {LEVEL:g}×) with the best peer. "
    text += f"Best {ratio(fastest.ratio_to_best_peer)}: {_named(fastest)}; "
    text += f"worst {ratio(slowest.ratio_to_best_peer)}: {_named(slowest)}."
    return Tile("Against the best peer", f"{level} of {len(chosen)}", text)


def candidates(measured: Sequence[Measurement]) -> list[Measurement]:
    """Measurements for the closest and the least close: ours without teaching versions; all where ours were not
    timed."""
    shares = [m for m in measured if known(m.share_of_ceiling) and not is_rung(m)]
    return [m for m in shares if m.ours] or shares


def _named(m: Measurement) -> str:
    direction = "" if m.direction == "forward" else f" {m.direction}"
    return f"{m.operator}{direction} ({m.implementation}, {m.dtype}, {m.workload.replace(',', ', ')})"


def next_steps(
    findings: Sequence[dict[str, Any]], measured: Sequence[Measurement], on_gpu: bool
) -> list[tuple[str, str]]:
    """What to do after this page: (why, command), the most useful first."""
    wrong = [f for f in findings if f.get("status") != "pass" and f.get("fix") and (on_gpu or f.get("group") != "GPU")]
    steps = [(str(f.get("found")), str(f.get("fix"))) for f in wrong][:2]
    if not on_gpu:
        simulate = "weft simulate generate trace.csv --jobs 1000 --nodes 20x8 --load 0.7"
        steps.append(("Read how a kernel gets fast, one idea after the other", "weft list softmax"))
        return [*steps, ("Simulate a cluster of GPUs, first a trace of jobs", simulate)]
    chosen = [m for m in candidates(measured) if m.ours and known(m.share_of_ceiling)]
    if chosen:
        far = min(chosen, key=lambda m: m.share_of_ceiling or 0)
        where = f"weft bench {far.operator} --direction {far.direction}"
        steps.append((f"{_named(far)} is farthest from the limit: see all its shapes", where))
    behind = [m for m in chosen if known(m.ratio_to_best_peer) and (m.ratio_to_best_peer or 1) < LEVEL]
    if behind:
        slowest = min(behind, key=lambda m: m.ratio_to_best_peer or 1)
        tune = f"weft tune {slowest.operator}"
        steps.append((f"{_named(slowest)} is behind {slowest.best_peer}: find configurations for this card", tune))
    return [*steps, ("See each step from a naive kernel to this one", "weft bench softmax --ladder --set ladder")]

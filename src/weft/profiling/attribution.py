"""Whose work it is: each kernel's launch, operator, phase and module; each CPU operator's own time.

A kernel and its launch share a correlation id. The launch lies inside the operator that PyTorch recorded on that thread; where
launches are missing, the external id that Kineto writes into both leads there.
"""

import re
from dataclasses import dataclass
from typing import Any

from weft.profiling.trace import Span, Trace, clipped

OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
ENGINE = "autograd::engine::evaluate_function"
BACKWARD = re.compile(r"Backward\d*$")
FRAME = re.compile(r"\.py\(\d+\): ")


@dataclass(slots=True, eq=False)
class Work:
    """A kernel (or copy), or on a CPU the own time of an operator."""

    span: Span
    launch: Span | None
    op: Span | None
    phase: str  # forward, backward, optimizer
    module: str  # the innermost torch.nn module, where stacks were recorded
    ns: int
    origin: Span | None = None  # of an autograd function's backward the forward call

    @property
    def operator(self) -> str:
        return self.op.name if self.op is not None else short(self.span.name)


def of(trace: Trace, window: tuple[int, int]) -> list[Work]:
    """The work of a trace inside the window, in the order of its start."""
    forward = forward_operators(trace)
    return _on_gpu(trace, window, forward) if trace.on_gpu else _on_cpu(trace, window, forward)


def _on_gpu(trace: Trace, window: tuple[int, int], forward: dict[Any, Span]) -> list[Work]:
    launches = {s.correlation: s for s in trace.host if s.kind == "call" and s.correlation is not None}
    external = {
        s.args["External id"]: s for s in trace.host if s.kind == "op" and isinstance(s.args.get("External id"), int)
    }
    found = []
    for span in trace.device:
        start, end = clipped(span, window)
        if end < start or (end == start and span.ns):
            continue
        launch = launches.get(span.correlation)
        op = _inside(launch) if launch is not None else None
        if op is None:
            recorded = span.args.get("External id", span.args.get("external id"))
            op = external.get(recorded) if isinstance(recorded, int) else None
        phase, module = context(op or launch, forward)
        found.append(Work(span, launch, op, phase, module, end - start, _origin(op, forward)))
    return found


def _on_cpu(trace: Trace, window: tuple[int, int], forward: dict[Any, Span]) -> list[Work]:
    children: dict[Span, int] = {}
    ops = [s for s in trace.host if s.kind == "op"]
    for span in ops:
        parent = next((s for s in span.within() if s.kind == "op"), None)
        if parent is not None:
            children[parent] = children.get(parent, 0) + min(span.end, parent.end) - span.start
    found = []
    for span in ops:
        start, end = clipped(span, window)
        if end <= start:
            continue
        phase, module = context(span, forward)
        found.append(Work(span, None, span, phase, module, max(0, end - start - children.get(span, 0))))
    return found


def _inside(span: Span) -> Span | None:
    return next((s for s in span.within() if s.kind == "op"), None)


def context(span: Span | None, forward: dict[Any, Span]) -> tuple[str, str]:
    """(phase, module) of an operator or launch. A backward operator's module is that of the forward operator it belongs to."""
    if span is None:
        return "", ""
    phase, module, origin = "forward", "", None
    for s in (span, *span.within()):
        if s.name.startswith(OPTIMIZER):
            return "optimizer", ""
        if s.kind == "op" and (s.name.startswith(ENGINE) or BACKWARD.search(s.name)):
            phase = "backward"
            origin = forward.get(s.args.get("Sequence number"), origin)
        if not module and s.name.startswith("nn.Module: "):
            module = _module(s.name)
    if phase == "backward" and origin is not None:
        module = next((_module(s.name) for s in origin.within() if s.name.startswith("nn.Module: ")), module)
    return phase, module


def _origin(op: Span | None, forward: dict[Any, Span]) -> Span | None:
    """Of ``NormBackward``, an autograd function's, the call of ``Norm``."""
    if op is None or not op.name.endswith("Backward"):
        return None
    return forward.get((op.args.get("Sequence number"), op.name.removesuffix("Backward")))


def _module(name: str) -> str:
    """``nn.Module: Linear_0`` → ``Linear``."""
    return re.sub(r"_\d+$", "", name.removeprefix("nn.Module: "))


def forward_operators(trace: Trace) -> dict[Any, Span]:
    """Forward operators by the sequence number that autograd gives them, and by (number, name): casts before one may have its
    number too."""
    found: dict[Any, Span] = {}
    for s in trace.host:
        number = s.args.get("Sequence number") if s.kind == "op" else None
        if isinstance(number, int) and number >= 0 and not s.name.startswith(ENGINE) and not BACKWARD.search(s.name):
            found.setdefault(number, s)
            found.setdefault((number, s.name), s)
    return found


def stack(span: Span | None, most: int = 3) -> list[str]:
    """The innermost Python frames of the user's code around a span: ``model.py(41): forward``."""
    frames = [s.name for s in span.within() if s.kind == "python" and FRAME.search(s.name)] if span is not None else []
    users = [name for name in frames if "/torch/" not in name and not name.startswith("torch/")]
    return (users or frames)[:most]


def short(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    text, depth, kept = kernel.removeprefix("void "), 0, []
    text = text.replace("(anonymous namespace)::", "")
    for c in text:
        if c == "(" and depth == 0:
            break
        depth += c == "<"
        if depth == 0:
            kept.append(c)
        depth -= c == ">" and depth > 0
    return "".join(kept).strip() or kernel

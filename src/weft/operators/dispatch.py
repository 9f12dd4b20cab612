"""The one place where a kernel is chosen: an ordered table of routes for each direction of an operator, as ``FORWARD`` in
``elementwise/vector_add.py``.

The public function takes the first route that applies, ``weft.ops.explain`` prints it, ``weft bench`` times every route by its
name, and the family's page of ``docs/measured`` lists the table.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, UnknownName
from weft.operators.call import Choice, on_gpu, traced
from weft.operators.launch import Plans, target_sm


@dataclass(frozen=True)
class Route:
    """One row of a table. ``weft bench`` times every call that is supported, whatever ``when`` says."""

    name: str  # of the implementation, as in records: ``cluster``, ``torch``; rows that take different calls may share one
    when: Callable[[Any], bool]  # whether this is the best kernel for a call that it supports
    reason: str  # why, in one line
    launch: Callable[[Any], Any] | None = None  # makes the plan of a call; None hands over to PyTorch
    unsupported: Callable[[Any], str] = lambda call: ""  # why the kernel cannot take a call ("" when it can)
    sm: int = 80  # the least architecture

    def why_not(self, call: Any) -> str:
        """Why this route cannot take the call ("" when it can)."""
        if self.launch is not None and call.sm < self.sm:
            return f"needs sm_{self.sm}, this is sm_{call.sm}"
        return self.unsupported(call)


class Call:
    """What all calls say of their first tensor, ``x``; a family's dataclass derives from it and adds its own."""

    x: Tensor

    @property
    def sm(self) -> int:
        """The architecture that the call runs on, such as 90."""
        return target_sm(self.x.device)

    @property
    def on_gpu(self) -> bool:
        return on_gpu(self.x)

    @property
    def empty(self) -> bool:
        return self.x.numel() == 0

    @property
    def traced(self) -> bool:
        """Whether the call is traced: any tensor that it holds is a fake or a wrapped one, say."""
        if traced(self.x):
            return True
        held = (value if isinstance(value, tuple) else (value,) for value in vars(self).values())
        return traced(*(t for values in held for t in values if isinstance(t, Tensor)))


ON_CPU = Route("torch", lambda c: not c.on_gpu, "the tensors are on the CPU, where weft runs the reference")
IN_FLOAT64 = Route("torch", lambda c: True, "float64, for checks of gradients: PyTorch's operators")  # in every table
EMPTY = Route("torch", lambda c: c.empty, "an empty tensor: nothing to launch")
TRACED = Route("torch", lambda c: c.traced, "traced: a compiler fuses PyTorch's operators")


class Dispatch(Plans):
    """The table of one direction of an operator: routes in the order in which they are tried. ``of`` returns the plan of the
    first route that takes the call, cached as :class:`Plans` says; None where that is PyTorch.

    Args:
        call: makes what conditions and launches look at from the arguments of a call, tensors first. It checks them: it
            raises TypeError or ValueError.
        routes: the rows. A call that no row takes is declined.
    """

    def __init__(self, call: Callable[..., Any], *routes: Route):
        super().__init__(self._plan)
        self.call, self.routes = call, routes
        self._kernels = {r.name: Plans(functools.partial(self._named, r.name)) for r in routes if r.launch is not None}

    def kernel(self, name: str) -> Plans:
        """Plans of the routes of one name (UnknownName: there is none), for any call that they support; they raise Declined for
        others."""
        if name not in self._kernels:
            raise UnknownName("kernel", name, self._kernels)
        return self._kernels[name]

    def choose(self, *arguments: Any, **named: Any) -> Choice:
        """The name and the reason of the route that a call takes."""
        route = self._route(self.call(*arguments, **named))
        return Choice(route.name, route.reason)

    def _route(self, call: Any) -> Route:
        if getattr(call, "x", None) is not None and call.x.dtype == torch.float64:
            return IN_FLOAT64
        for route in self.routes:
            if not route.why_not(call) and route.when(call):
                return route
        raise Declined("no kernel takes this call")

    def _plan(self, *arguments: Any) -> Any:
        call = self.call(*arguments)
        route = self._route(call)
        return None if route.launch is None else route.launch(call)

    def _named(self, name: str, *arguments: Any) -> Any:
        """Of several routes of a name the first that is also the best one, else the first that supports the call."""
        call = self.call(*arguments)
        routes = [r for r in self.routes if r.name == name and r.launch is not None]
        able = [r for r in routes if not r.why_not(call)]
        if not able:
            raise Declined("; ".join(dict.fromkeys(r.why_not(call) for r in routes)))
        best = next((r for r in able if r.when(call)), able[0])
        assert best.launch is not None  # routes of this name have one
        return best.launch(call)

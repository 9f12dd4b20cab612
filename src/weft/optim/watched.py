"""Dictionaries of optimizer state, and lists of parameters, that say when they are changed.

A step must not look every state up again (that costs more than the launch), and must not use one that a caller has replaced
(moved to the CPU and back, say). So the dictionaries tell: any change of one marks the optimizer's table as outdated. Lists of
parameters count their changes, so that only one that was changed is looked through.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from operator import is_
from typing import Any


class Changes:
    """Whether anything was changed since the table was made."""

    def __init__(self) -> None:
        self.seen = False


def _telling(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.changes.seen = True
        return method(self, *args, **kwargs)

    return changed


CHANGING = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")


class ParameterState(dict[str, Any]):
    """One parameter's state. Pickled and copied as a plain dictionary."""

    changes = Changes()  # until the optimizer sets its own

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class States(defaultdict[Any, Any]):
    """All parameters' states, by parameter; one that is not there is empty, as in PyTorch."""

    def __init__(self, states: Any, changes: Changes):
        super().__init__(dict, states)
        self.changes = changes

    def __missing__(self, key: Any) -> Any:
        self.changes.seen = True
        return super().__missing__(key)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


for _kind in (ParameterState, States):
    for _name in CHANGING:
        setattr(_kind, _name, _telling(_kind.__mro__[1], _name))


def watch(states: Any, changes: Changes) -> States:
    """The same states, watched: changes of any of them are seen in ``changes``."""
    watched = States({}, changes)
    for key, state in states.items():
        if type(state) is dict:
            state = ParameterState(state)
        if isinstance(state, ParameterState):
            state.changes = changes
        watched[key] = state
    changes.seen = False
    return watched


# ---- lists of parameters ---------------------------------------------------------------------------------------------


class Parameters(list[Any]):
    """A group's parameters, and how often the list was changed. Pickled and copied as a plain list."""

    edits = 0

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _counting(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.edits += 1
        return method(self, *args, **kwargs)

    return counted


for _name in (
    "__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "clear", "extend", "insert", "pop", "remove", "reverse",
    "sort",
):  # fmt: skip
    setattr(Parameters, _name, _counting(_name))


class Seen:
    """A list as it was. Of a plain one, which a caller has put into a group, nobody knows without looking."""

    def __init__(self, params: list[Any]):
        self.params = params if isinstance(params, Parameters) else None
        self.edits = params.edits if isinstance(params, Parameters) else 0
        self.copy = list(params)

    def still(self, params: list[Any]) -> bool:
        """Whether this list has the same objects in the same order."""
        if params is self.params and self.params.edits == self.edits:
            return True
        return len(params) == len(self.copy) and all(map(is_, params, self.copy))

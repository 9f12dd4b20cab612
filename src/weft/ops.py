"""The public functions, one for each operator: ``weft.ops.softmax(x, dim=-1)``.

Each is resolved from the registry when it is first used. ``explain`` says which implementation a call would take.
"""

from __future__ import annotations

import inspect
from typing import Any

from weft import registry
from weft.definition import UnknownName


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in registry.modules():
        raise AttributeError(f"weft.ops: {UnknownName('operator', name, registry.names())}")
    function = registry.get(name).public
    globals()[name] = function  # the next look-up does not come here
    return function


def __dir__() -> list[str]:
    return [*registry.names(), "explain"]


def explain(operator: str, /, *args: Any, **kwargs: Any) -> Any:
    """Which implementation ``weft.ops.<operator>`` takes for these arguments, and why.

    Returns:
        A :class:`weft.operators.call.Choice` with ``implementation``, ``reason`` and, where a launch of ours is all
        of the call, ``plans``, which make it.

    Raises:
        UnknownName: no such operator.
        TypeError, ValueError: the arguments are wrong, as the operator itself would say.
    """
    if not isinstance(operator, str):
        raise TypeError(f"explain: argument 'operator' is {operator!r:.40}; expected a name such as 'softmax'")
    found = registry.get(operator)
    if found.chooser is None:
        raise ValueError(f"operator '{operator}' has only one implementation")
    try:
        given = inspect.signature(found.public).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {operator}() {error}") from None
    return found.chooser(*given.args, **given.kwargs)

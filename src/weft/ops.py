"""The public functions, one for each operator: ``weft.ops.softmax(x, dim=-1)``.

Each is resolved from the registry when it is first used. ``explain`` says which implementation a call would take.
"""

import contextlib
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


def explain(operator: str, /, *args: Any, direction: str = "forward", compiled: bool = False, **kwargs: Any) -> Any:
    """Which implementation ``weft.ops.<operator>`` takes for these arguments, and why.

    Args:
        operator: its name.
        args, kwargs: the arguments of the call.
        direction: ``forward`` or ``backward``, whose gradient is assumed to lie in memory as the result does.
        compiled: of the call under ``torch.compile`` or ``torch.export``.

    Returns:
        A :class:`weft.operators.call.Choice` with ``implementation`` and ``reason``.

    Raises:
        UnknownName: no such operator or direction.
        TypeError, ValueError: the arguments are wrong, as the operator itself would say.
    """
    if not isinstance(operator, str):
        raise TypeError(f"explain: argument 'operator' is {operator!r:.40}; expected a name such as 'softmax'")
    found = registry.get(operator)
    if found.chooser is None:
        raise ValueError(f"operator '{operator}' has only one implementation")
    directions = found.directions if "direction" in inspect.signature(found.chooser).parameters else ("forward",)
    if direction not in directions:
        raise UnknownName(f"direction of '{operator}'", direction, directions)
    try:
        given = inspect.signature(found.public).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {operator}() {error}") from None
    from weft.operators import call

    asked = {} if direction == "forward" else {"direction": direction}
    with call.as_if_traced() if compiled else contextlib.nullcontext():
        return found.chooser(*given.args, **given.kwargs, **asked)

"""Operators that a compiler sees as one, ``torch.ops.weft.<name>``, and whose kernels the tables choose when they run: for
calls that a kernel of ours computes faster than what a compiler fuses."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def opaque(name: str, results: Callable[..., Any], launch: Callable[..., None]) -> Any:
    """Registers an operator.

    Args:
        name: in ``torch.ops.weft``.
        results: makes the empty results of the arguments, on any device; its annotations are the operator's.
        launch: of ``(results, *arguments)`` writes them.

    Returns:
        The operator, to call and to register a gradient of.
    """

    @functools.wraps(results)
    def run(*arguments: Any) -> Any:
        found = results(*arguments)
        launch(found, *arguments)
        return found

    operator = torch.library.custom_op(f"weft::{name}", run, mutates_args=())
    operator.register_fake(results)
    return operator

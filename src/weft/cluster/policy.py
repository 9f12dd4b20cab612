"""Orders and placements by name, and which of them, of quotas, weights and costs of preemption go together."""

import contextlib
import functools
import importlib.util
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from weft.cluster.files.text import missing
from weft.cluster.order import MODES, Order
from weft.cluster.orders import ORDERS
from weft.cluster.placement import Placement
from weft.cluster.placements import PLACEMENTS
from weft.cluster.quota import Quota
from weft.definition import UnknownName

Policy = TypeVar("Policy", Order, Placement)
NO_SHARES = "conservative backfill plans whole GPUs; expected no shares, and no placement that looks at single GPUs"


def without_folders(name: str) -> str:
    """An order, a placement or both, of a file's path only its name: ``fifo:/home/a/mine.py`` → ``fifo:mine.py``."""
    return re.sub(r"[^:]*[/\\](?=[^/\\:]*\.py(?:$|[-:]))", "", name)


def find_order(name: str) -> tuple[Order, str]:
    """The order, and its mode: one of MODES, the end of the name.

    Args:
        name: of a module of ``weft.cluster.orders``, or the path of a file such as those, ``./mine.py``.

    Raises:
        UnknownName: no such order.
        ValueError: a mode that the order does not have; a file without an order.
    """
    mode = next((end for end in MODES if end and name.endswith(end)), "")
    base = name.removesuffix(mode)
    if base.endswith(".py"):
        order = _of_file(Path(base).resolve(), Order)
    elif base in ORDERS:
        order = ORDERS[base]
    else:
        raise UnknownName("order", name, [f"{o}{end}" for end in MODES for o in ORDERS if end in ORDERS[o].modes])
    if mode and order.preemptive:
        raise ValueError(f"order '{name}': {base} preempts, and any job that fits may start; expected '{base}'")
    if mode not in order.modes:
        raise ValueError(
            f"order '{name}': the order of tenants changes with every start, so no job can have a reservation; "
            f"expected '{base}' or '{base}-skip'"
        )
    return order, mode


def find_placement(name: str) -> Placement:
    """The placement.

    Args:
        name: of a module of ``weft.cluster.placements``, or the path of a file such as those, ``./mine.py``.

    Raises:
        UnknownName: no such placement.
        ValueError: a file without a placement.
    """
    if name.endswith(".py"):
        return _of_file(Path(name).resolve(), Placement)
    if name not in PLACEMENTS:
        raise UnknownName("placement", name, PLACEMENTS)
    return PLACEMENTS[name]


@functools.cache
def _of_file(path: Path, kind: type[Policy]) -> Policy:
    """The ``ORDER`` or ``PLACEMENT`` of a file; read once."""
    what = kind.__name__.lower()
    if not path.is_file():
        raise FileNotFoundError(f"{what}: {missing(path)}")
    spec = importlib.util.spec_from_file_location(f"weft_{what}_{path.stem}", path)
    assert spec and spec.loader  # of every name that ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} '{path}': {type(error).__name__}: {error}") from error
    found = getattr(module, what.upper(), None)
    if not isinstance(found, kind):
        raise ValueError(f"{what} '{path}': {what.upper()} is {found!r}; expected a {kind.__module__}.{kind.__name__}")
    return found


def check_topology(placement: Placement, order: Order, mode: str) -> None:
    """Raises ValueError for a placement that looks at topology with conservative backfill."""
    if placement.topology and mode == "-conservative":
        raise ValueError(
            f"placement '{placement.name}' with order '{order.name}{mode}': conservative backfill does not plan by rack; "
            f"expected another order: strict, -skip or -easy"
        )


def check_preemption_costs(order: Order, restart_s: float, checkpoint_s: float) -> None:
    """Raises ValueError for costs that are no seconds, and for costs with an order that does not preempt."""
    for name, value in (("restart_s", restart_s), ("checkpoint_s", checkpoint_s)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; expected seconds, 0 or more")
        if value and not order.preemptive:
            preemptive = ", ".join(name for name, each in ORDERS.items() if each.preemptive)
            raise ValueError(
                f"{name} is {value}, and order '{order.name}' does not preempt; expected one of {preemptive}"
            )


def check_tenants(weights: Mapping[str, float], quotas: Mapping[str, Quota], order: Order, mode: str) -> None:
    """Raises ValueError for a weight that is no positive number, and for weights or quotas that the order does not
    use."""
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of tenant '{name}' is {weight}; expected a number above 0")
    if weights and not order.share:
        weighted = ", ".join(name for name, each in ORDERS.items() if each.share)
        raise ValueError(f"weights are given, and order '{order.name}' uses none; expected one of {weighted}")
    if order.rounds and order.rounds.quotas:
        if not quotas:
            raise ValueError(f"order '{order.name}' reclaims borrowed quota; expected quotas")
        return
    if quotas and (order.preemptive or mode not in ("", "-skip")):
        why = "preempts" if order.preemptive else "makes reservations by estimates, which a quota may break"
        raise ValueError(
            f"quotas are given, and order '{order.name}{mode}' {why}; expected one that does not, such as 'fifo-skip'"
        )

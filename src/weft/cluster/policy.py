"""Orders and placements by name, and which of them, of quotas, weights and costs of preemption go together."""

import contextlib
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

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


def read_anew() -> None:
    """Forgets the orders and placements of files that have changed since; called where a run begins."""
    for key, (source, _) in list(_READ.items()):
        try:
            changed = key[0].read_bytes() != source
        except OSError:
            changed = True
        if changed:
            del _READ[key]


_READ: dict[tuple[Path, type], tuple[bytes, Any]] = {}  # what was in a file, and the policy that it is


def _of_file(path: Path, kind: type[Policy]) -> Policy:
    """The ``ORDER`` or ``PLACEMENT`` of a file."""
    if (path, kind) in _READ:
        found: Policy = _READ[path, kind][1]
        return found
    what = kind.__name__.lower()
    if path.is_dir():
        raise ValueError(f"{what} '{path}' is a folder; expected a file")
    if not path.is_file():
        raise FileNotFoundError(f"{what}: {missing(path)}")
    source = path.read_bytes()
    module = ModuleType(f"weft_{what}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look there
    try:
        # Not by import: Python takes cached bytecode for a file of the same second and size.
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            exec(compile(source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} '{path}': {type(error).__name__}: {error}") from error
    made = vars(module).get(what.upper())
    if not isinstance(made, kind):
        raise ValueError(f"{what} '{path}': {what.upper()} is {made!r}; expected a {kind.__module__}.{kind.__name__}")
    _READ[path, kind] = source, made
    return made


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

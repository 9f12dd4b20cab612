"""Which rack and which NVLink domain the nodes of groups are in. A domain is a part of a rack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from weft.cluster.model import NodeGroup


def racks_of(groups: Iterable[NodeGroup]) -> tuple[NDArray[np.int64], tuple[str, ...], NDArray[np.int64]]:
    """The rack of each node [N], an index into the names that come next, and its domain [N]; both by their first node.

    Raises:
        ValueError: a domain would lie in several racks.
    """
    racks: dict[tuple[bool, str], int] = {}
    domains: dict[tuple[str, int], int] = {}
    cut: dict[str, int] = {}  # racks so far that groups of a name were cut into
    rack_of, domain_of = [], []
    for number, g in enumerate(groups):
        first = cut.get(g.name, 0)
        if g.rack_nodes:
            cut[g.name] = first + -(-g.count // g.rack_nodes)
        for i in range(g.count):
            rack = (True, f"{g.name}-rack-{first + i // g.rack_nodes}") if g.rack_nodes else (False, g.rack)
            domain = (g.nvlink_domain, -1)
            if g.nvlink_domain_nodes:
                domain = (f"{number}-{i // g.nvlink_domain_nodes}", number)
            elif not g.nvlink_domain:
                domain = (f"{number}-{i}", number)
            rack_of.append(racks.setdefault(rack, len(racks)))
            domain_of.append(domains.setdefault(domain, len(domains)))
    names = tuple(name for _, name in racks) or ("",)
    lies_in: dict[int, int] = {}
    for d, r in zip(domain_of, rack_of, strict=True):
        if lies_in.setdefault(d, r) != r:
            name = list(domains)[d][0]
            raise ValueError(
                f"nvlink_domain '{name}' lies in racks '{names[lies_in[d]]}' and '{names[r]}'; expected one rack"
            )
    return np.array(rack_of, np.int64), names, np.array(domain_of, np.int64)

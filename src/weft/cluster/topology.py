"""In which rack a job's pieces go, for placements that look at topology; in plain Python. The compiled form is
``engine/topology.py``.

The pieces of a gang that are left go together into one NVLink domain: of the racks with a domain that has room for all of
them the fullest rack, there the fullest such domain. Where none has, into the fullest rack that has room. Where none has, the
rack that takes the most takes as many as it can, and the same is asked anew for those that are left. *Fullest*: with the least
free of its GPUs; lowest numbers first where equal. In the nodes that were found the placement's score decides as ever.

Orders that stop jobs take free room in this way. Where there is none for a gang, they stop jobs in the domain or rack where
the most important of them is the least important, or anywhere where that costs less and no rack is required.

A job of one piece leaves whole nodes and racks to gangs: of the nodes with the highest score it takes one in the fullest rack,
there in the fullest domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from weft.cluster.order import Order
from weft.cluster.placement import REQUIRED, Placement

if TYPE_CHECKING:
    from weft.cluster.nodes import Nodes
    from weft.cluster.parts import Job, Node, Piece


def check(placement: Placement, order: Order, mode: str) -> None:
    """Raises ValueError for orders that it does not go with: those that look for nodes in other ways."""
    if placement.topology and mode == "-conservative":
        raise ValueError(
            f"placement '{placement.name}' with order '{order.name}{mode}': jobs are not planned ahead for a rack's sake; "
            f"expected another order, strict, -skip or -easy"
        )


def where(sim: Nodes, job: Job, pieces: list[Piece]) -> Iterator[list[Node]]:
    """The nodes among which each piece goes, one piece after the other: asked when those before have their nodes."""
    if len(pieces) == 1:
        yield fullest_of_best(sim, pieces[0])
        return
    first = 0
    while first < len(pieces):
        nodes, count = nearest(sim, job, pieces[first:])
        yield from [nodes] * count
        first += count


def fullest_of_best(sim: Nodes, piece: Piece) -> list[Node]:
    """The domain in which the only piece of a job goes; nothing where it fits nowhere."""
    scored = [(sim.score(piece, node)[0], node) for node in sim.nodes if sim.able(node, piece)]
    best = [node for score, node in scored if score == max(score for score, _ in scored)]
    racks = [rack for rack in split(sim.nodes, "rack") if any(node is n for node in best for n in rack)]
    domains = split(min(racks, key=free), "domain") if racks else []
    return min((d for d in domains if any(node is n for node in best for n in d)), key=free, default=[])


def nearest(sim: Nodes, job: Job, left: list[Piece]) -> tuple[list[Node], int]:
    """Where the next of the pieces that are left go, and how many of them: nowhere, and one, where there is nothing."""
    racks = split(sim.nodes, "rack")
    for parts in ([(rack, domain) for rack in racks for domain in split(rack, "domain")], [(r, r) for r in racks]):
        able = [(rack, part) for rack, part in parts if takes(sim, job, part, left) == len(left)]
        if able:  # the first where equal
            return min(able, key=lambda found: (free(found[0]), found[0][0].rack, free(found[1])))[1], len(left)
    if sim.placement.topology == REQUIRED:
        return [], 1
    alike = [piece for piece in left if piece == left[0]]
    most = max(racks, key=lambda rack: takes(sim, job, rack, alike))
    return most, max(takes(sim, job, most, alike), 1)


def split(nodes: Iterable[Node], by: str) -> list[list[Node]]:
    """Racks in order of their numbers, or domains."""
    ordered = sorted(nodes, key=lambda node: (node.rack, node.domain))
    return [list(same) for _, same in groupby(ordered, lambda node: (node.rack, getattr(node, by)))]


def parts(sim: Nodes) -> list[list[Node]]:
    """Where a gang may go if jobs are stopped for it: a domain, a rack, or anywhere where no rack is required."""
    domains, racks = split(sim.nodes, "domain"), split(sim.nodes, "rack")
    anywhere = [] if sim.placement.topology == REQUIRED else [[node for rack in racks for node in rack]]
    return domains + racks + anywhere


def free(nodes: Iterable[Node]) -> int:
    """Thousandths of GPUs."""
    return sum(sum(node.milli) for node in nodes)


def takes(sim: Nodes, job: Job, nodes: list[Node], pieces: list[Piece]) -> int:
    """How many of the pieces find room among these nodes, one after the other."""
    placed: list[tuple[Node, Piece, list[int]]] = []
    for piece in pieces:
        node = next((node for node in nodes if sim.able(node, piece)), None)
        if node is None:
            break
        gpus = sim.pick(node, piece)
        node.take(piece, job.id, gpus)
        placed.append((node, piece, gpus))
    for node, piece, gpus in placed:
        node.give_back(piece, job.id, gpus)
    return len(placed)

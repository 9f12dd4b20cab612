"""The nodes, and where on them a placement puts a job's pieces.

With a placement that looks at topology, the remaining pieces of a gang go together into one NVLink domain: of the racks
with a domain that has enough free for all of them the fullest rack, in it the fullest such domain. If no domain has,
into the fullest rack that has. If no rack has, the rack that takes the most pieces takes as many as it can, and the
same is repeated for the rest. *Fullest*: with the fewest free GPUs; ties go to the lowest number. Within these nodes
the placement's score decides as usual. A job of one piece leaves whole nodes and racks to gangs: of the nodes with the
highest score it takes one in the fullest rack, there in the fullest domain. The compiled form is
``engine/topology.py``.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from itertools import groupby, repeat
from typing import Any

import numpy as np

from weft.cluster import gangs
from weft.cluster.model import WHOLE, Cluster, Jobs, NodeGroup, accepts
from weft.cluster.placement import NOTHING, REQUIRED, check_ties, draw, first_random_state
from weft.cluster.policy import find_placement, read_anew
from weft.cluster.reference.model import Job, Node, Piece, arguments_of
from weft.words import count


class Nodes:
    """Nodes, and a placement that chooses among them; its arguments as those of the simulator."""

    def __init__(self, placement: str, ties: str, seed: int):
        read_anew()
        self.placement = find_placement(placement)
        self.ties = check_ties(ties or self.placement.ties)
        self.random = first_random_state(seed)
        self.context = NOTHING  # what the placement knows of the whole trace
        self.nodes: list[Node] = []
        self.types: list[str] = []
        self.racks: list[str] = []
        self.domains: list[str] = []
        self.pieces_by_request: dict[tuple[Any, ...], list[Piece]] = {}
        self.now = 0.0
        self.placing: Any = None  # the id of the job that is being placed

    def add_node(
        self,
        id: str,
        gpus: int,
        gpu_memory_gb: float = 0.0,
        gpu_type: str = "gpu",
        cpu: float = 0.0,
        memory_gb: float = 0.0,
        rack: str = "",
        nvlink_domain: str = "",
    ) -> None:
        """A node with so many GPUs, each with so many GB; cores and main memory of 0 are unknown and no limit. Without
        a named NVLink domain it is a domain of its own."""
        if any(node.id == id for node in self.nodes):
            raise ValueError(f"node '{id}' already exists; expected another name for each node")
        group = NodeGroup(1, gpus, gpu_type, gpu_memory_gb, cpu, memory_gb, name=id)
        one = Cluster.of([group])
        self.types += [gpu_type] * (gpu_type not in self.types)
        kind = self.types.index(gpu_type)
        node = Node(id, gpus, one.gpu_memory[0].item(), kind, one.cpu[0].item(), one.memory[0].item())
        self.racks += [rack] * (rack not in self.racks)
        known = bool(nvlink_domain) and nvlink_domain in self.domains
        self.domains += [nvlink_domain] * (not known)
        node.rack = self.racks.index(rack)
        node.domain = self.domains.index(nvlink_domain) if known else len(self.domains) - 1
        if any(other.domain == node.domain and other.rack != node.rack for other in self.nodes):
            raise ValueError(f"node '{id}': nvlink_domain '{nvlink_domain}' is in another rack; expected one rack")
        self.nodes.append(node)

    def cluster(self) -> Cluster:
        """The nodes as columns."""
        groups = [
            NodeGroup(
                1, n.gpus, self.types[n.gpu_type], max(n.gpu_memory, 0), max(n.cpu, 0) / 1000, max(n.memory, 0) / 1024
            )
            for n in self.nodes
        ]
        return dataclasses.replace(
            Cluster.of(groups),
            names=tuple(n.id for n in self.nodes),
            rack=np.array([n.rack for n in self.nodes]),
            racks=tuple(self.racks),
            domain=np.array([n.domain for n in self.nodes]),
        )

    def place(self, job: Job) -> bool:
        """Places all pieces of a job, or none."""
        pieces = self.pieces(job.row)
        if not job.row.pods[0] and len(pieces) > 1 and not self.enough_nodes(pieces):
            return False
        placed: list[tuple[Node, Piece, list[int]]] = []
        random = self.random
        candidates = self.near_each_other(job, pieces) if self.placement.topology else repeat(self.nodes)
        for piece, nodes in zip(pieces, candidates, strict=False):
            node = self.choose(piece, nodes)
            if node is None:
                for other, taken, on in placed:
                    other.give_back(taken, job.id, on)
                self.random = random  # an attempt that fails leaves nothing behind
                return False
            gpus = self.pick(node, piece)
            node.take(piece, job.id, gpus)
            placed.append((node, piece, gpus))
        job.placed = placed
        return True

    def pieces(self, row: Jobs) -> list[Piece]:
        """A job with pods comes in equal pieces; one that is larger than the largest node that it accepts comes in
        whole nodes of that size and one remainder."""
        self.placing = row.id[0]
        accepted = row.type_sets[int(row.types[0])]
        request = (len(self.nodes), accepted, *(getattr(row, name)[0] for name in gangs.REQUEST if name != "types"))
        if request not in self.pieces_by_request:  # the same until a node is added
            self.pieces_by_request[request] = self.cut(row)
        return self.pieces_by_request[request]

    def cut(self, row: Jobs) -> list[Piece]:
        """The pieces of a job with a request that is new."""
        gpus, pods = int(row.gpus[0]), int(row.pods[0])
        accepted = row.type_sets[int(row.types[0])]
        types = sum(1 << i for i, name in enumerate(self.types) if accepts(accepted, name))

        def piece(g: int, part: int, parts: int) -> Piece:
            cpu, memory = (-(-int(amount) * part // parts) for amount in (row.cpu[0], row.memory[0]))
            spread = pods > 1 and g > 1 and bool(row.milli[0] < WHOLE)
            return Piece(g, int(row.milli[0]), float(row.gpu_memory[0]), cpu, memory, types, spread)

        if pods:
            return [piece(gpus // pods, 1, pods)] * pods
        if gpus == 0 or row.milli[0] < WHOLE:
            return [piece(gpus, 1, 1)]
        empty = [dataclasses.replace(node) for node in self.nodes if node.gpus]
        able = [n.gpus for n in empty if n.fits(piece(min(n.gpus, gpus), min(n.gpus, gpus), gpus))]
        largest = max(able, default=gpus)
        whole, rest = divmod(gpus, largest)
        pieces = [piece(largest, largest, gpus)] * whole + [piece(rest, rest, gpus)] * bool(rest)
        if len(pieces) > 1:
            total = {name: getattr(pieces[0], name) + getattr(pieces[-1], name) for name in ("gpus", "cpu", "memory")}
            if any(node.fits(dataclasses.replace(pieces[0], **total)) for node in empty):
                return [piece(gpus, 1, 1)]  # two would share a node: as one, it fits nowhere
        return pieces

    def enough_nodes(self, pieces: list[Piece]) -> bool:
        """Whether every piece finds a node of its own: the first ones are whole nodes, the last may be smaller."""
        whole = sum(self.able(n, pieces[0]) for n in self.nodes)
        alike = sum(p == pieces[0] for p in pieces)
        return whole >= alike and (alike == len(pieces) or sum(self.able(n, pieces[-1]) for n in self.nodes) > alike)

    def able(self, node: Node, piece: Piece) -> bool:
        """Whether the node takes the piece now."""
        return node.fits(piece)

    def choose(self, piece: Piece, nodes: list[Node] | None = None) -> Node | None:
        """Of these nodes, or all, the fitting one with the highest score, ties by the rule."""
        candidates = self.nodes if nodes is None else nodes
        return self.break_ties([(self.score(piece, n)[0], n) for n in candidates if self.able(n, piece)])

    def break_ties(self, scored: list[tuple[float, Node]]) -> Node | None:
        """The node with the highest score; None of no node."""
        if not scored:
            return None
        top = max(score for score, _ in scored)
        best = [node for score, node in scored if score == top]
        if self.ties == "random":
            return best[self.draw(len(best))]
        return best[0] if self.ties == "lowest" else best[-1]

    def score(self, piece: Piece, node: Any) -> tuple[float, int]:
        """The placement's score of a node and, where the placement chooses GPUs, the GPU that a share should take.

        Raises:
            ValueError: the placement raises; with the job, the node and the time.
        """
        score: Any = self.placement.score
        arguments = (piece, node, self.context)[: arguments_of(score)]
        try:
            both = score(*arguments)
            if not math.isfinite(both[0] if isinstance(both, tuple) else both):
                raise ValueError(f"its result is {both}; expected a finite number")
        except Exception as error:
            raise ValueError(
                f"placement '{self.placement.name}' at {self.now:g} s raised {type(error).__name__}: {error}; of job "
                f"{self.placing!r} ({count(piece.gpus, 'GPU')}) on node '{node.id}'"
            ) from error
        return both if isinstance(both, tuple) else (float(both), -1)

    def pick(self, node: Node, piece: Piece) -> list[int]:
        """Whole GPUs from the lowest number; for a share the placement's choice, a random GPU, or the tightest. Pods of
        several shares each take the GPUs with the most free, so that as many of a job's pods fit as can."""
        taken: list[int] = []
        for _ in range(piece.gpus):
            able = [g for g in range(node.gpus) if g not in taken and node.milli[g] >= piece.milli]
            chosen = min(able, key=lambda g: -node.milli[g] if piece.spread else node.milli[g])
            if piece.milli < WHOLE and self.placement.gpu == "score" and piece.gpus == 1:
                chosen = self.score(piece, node)[1]
            elif piece.milli < WHOLE and self.placement.gpu == "random" and not piece.spread:
                for tried, gpu in enumerate(able, start=1):  # reservoir sampling
                    chosen = gpu if self.draw(tried) == 0 else chosen
            taken.append(chosen)
        return taken

    def draw(self, n: int) -> int:
        self.random, number = draw(self.random, n)
        return number

    # ---- topology ----------------------------------------------------------------------------------------------------

    def near_each_other(self, job: Job, pieces: list[Piece]) -> Iterator[list[Node]]:
        """The candidate nodes of each piece; each is asked for after the pieces before it are placed."""
        if len(pieces) == 1:
            yield self.fullest_with_best_score(pieces[0])
            return
        first = 0
        while first < len(pieces):
            nodes, number = self.nearest(job, pieces[first:])
            yield from [nodes] * number
            first += number

    def fullest_with_best_score(self, piece: Piece) -> list[Node]:
        """The domain for the only piece of a job; empty where it fits nowhere."""
        scored = [(self.score(piece, node)[0], node) for node in self.nodes if self.able(node, piece)]
        best = [node for score, node in scored if score == max(score for score, _ in scored)]
        racks = [rack for rack in split(self.nodes, "rack") if any(node is n for node in best for n in rack)]
        domains = split(min(racks, key=free), "domain") if racks else []
        return min((d for d in domains if any(node is n for node in best for n in d)), key=free, default=[])

    def nearest(self, job: Job, rest: list[Piece]) -> tuple[list[Node], int]:
        """The candidate nodes of the next of the remaining pieces, and for how many pieces; no nodes for one piece
        where it fits nowhere."""
        racks = split(self.nodes, "rack")
        for parts in ([(rack, domain) for rack in racks for domain in split(rack, "domain")], [(r, r) for r in racks]):
            able = [(rack, part) for rack, part in parts if self.takes(job, part, rest) == len(rest)]
            if able:  # the first where equal
                return min(able, key=lambda pair: (free(pair[0]), pair[0][0].rack, free(pair[1])))[1], len(rest)
        if self.placement.topology == REQUIRED:
            return [], 1
        alike = [piece for piece in rest if piece == rest[0]]
        most = max(racks, key=lambda rack: self.takes(job, rack, alike))
        return most, max(self.takes(job, most, alike), 1)

    def parts(self) -> list[list[Node]]:
        """Where a gang may preempt: a domain, a rack, or anywhere unless one rack is required."""
        domains, racks = split(self.nodes, "domain"), split(self.nodes, "rack")
        anywhere = [] if self.placement.topology == REQUIRED else [[node for rack in racks for node in rack]]
        return domains + racks + anywhere

    def takes(self, job: Job, nodes: list[Node], pieces: list[Piece]) -> int:
        """How many of the pieces fit on these nodes, one after the other."""
        placed: list[tuple[Node, Piece, list[int]]] = []
        for piece in pieces:
            node = next((node for node in nodes if self.able(node, piece)), None)
            if node is None:
                break
            gpus = self.pick(node, piece)
            node.take(piece, job.id, gpus)
            placed.append((node, piece, gpus))
        for node, piece, gpus in placed:
            node.give_back(piece, job.id, gpus)
        return len(placed)


def split(nodes: Iterable[Node], by: str) -> list[list[Node]]:
    """Racks in order of their numbers, or domains."""
    ordered = sorted(nodes, key=lambda node: (node.rack, node.domain))
    return [list(same) for _, same in groupby(ordered, lambda node: (node.rack, getattr(node, by)))]


def free(nodes: Iterable[Node]) -> int:
    """Free thousandths of GPUs."""
    return sum(sum(node.milli) for node in nodes)

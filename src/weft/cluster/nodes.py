"""The nodes of the reference engine, and where on them a placement puts a job."""

from __future__ import annotations

import dataclasses
import inspect
from itertools import repeat
from typing import Any

import numpy as np

from weft.cluster import gangs, topology
from weft.cluster import ties as tie_rules
from weft.cluster.model import WHOLE, Cluster, Jobs, NodeGroup
from weft.cluster.parts import Job, Node, Piece
from weft.cluster.placement import NOTHING
from weft.cluster.placement import find as find_placement
from weft.words import count


class Nodes:
    """Nodes, and a placement that chooses among them; its arguments as those of the simulator."""

    def __init__(self, placement: str, ties: str, seed: int):
        self.placement = find_placement(placement)
        self.ties = tie_rules.check(ties or self.placement.ties)
        self.random = tie_rules.first_state(seed)
        self.context = NOTHING  # what the placement knows of the whole trace
        self.nodes: list[Node] = []
        self.types: list[str] = []
        self.racks: list[str] = []
        self.domains: list[str] = []
        self.cut: dict[tuple[Any, ...], list[Piece]] = {}  # what a job asks → its pieces
        self.now = 0.0
        self.asking: Any = None  # the job whose pieces are being placed

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
        """A node with so many GPUs, each with so many GB; cores and main memory are not looked at while they are 0. Without a
        name of an NVLink domain it is one of its own."""
        if any(node.id == id for node in self.nodes):
            raise ValueError(f"node '{id}' is there already; a node needs a name of its own")
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
            raise ValueError(f"node '{id}': nvlink_domain '{nvlink_domain}' lies in another rack; expected one rack")
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
        """Gives all its pieces to a job, or none."""
        pieces = self.pieces(job.row)
        if not job.row.pods[0] and len(pieces) > 1 and not self.enough_nodes(pieces):
            return False
        placed: list[tuple[Node, Piece, list[int]]] = []
        random = self.random
        among = topology.where(self, job, pieces) if self.placement.topology else repeat(self.nodes)
        for piece, nodes in zip(pieces, among, strict=False):
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
        """A job with pods comes in equal ones; one that is larger than the largest node that it accepts on whole nodes of that
        size and one remainder."""
        self.asking = row.id[0]
        accepted = row.type_sets[int(row.types[0])]
        asked = (len(self.nodes), accepted, *(getattr(row, name)[0] for name in gangs.REQUEST if name != "types"))
        if asked not in self.cut:  # the same until a node is added
            self.cut[asked] = self.pieces_of(row)
        return self.cut[asked]

    def pieces_of(self, row: Jobs) -> list[Piece]:
        """The pieces of a job that asks what no other has asked yet."""
        gpus, pods = int(row.gpus[0]), int(row.pods[0])
        accepted = row.type_sets[int(row.types[0])]
        types = sum(1 << i for i, name in enumerate(self.types) if not accepted or name in accepted)

        def piece(g: int, part: int, parts: int) -> Piece:
            cpu, memory = (-(-int(amount) * part // parts) for amount in (row.cpu[0], row.memory[0]))
            apart = pods > 1 and g > 1 and bool(row.milli[0] < WHOLE)
            return Piece(g, int(row.milli[0]), float(row.gpu_memory[0]), cpu, memory, types, apart)

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
        among = self.nodes if nodes is None else nodes
        scored = [(self.score(piece, n)[0], n) for n in among if self.able(n, piece)]
        if not scored:
            return None
        top = max(score for score, _ in scored)
        best = [n for score, n in scored if score == top]
        if self.ties == "random":
            return best[self.draw(len(best))]
        return best[0] if self.ties == "lowest" else best[-1]

    def score(self, piece: Piece, node: Node) -> tuple[float, int]:
        """What the placement thinks of a node, and, where it says so, the GPU that a share should take.

        Raises:
            ValueError: the placement raises; with the job, the node and the moment.
        """
        score: Any = self.placement.score
        given = (piece, node, self.context)[: len(inspect.signature(score).parameters)]
        try:
            both = score(*given)
        except Exception as error:
            raise ValueError(
                f"placement '{self.placement.name}' at {self.now:g} s raised {type(error).__name__}: {error}; of job "
                f"{self.asking!r} ({count(piece.gpus, 'GPU')}) on node '{node.id}'"
            ) from error
        return both if isinstance(both, tuple) else (float(both), -1)

    def pick(self, node: Node, piece: Piece) -> list[int]:
        """Whole GPUs from the lowest number; for a share the placement's choice, a random GPU, or the tightest. Pods of several
        shares each take those with the most room: so as many of a job's pods fit as can, whatever was tried before."""
        taken: list[int] = []
        for _ in range(piece.gpus):
            able = [g for g in range(node.gpus) if g not in taken and node.milli[g] >= piece.milli]
            found = min(able, key=lambda g: -node.milli[g] if piece.apart else node.milli[g])
            if piece.milli < WHOLE and self.placement.gpu == "score" and piece.gpus == 1:
                found = self.score(piece, node)[1]
            elif piece.milli < WHOLE and self.placement.gpu == "random" and not piece.apart:
                for seen, gpu in enumerate(able, start=1):  # reservoir sampling
                    found = gpu if self.draw(seen) == 0 else found
            taken.append(found)
        return taken

    def draw(self, n: int) -> int:
        self.random, number = tie_rules.draw(self.random, n)
        return number

"""Collectives and point-to-point messages over NCCL, Gloo and MPI: measured against the link, and checked.

``weft comm`` measures; :func:`weft.comm.run.join` and :class:`weft.comm.group.Group` are what a program uses.
"""

from weft.comm.collectives import COLLECTIVES, REDUCED, Buffers, Collective

__all__ = ["COLLECTIVES", "REDUCED", "Buffers", "Collective"]

"""Simulating the scheduling of a GPU cluster: traces, nodes, policies, an exact and fast engine, metrics. No PyTorch.

``model.py``: clusters and jobs as columns. ``traces/``, ``clusters/``: file formats; ``synthetic/``: generated traces.
``orders/``, ``placements/``: the policies, one file each. ``simulation.py``, ``comparison.py``: running them, on the
compiled ``engine/`` or the plain ``reference/`` simulator. ``metrics.py``, ``save.py``, ``terminal.py``,
``pictures/``: results.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.cluster.comparison import Compared as Compared
    from weft.cluster.comparison import Policy as Policy
    from weft.cluster.comparison import compare as compare
    from weft.cluster.model import Cluster as Cluster
    from weft.cluster.model import Jobs as Jobs
    from weft.cluster.model import NodeGroup as NodeGroup
    from weft.cluster.reference import Simulator as Simulator
    from weft.cluster.result import Result as Result
    from weft.cluster.simulation import simulate as simulate
    from weft.cluster.synthetic.generate import generate as generate

_PUBLIC = {
    "Cluster": "model",
    "Compared": "comparison",
    "Jobs": "model",
    "NodeGroup": "model",
    "Policy": "comparison",
    "Result": "result",
    "Simulator": "reference",
    "compare": "comparison",
    "generate": "synthetic.generate",
    "simulate": "simulation",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Imported when first used: the ``weft`` command lists the commands of this package without NumPy."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'weft.cluster' has no attribute '{name}'")
    globals()[name] = getattr(import_module(f"weft.cluster.{_PUBLIC[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *__all__]

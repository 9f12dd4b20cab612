"""weft's own cluster file (:mod:`weft.cluster.specification`), of which the simulator takes the nodes."""

from pathlib import Path

from weft.cluster.cluster_file import ClusterFormat
from weft.cluster.files.kubernetes import YAML
from weft.cluster.files.text import TraceError
from weft.cluster.model import Cluster
from weft.cluster.specification import GROUP, read


def load(path: Path) -> Cluster:
    """Every mistake is named with its line.

    Raises:
        TraceError: as :func:`weft.cluster.specification.read`.
        ImportError: PyYAML is missing.
    """
    made = read(path)
    try:
        return Cluster.of(pool.nodes for pool in made.pools)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


CLUSTER = ClusterFormat(
    "yaml",
    load,
    lambda path, text: path.name.removesuffix(".gz").endswith((".yaml", ".yml")) and not YAML.search(text),
    "groups of nodes under 'nodes:', with " + ", ".join(GROUP),
)

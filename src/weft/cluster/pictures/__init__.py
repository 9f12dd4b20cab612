"""Pictures of simulated clusters: an interactive page that needs no network, or a static overview."""

from collections.abc import Sequence
from pathlib import Path

from weft.cluster.pictures.page import page
from weft.cluster.result import Result

__all__ = ["page", "write"]


def write(path: str | Path, results: Sequence[Result], trace: str = "") -> Path:
    """Writes ``.html``, the page, or ``.png`` or ``.svg``, a static overview. Folders on the way are made.

    Args:
        trace: its name, for the page.

    Raises:
        ValueError: another suffix, or no result.
        ModuleNotFoundError: a static overview without matplotlib (``pip install 'weft[pictures]'``).
    """
    from weft import records

    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".html", ".png", ".svg"):
        raise ValueError(f"a picture '{path.name}'; expected a name that ends in .html, .png or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    if suffix == ".html":
        records.write_whole(path, page(results, trace=trace))
    else:
        from weft.cluster.pictures.overview import overview

        overview(path, results)
    return path

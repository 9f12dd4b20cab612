"""The help of ``weft simulate``: it names the formats, orders and placements that are there."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class NamesPlugins(TyperCommand):
    """A command whose help names the formats, orders and placements that are there when it is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            text = getattr(parameter, "help", None) or ""
            for word, names in PLUGINS.items():
                if word in text:
                    try:
                        text = text.replace(word, names())
                    except ImportError:
                        text = text.replace(word, "those that `pip install 'weft[cluster]'` brings")
            if text:
                parameter.help = text  # type: ignore[attr-defined]  # options and arguments have one, their base has not
        super().format_help(ctx, formatter)


def _formats() -> str:
    from weft.cluster import trace

    return ", ".join(trace.formats())


def _format_options() -> str:
    from weft.cluster import trace

    return ", ".join(f"{name}: {' '.join(of.options)}" for name, of in trace.formats().items() if of.options)


def _orders() -> str:
    from weft.cluster.orders import ORDERS

    return ", ".join(ORDERS)


def _placements() -> str:
    from weft.cluster.placements import PLACEMENTS

    return ", ".join(PLACEMENTS)


def _metrics() -> str:
    from weft.cluster.compare import METRICS

    ends: dict[
        str, list[str]
    ] = {}  # by stem: a whole name is longer than the column of a narrow terminal, and would be cut
    for name in METRICS:
        stem, dot, end = name.rpartition(".")
        ends.setdefault(stem or name, []).extend([dot + end] if stem else [])
    return ", ".join(" ".join([stem, *of]) for stem, of in ends.items())


PLUGINS = {
    "FORMATS": _formats,
    "FORMAT_OPTIONS": _format_options,
    "ORDERS": _orders,
    "PLACEMENTS": _placements,
    "METRICS": _metrics,
}

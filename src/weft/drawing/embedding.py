"""What every page with charts shares: its template's surroundings, and charts as data that the page draws."""

import json
from pathlib import Path
from typing import Any

from weft.drawing import palette, quantities
from weft.words import count

HERE = Path(__file__).parent


def template(folder: Path, name: str = "page.html.j2") -> Any:
    """A Jinja template of ``folder``, with the style sheet, the colours and Bokeh's script to put into the page.

    It may import ``chart.html.j2``, and what it includes is looked for in ``folder`` first.
    """
    from bokeh.resources import Resources  # late, with the charts: the tables of the docs do not need it
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader([folder, HERE])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {
        "count": count,
        **{
            name: getattr(quantities, name)
            for name in ("figures", "percent", "ratio", "si", "kib", "spread", "listing")
        },
    }
    environment.filters["json"] = _json
    environment.globals |= {
        "css": (HERE / "page.css").read_text(encoding="utf-8"),
        "colors": [palette.variables(0), palette.variables(1)],
        "to_dark": palette.TO_DARK,
        "bokeh": "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw),
    }
    return environment.get_template(name)


def _json(value: Any) -> Any:
    """JSON that may stand inside a ``<script>``: nothing in it can end the element."""
    from markupsafe import Markup

    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def embed(chart: Any) -> dict[str, Any] | None:
    """A chart with its figure as data that the page draws when the reader comes near it."""
    if chart is None:
        return None
    from bokeh.embed import json_item

    return vars(chart) | {"height": chart.figure.height, "figure": json_item(chart.figure)}


def embed_all(*made: Any) -> list[dict[str, Any]]:
    return [embedded for embedded in map(embed, made) if embedded]

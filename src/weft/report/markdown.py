"""A table as Markdown writes it."""

from collections.abc import Iterable, Sequence


def grid(head: Sequence[str], body: Iterable[Sequence[str]], numbers_from: int) -> str:
    """Lines of a table; the columns from ``numbers_from`` on hold numbers and stand to the right."""
    rule = ["---"] * numbers_from + ["---:"] * (len(head) - numbers_from)
    return "\n".join("| " + " | ".join(row) + " |" for row in (list(map(cell, head)), rule, *body))


def cell(text: str) -> str:
    """Text that can neither end its cell nor open a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

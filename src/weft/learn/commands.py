"""``weft learn``: the course."""

from typing import Annotated

import typer

from weft.console import print_line

PANEL = "Course"


def register(app: typer.Typer) -> None:
    """Adds the commands to the ``weft`` command."""
    app.command("learn dev-check", rich_help_panel=PANEL, hidden=True)(dev_check)


def dev_check(
    days: Annotated[
        list[str] | None, typer.Argument(help="days, as 1 or day1, or one exercise, as day1/NAME; else all")
    ] = None,
) -> None:
    """For authors: solutions pass, skeletons fail, wrong solutions are rejected, pages exist in both languages."""
    from weft.learn import course, dev

    count = 0

    def say(name: str, problems: list[str], seconds: float) -> None:
        print_line(f"{'✗' if problems else '✓'} {name} ({seconds:.1f} s)")
        for problem in problems:
            print_line(f"    {problem}")

    with dev.Servers() as servers:
        for name in days or [d.name for d in course.days()]:
            if "/" in name:
                found = list(dev.problems(course.find(name), servers))
                say(name, found, 0.0)
                count += len(found)
            else:
                count += dev.check_day(course.find_day(name), servers, say)
    if count:
        raise typer.Exit(1)

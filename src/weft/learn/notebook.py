"""A notebook a day, from the lesson and the skeletons: text and code in one file, for those who read in Jupyter."""

from collections.abc import Iterator
from pathlib import Path

from weft.learn.course import Day
from weft.learn.language import LANGUAGES, Text

START = Text(
    "Edit the cells of an exercise, then run the one below it: it checks what you wrote.",
    "编辑练习单元格，然后运行其下方的单元格：它会检查你的代码。",
)


def source(day: Day, language: str) -> str:
    """The notebook as jupytext's py:percent text.

    An exercise's cell is written to the learner's file by IPython's ``%%writefile``, and checked by the next cell.
    """
    parts = [
        _markdown(day.lesson(language)),
        _markdown(START[language]),
        _code(f"!weft learn init . --lang {language}"),
    ]
    for exercise in day.exercises:
        parts.append(_markdown(f"## {exercise.title[language]}"))
        for path, text in exercise.skeleton(language).items():
            parts.append(_code(f"%%writefile {path}\n{text.rstrip()}"))
        parts.append(_code(f"!weft learn check {exercise.id}"))
    return "\n\n".join(parts) + "\n"


def write(folder: Path, days: list[Day]) -> Iterator[Path]:
    """Writes ``dayN.LANGUAGE.ipynb``."""
    try:
        import jupytext
    except ModuleNotFoundError:
        raise ModuleNotFoundError("notebooks need jupytext: pip install 'weft[learn]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    for day in days:
        for language in LANGUAGES:
            path = folder / f"{day.id}.{language}.ipynb"
            made = jupytext.reads(source(day, language), fmt="py:percent")
            for number, cell in enumerate(made.cells):
                cell["id"] = f"{day.id}-{number}"  # the same at every run
            jupytext.write(made, path, fmt="ipynb")
            yield path


def _markdown(text: str) -> str:
    return "# %% [markdown]\n" + "\n".join(f"# {line}".rstrip() for line in text.strip().splitlines())


def _code(text: str) -> str:
    """A cell; its first line may be a command of IPython, which py:percent keeps as a comment."""
    return "# %%\n" + ("# " if text.startswith(("!", "%")) else "") + text

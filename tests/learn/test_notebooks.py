"""A notebook a day and language: its cells, run one after another as Jupyter would, write the exercises and check them."""

import pytest

pytest.importorskip("jupytext", reason="jupytext is not installed: pip install 'weft[learn]'")
import nbformat

from weft.learn import course, machine, notebook

QUICK = "day0"


@pytest.mark.parametrize(
    "day", [pytest.param(d, marks=() if d.id == QUICK else pytest.mark.long) for d in course.days()], ids=lambda d: d.id
)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_cells_run_and_check_what_they_write(day, language, command, tmp_path, monkeypatch):
    monkeypatch.setattr(
        machine, "_measured", lambda: {"device": "a test", "dram_gb_s": 10.0, "fp32_gflop_s": 20, "balance": 2.0}
    )
    monkeypatch.setattr(course, "days", lambda days=(day,): days)
    monkeypatch.chdir(tmp_path)
    path = next(p for p in notebook.write(tmp_path / "books", [day]) if p.name == f"{day.id}.{language}.ipynb")
    made = nbformat.read(path, as_version=4)
    nbformat.validate(made)
    assert day.lesson(language).strip().splitlines()[0].lstrip("# ") in made.cells[0].source
    checked = []
    for solved in (False, True):
        for cell in made.cells:
            if cell.cell_type != "code":
                continue
            head, _, body = cell.source.partition("\n")
            if head.startswith("%%writefile "):
                file = tmp_path / head.split()[1]
                (exercise,) = [e for e in day.exercises if head.split()[1] in e.paths().values()]
                assert body.rstrip() == exercise.skeleton(language)[head.split()[1]].rstrip()
                file.write_text(exercise.solution(language)[head.split()[1]] if solved else body)
            else:
                assert cell.source.startswith("!weft learn ") and not body
                code, out, err = command(*cell.source.removeprefix("!weft ").split())
                if " check " in cell.source:
                    assert code == (0 if solved else 1), out + err
                    checked.append(cell.source.split()[-1])
                else:
                    assert code == 0
    assert checked == 2 * [e.id for e in day.exercises]

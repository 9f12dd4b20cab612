"""The marked source: one file, of which the skeleton and the solution in either language are made."""

import pytest

from weft.learn import course, marked
from weft.learn.language import Text

SOURCE = '''"""
[en
Add one.
en]
[zh
加一。
zh]
"""

# I AM NOT DONE


def f(x):
    # TODO(en): add
    #   one
    # TODO(zh): 加一
    # [solution
    return x + 1
    # solution]
    # [skeleton
    #: return x
    #:
    # skeleton]
'''


def test_one_source_gives_skeleton_and_solution_in_each_language():
    en, zh = (marked.skeleton(SOURCE, language) for language in ("en", "zh"))
    assert en == '"""\nAdd one.\n"""\n\n# I AM NOT DONE\n\n\ndef f(x):\n    # TODO: add\n    #   one\n    return x\n'
    assert zh == '"""\n加一。\n"""\n\n# I AM NOT DONE\n\n\ndef f(x):\n    # TODO: 加一\n    return x\n'
    assert marked.solution(SOURCE, "en") == en.replace("# I AM NOT DONE\n\n\n", "\n").replace(
        "return x", "return x + 1"
    )


def test_a_wrong_solution_is_the_solution_with_some_of_its_text_replaced(tmp_path):
    (tmp_path / "exercise.py").write_text(SOURCE, encoding="utf-8")
    exercise = course.Exercise("f", "day9_test", 1, "python", Text("f", "f"), tmp_path)
    assert exercise.wrong() == []
    table = '[right.two]\nwhy = "Adds two."\nedits = [["x + 1", "x + 2"], ["x + 2", "x + 3"]]\n'
    (tmp_path / "wrong.toml").write_text(table)
    (wrong,) = exercise.wrong()
    assert (wrong.name, wrong.stage, wrong.why) == ("two", "right", "Adds two.") and "return x + 3" in wrong.source
    for bad, said in (
        (table.replace('"x + 1"', '"y"'), "'y' occurs 0 times; expected once"),
        (table.replace('"x + 1"', '"x"'), "occurs 2 times"),
        (table + "stage = 1\n", r"expected a table \[right.two\] with why and edits"),
        ('right = { two = "x" }', r"expected a table \[right.two\]"),
        ("[right.two\n", "wrong.toml: "),
    ):
        (tmp_path / "wrong.toml").write_text(bad)
        with pytest.raises(ValueError, match=said):
            exercise.wrong()


def test_cuda_sources_are_marked_in_their_own_comments():
    text = (
        "// TODO(en): go\n// TODO(zh): 走\n// [solution\nint a;\n// solution]\n// [skeleton\n//: int b;\n// skeleton]\n"
    )
    assert marked.skeleton(text, "zh") == "// TODO: 走\nint b;\n"
    assert marked.solution(text, "en") == "// TODO: go\nint a;\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# [solution\n", "has no end"),
        ("# solution]\n", "line 1: solution] ends what did not begin"),
        ("# [solution\n# [en\n", "line 2: [en begins inside [solution"),
        ("# [skeleton\nreturn 1\n# skeleton]\n", "line 2: a line of the skeleton must stand behind"),
    ],
)
def test_a_damaged_source_is_refused_by_line(text, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        marked.skeleton(text, "en")

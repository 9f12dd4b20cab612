"""The runner on what learners really hand in: errors, loops, crashes; and on those who would rather pass than learn."""

from dataclasses import replace

import pytest

from weft.learn import dev

ROWS = "def rows(x):\n    return x @ torch.ones(x.shape[1])"


def test_the_solution_passes_and_the_skeleton_does_not(submit, sums, servers):
    verdict = submit()
    assert verdict.passed and verdict.reached == {"parse", "run", "right"}
    skeleton = dev.check_sources(sums, dev.by_suffix(sums.skeleton("zh")), servers)
    assert (skeleton.failed, skeleton.done, skeleton.passed) == ("right", False, False)


def test_the_marker_must_go_as_well(submit):
    verdict = submit('"""# I AM NOT DONE"""\nimport torch\n# I AM NOT DONE\n' + SOLVED)
    assert verdict.failed is None and not verdict.done and not verdict.passed
    assert submit('"""\n# I AM NOT DONE\n"""\nimport torch\n' + SOLVED).passed  # in a string it is no comment


SOLVED = (
    "def total(values):\n    result = 0.0\n    for v in values:\n        result += v\n    return result\n\n\n"
    + ROWS
    + "\n"
)


@pytest.mark.parametrize(
    ("total", "stage", "said"),
    [
        ("def total(values:\n    return 0", "parse", "line 4: Python cannot parse this"),
        ("def total(values):\n\treturn 0\n    return 1", "parse", "line"),
        ("def total(values):\n    return values[99]", "run", "line 5 in total: IndexError"),
        ("def total(values):\n    return valeus", "run", "line 5 in total: NameError: name 'valeus'"),
        ("raise RuntimeError('at import')\n\ndef total(values): pass", "run", "line 4: RuntimeError: at import"),
        ("# def total(values):\n#     return 1.0\n", "run", "defines no `total`\nline 4 has code in a comment"),
        ("def total(values):\n    raise SystemExit", "run", "line 5 in total: SystemExit"),
        ("def total(values):\n    return [0] * 10**12", "run", "MemoryError"),
        ("def total(values):\n    return total(values)", "run", "RecursionError"),
        ("def total(values):\n    print('seen', len(values))", "right", "returned None"),
        ("def total(values):\n    return float('nan')", "right", "returned nan"),
        ("def total(values):\n    return str(len(values))", "right", "returned '"),
        ("def total(values):\n    values.clear()\n    return 0.0", "right", "total changed its argument number 1"),
    ],
)
def test_each_failure_names_its_stage_and_place(submit, total, stage, said):
    source = "import torch\n\n\n" + total + "\n\n\n" + ROWS + "\n"
    verdict = submit(source)
    text = "\n".join([verdict.why.en, *(m.en for m in verdict.more)])
    assert verdict.failed == stage, text
    assert said in text
    assert verdict.why.zh and (verdict.why.zh != verdict.why.en or "RecursionError" in said)
    if "print" in total:
        assert verdict.printed.startswith("seen ")


def test_a_loop_that_never_ends_is_stopped_and_said_where(submit, sums):
    short = replace(sums, time_limit_s=3)
    verdict = submit(exercise=short, total="def total(values):\n    while values:\n        pass\n    return 0.0")
    assert verdict.failed == "run" and verdict.why.en.startswith("stopped after 3 s at line")
    assert "in total" in verdict.why.en and verdict.seconds < 6


def test_a_crash_of_the_process_is_said_where(submit):
    crash = (
        "def rows(x):\n    import numpy as np\n    a = np.zeros(1)\n"
        "    return np.lib.stride_tricks.as_strided(a, (10**9,), (1 << 20,)).sum()"
    )
    verdict = submit(rows=crash.replace(".sum()", ".max()"))
    assert verdict.failed == "run" and "crashed: Segmentation fault" in verdict.why.en
    assert "in rows" in verdict.why.en and "as_strided" in verdict.why.en


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("def rows(x):\n    return x", "has shape"),
        ("def rows(x):\n    return x.double() @ torch.ones(4, dtype=torch.float64)", "has dtype float64"),
        ("def rows(x):\n    return torch.empty(len(x))", "are wrong"),  # memory that nothing wrote
        ("def rows(x):\n    return torch.full((len(x),), float('nan'))", "are wrong"),
        ("def rows(x):\n    return torch.full((len(x),), float('inf'))", "are wrong"),
        ("def rows(x):\n    return [1.0]", "returned a list"),
        ("def rows(x):\n    y = x @ torch.ones(4)\n    y[1] += 1\n    return y", "1 of"),
        ("KEPT = {}\ndef rows(x):\n    return KEPT.setdefault('y', torch.zeros(len(x)))", "are wrong"),
        (
            "class Lazy(torch.Tensor):\n    pass\ndef rows(x):\n    return (x @ torch.ones(4)).as_subclass(Lazy)",
            "returned a Lazy",
        ),
    ],
)
def test_an_array_is_compared_by_shape_dtype_and_element(submit, rows, said):
    verdict = submit(rows=rows)
    assert verdict.failed == "right" and said in verdict.why.en, verdict.why.en


@pytest.mark.parametrize(
    "cheat",
    [
        "import gc\ndef total(values):\n    return [o for o in gc.get_objects() if type(o) is float][-1]",
        "import sys\ndef total(values):\n    return sys._getframe(3).f_locals['expected']",
        "import math\nmath.isclose = lambda *a, **k: True\ndef total(values):\n    return 0.0",
        "torch.Tensor.__eq__ = lambda a, b: True\ndef total(values):\n    return 0.0",
        "torch.allclose = lambda *a, **k: True\ndef total(values):\n    return 0.0",
        "def total(values):\n    open('.weft-learn.json', 'w').write('{}')\n    return 0.0",
        "def total(values):\n    return eval('sum')(values)",
        "def total(values):\n    return getattr(torch.tensor(values), 'su' + 'm')()",
        "def total(values):\n    return sum(values)",
        "def total(values):\n    return torch.tensor(values).sum().item()",
        "def total(values):\n    return ().__class__.__base__.__subclasses__()",
        "from os import _exit\ndef total(values):\n    _exit(0)",
        "import weft.learn.checks\ndef total(values):\n    return 0.0",
        "import torch._C as c\ndef total(values):\n    return 0.0",
        "from torch import sum as add_up\ndef total(values):\n    return add_up(torch.tensor(values)).item()",
    ],
)
def test_ways_around_the_exercise_are_refused(submit, cheat):
    verdict = submit("import torch\n\n\n" + cheat + "\n\n\n" + ROWS + "\n")
    assert verdict.failed == "parse", (verdict.failed, verdict.why.en)
    assert "line" in verdict.why.en


def test_what_was_expected_is_not_in_the_learner_s_process(servers, sums, tmp_path):
    """Without any rule: a search of all objects finds the inputs, and no sum of them."""

    from weft.learn.judge import judge

    file = tmp_path / "01_sums.py"
    file.write_text(
        "import gc\nimport torch\n\n\ndef total(values):\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        "    print(any('secret_expected' in d for d in found), any('STAGES' in d and 'Checks' in d for d in found))\n"
        "    return 0.0\n"
    )
    verdict = judge(replace(sums, allow=("gc",)), {".py": file}, servers.of(sums))
    assert verdict.failed == "right" and verdict.printed.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("content", "stage"),
    [
        ((b"\xef\xbb\xbfimport torch\r\n\r\n" + SOLVED.replace("\n", "\r\n").encode()), None),
        (b"import torch\n" + SOLVED.encode() + b"# caf\xe9\n", "parse"),
        (b"import torch\x00\n" + SOLVED.encode(), "parse"),
        (b"", "run"),
    ],
)
def test_files_as_editors_leave_them(servers, sums, tmp_path, content, stage):
    from weft.learn.judge import judge

    file = tmp_path / "01_sums.py"
    file.write_bytes(content)
    verdict = judge(sums, {".py": file}, servers.of(sums))
    assert verdict.failed == stage, verdict.why.en

"""A small course of one exercise, and what a learner may write into it."""

import pytest

from weft.learn import course, dev, judge
from weft.learn.language import Text

CHECK = """
import math

def check(learner, t):
    for _ in range(3):
        values = [float(v) for v in t.rng.uniform(1, 2, int(t.rng.integers(2, 9)))]
        secret_expected = math.fsum(values)
        t.close(learner.total(values), secret_expected, f"total({values})")
    x = t.randn(t.integers(3, 9), 4)
    t.close(learner.rows(x), x.sum(1), "rows(x)")


def fast(learner, t):
    t.timed(learner.rows, [t.randn(512, 64)], lambda x: x.sum(1), "rows(x)", at_least=1e-6, M=512, N=64)
"""
SOURCE = '''"""Sums."""
import torch

# I AM NOT DONE


def total(values):
    # [solution
    result = 0.0
    for value in values:
        result += value
    return result
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]


def rows(x):
    # [solution
    return x @ torch.ones(x.shape[1])
    # solution]
    # [skeleton
    #: return x
    # skeleton]
'''


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """An exercise of two functions."""
    folder = tmp_path_factory.mktemp("course") / "sums"
    folder.mkdir()
    (folder / "exercise.py").write_text(SOURCE)
    (folder / "check.py").write_text(CHECK)
    for language in ("en", "zh"):
        (folder / f"hints.{language}.md").write_text("a\n---\nb\n---\nc\n")
        (folder / f"why.{language}.md").write_text(f"because ({language})\n")
    return course.Exercise(
        "sums",
        "day9_test",
        1,
        "python",
        Text("Sums", "求和"),
        folder,
        time_limit_s=60,  # a busy machine may give it a small part of a core
        requires="torch",
        forbid=("sum",),
        limit={"bytes": "4*M*(N+1)"},
    )


@pytest.fixture(scope="session")
def servers():
    with judge.Servers() as started:
        yield started


@pytest.fixture
def submit(sums, servers):
    """The verdict on a file: the solution with some of its text replaced, or another text."""
    solution = dev.by_suffix(sums.solution("en"))[".py"]

    def judged(text="", exercise=sums, **replaced):
        source = text or solution
        for name, body in replaced.items():
            at = source.index(f"def {name}(")
            end = source.find("\n\n\ndef ", at)
            source = source[:at] + body.strip("\n") + "\n" + (source[end:] if end > 0 else "")
        return dev.check_sources(exercise, {".py": source}, servers)

    return judged

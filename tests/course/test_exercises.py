"""The course: every solution passes, every skeleton fails as shipped, every wrong solution and cheat is rejected at the stage
that it names, and every page is in both languages, with the same headings and code."""

import pytest

from weft.learn import course, dev, judge, machine
from weft.learn.language import LANGUAGES

EXERCISES = course.exercises()


@pytest.fixture(scope="module")
def servers():
    with judge.Servers() as started:
        yield started


@pytest.mark.share(6)
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_the_check_tells_right_from_wrong(exercise, servers):
    assert list(dev.problems(exercise, servers)) == []


@pytest.mark.parametrize("day", course.days(), ids=lambda d: d.id)
def test_a_lesson_is_in_both_languages_and_takes_this_machine_s_numbers(day):
    assert list(dev.differing(course.FOLDER / day.name, "lesson")) == []
    numbers = dict.fromkeys(machine.NAMES, 1234.5)
    for language in LANGUAGES:
        assert "{{" not in machine.filled(day.lesson(language), numbers, language)
    for text in (day.title, day.outcome, day.written, *(e.title for e in day.exercises)):
        assert text.en and text.zh and text.en != text.zh


def test_names_are_unique_and_every_file_belongs_to_an_exercise():
    names = [e.name for e in EXERCISES]
    assert len(names) == len(set(names))
    for day in course.days():
        folders = {p.name for p in (course.FOLDER / day.name).iterdir() if p.is_dir() and p.name != "__pycache__"}
        assert folders == {e.name for e in day.exercises}

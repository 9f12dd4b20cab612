"""Calls that must be refused in words that help. A file lists them in ``REFUSED``, and does ``from refused import *``."""

import contextlib
import functools
from collections.abc import Callable

import pytest

from weft import ops

EITHER = (TypeError, ValueError)


@contextlib.contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], words: str):
    """What is called in it raises an error of one line that says all of these, which "; " separates, in any order."""
    with pytest.raises(error) as caught:
        yield
    said = str(caught.value)
    assert all(word in said for word in words.split("; ")) and "\n" not in said, said


def bad(call: str | Callable, error: type[Exception] | tuple, words: str, *arguments, **options):
    """A call of a public function, by its operator's name, or of any other function, and what its error says."""
    name = call if isinstance(call, str) else call.__qualname__
    return pytest.param((call, error, words, arguments, options), id=f"{name}-{words}")


def test_it_is_refused_in_words_that_help(bad_call):
    call, error, words, arguments, options = bad_call
    functions = [call]
    if isinstance(call, str):
        functions, words = [getattr(ops, call), functools.partial(ops.explain, call)], f"{call}: ; {words}"
    for function in functions:
        with refused(error, words):
            function(*arguments, **options)

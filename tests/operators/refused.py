"""Calls that must be refused in words that help."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], words: str):
    """What is called in it raises an error of one line that says all of these, which "; " separates, in any order."""
    with pytest.raises(error) as caught:
        yield
    said = str(caught.value)
    assert all(word in said for word in words.split("; ")) and "\n" not in said, said

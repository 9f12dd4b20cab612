"""The engine in plain Python, on arrays that refuse an index outside of them and poison what is not yet written: compiled, it
would read or write other memory without a word. ``test_engine.py`` runs it with NUMBA_DISABLE_JIT=1."""

import importlib
import linecache
import sys
from itertools import product

import numpy as np
from random_traces import KINDS, random_case
from schedules import both

from weft.cluster import Cluster, Jobs
from weft.cluster.engine import allocate, easy_reservation


class Checked(np.ndarray):
    """NumPy refuses an index past the end; this one also refuses any below 0 that is not written out, as in ``[-1]``."""

    def __getitem__(self, key):
        self.check(key)
        found = super().__getitem__(key)
        return Record(found) if isinstance(found, np.void) else found

    def __setitem__(self, key, value):
        self.check(key)
        super().__setitem__(key, value)

    def check(self, key):
        for k in key if isinstance(key, tuple) else (key,):
            if isinstance(k, (int, np.integer)) and k < 0:
                caller = sys._getframe(2)
                line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
                if f"[{k}]" not in line:
                    raise IndexError(f"index {k} in: {line.strip()}")


class Record:
    """``record.name`` for ``record["name"]``, as in compiled code."""

    def __init__(self, values):
        object.__setattr__(self, "values", values)

    def __getattr__(self, name):
        found = self.values[name]
        return found.view(Checked) if isinstance(found, np.ndarray) else found

    def __setattr__(self, name, value):
        self.values[name] = value


def checked(function):
    def check(argument):
        if isinstance(argument, tuple):  # of arrays, by name
            return type(argument)(*map(check, argument))
        return argument.view(Checked) if isinstance(argument, np.ndarray) else argument

    def on_checked_arrays(*arguments):
        with np.errstate(over="ignore"):  # random numbers are taken modulo 2^64
            return function(*map(check, arguments))

    return on_checked_arrays


class Poisoned:
    """NumPy with an ``empty`` that is full of what must not be looked at."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, *arguments):
        found = np.empty(*arguments).view(Checked)
        found.fill(np.nan if found.dtype.kind == "f" else -(10**6))
        return found


def check(seeds: range) -> None:
    for name in ("conservative", "easy", "preemption", "simple", "tenant"):
        module = importlib.import_module(f"weft.cluster.engine.{name}_loop")
        module.advance = checked(module.advance)
    allocate.place, allocate.give_back = checked(allocate.place), checked(allocate.give_back)
    easy_reservation.np = Poisoned()
    for name, count in product(set().union(*KINDS), range(4)):
        both(Jobs(np.arange(count), np.full(count, 2), np.full(count, 3)), Cluster.parse("1x4"), name)
    for seed in seeds:
        jobs, cluster, policy = random_case(seed)
        both(jobs, cluster, **policy)


if __name__ == "__main__":
    check(range(*map(int, sys.argv[1:])))

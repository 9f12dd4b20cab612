"""The compiled engine: its cache on disk, and that no array is read or written outside of it, or before it is written."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba.core.caching import NullCache
from where import ROOT, path_with, python

from weft.cluster.engine.compiled import compiled, entry

FIRST = """
from weft.cluster.engine.compiled import entry

@entry
def first(values):
    return values[0]
"""

# Numba reads the index of what is kept, writes it with one signature more, then that one's code: here each after some seconds.
SLOWLY = """
import time
from numba.core.caching import IndexDataCacheFile

def slow(seconds, write):
    def write_slowly(*what):
        time.sleep(seconds)
        write(*what)
    return write_slowly

IndexDataCacheFile._save_index = slow({}, IndexDataCacheFile._save_index)
IndexDataCacheFile._save_data = slow({}, IndexDataCacheFile._save_data)
"""

CALL = "import numpy; from first import first; print(first(numpy.array([{}])))"


def test_processes_that_compile_at_once_find_their_own_code_afterwards(tmp_path):
    (tmp_path / "first.py").write_text(FIRST)
    some = {"PYTHONPATH": path_with(tmp_path), "WEFT_CACHE": str(tmp_path / "cache")}
    calls = [CALL.format(value) for value in ("7", "1.5")]
    slowly = [SLOWLY.format(2, 0) + calls[0], SLOWLY.format(1, 2) + calls[1]]
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda call: python("-c", call, **some), slowly))
    done += [python("-c", call, **some) for call in calls]
    assert [each.stdout for each in done] == ["7\n", "1.5\n"] * 2, done[-1].stderr


@compiled
def product(a, b):
    return a * b


@entry
def products(values, one):
    return product(values[0], 3) + product(2, values[1]) + product(values[0], values[1]) + product(one, 2.5)


def test_a_compiled_function_has_one_form_for_all_integers_and_none_for_python(monkeypatch):
    monkeypatch.setattr(products, "_cache", NullCache())  # what an earlier run left has no calls to compile
    assert products(np.array([5, 7], np.int32), 2) == 15 + 14 + 35 + 5
    assert sorted(map(str, product.signatures)) == ["(int64, float64)", "(int64, int64)"]
    for arguments in ((2, 3), (1.5, 2.5)):  # compiled for these, and not
        with pytest.raises(
            TypeError, match="product is called from Python; expected a call from compiled code, or @entry"
        ):
            product(*arguments)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "seeds", ["0 10", "10 20", *(pytest.param(f"{k} {k + 88}", marks=pytest.mark.long) for k in range(20, 900, 88))]
)
def test_every_index_of_the_engine_is_within_its_array(seeds):
    done = python(str(ROOT / "tests/cluster/checked_engine.py"), *seeds.split(), NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr[-4000:]

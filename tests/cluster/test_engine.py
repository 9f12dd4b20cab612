"""The compiled engine: its cache on disk, and that no array is read or written outside of it, or before it is written."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from where import ROOT, path_with, python

FIRST = """
from weft.cluster.engine.compiled import compiled

@compiled
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


@pytest.mark.parametrize("seeds", ["0 20", pytest.param("20 900", marks=pytest.mark.long)])
def test_every_index_of_the_engine_is_within_its_array(seeds):
    done = python(str(ROOT / "tests/cluster/checked_engine.py"), *seeds.split(), NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr[-4000:]

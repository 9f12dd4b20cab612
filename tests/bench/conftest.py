import multiprocessing

import pytest

IMPORTED = ("weft.bench.parallel", "weft.bench.verify", "weft.operators.launch")


@pytest.fixture(scope="module")
def quick_processes():
    """Processes that weft spawns are forked from a server that has imported PyTorch and weft: seconds less for each. What
    they are given is pickled all the same."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(list(IMPORTED))
    any_context = multiprocessing.get_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda how=None: forked if how == "spawn" else any_context(how))
        yield

"""Tests that files share: of the kernels on the CPU emulator in a file's ``SUITES`` (``emulated``), and of the calls that are
refused in its ``REFUSED`` (``refused``)."""

import functools

import pytest
import turns

SHARE_OF_MISTAKES = 12  # a run has one in so many; each is compiled, which takes longer than to run it

pytest.register_assert_rewrite("emulated", "refused")


@pytest.fixture(scope="module")
def emulated(request, tmp_path_factory):
    """``emulated(name)``: a suite of the file with the cases and mistakes that run, compiled when it is first asked for."""
    from cuda_on_cpu import Emulated

    run = set()  # what the items that run are of: their suite, if they have one, and the name of a case or a mistake
    for item in request.session.items:
        if item.module is request.module and item.get_closest_marker("skip") is None and hasattr(item, "callspec"):
            words = {name: value for name, value in item.callspec.params.items() if isinstance(value, str)}
            run |= {(words.get("suite"), word) for word in words.values()}

    def made(name: str):
        suite = request.module.SUITES[name]
        return Emulated(
            tmp_path_factory.mktemp("emulated"),
            suite,
            lambda mistake: (name, mistake) in run,
            lambda case: bool({(name, case), (None, case)} & run) or case in suite.always,
        )

    return functools.cache(made)


@pytest.fixture
def launched(monkeypatch):
    """The launches that would go to a GPU: each a plan and its tensors, whose maps hold the addresses that they are of."""
    from hopper_on_cpu import encode_tiled

    from weft.operators.cuda import CudaPlan
    from weft.operators.hopper import tensor_maps

    launches = []
    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: encode_tiled)
    monkeypatch.setattr(CudaPlan, "__call__", lambda plan, *tensors: launches.append((plan, tensors)))
    return launches


def in_turn(suite: str, mistake: str) -> bool:
    return turns.has(f"{suite} {mistake}", SHARE_OF_MISTAKES)


def marks(name: str, suite, what: str, of: str):
    if what == "mistake":
        return () if in_turn(name, of) else pytest.mark.skip(reason="not of this run: make test-all has it")
    if of in suite.long:
        return pytest.mark.long
    return (
        ()
        if turns.has(f"{name} {of}", suite.share)
        else pytest.mark.skip(reason="not of this run: make test-all has it")
    )


def pytest_generate_tests(metafunc):
    """Each bad call; each case, or each mistake, of all suites."""
    if "bad_call" in metafunc.fixturenames:
        metafunc.parametrize("bad_call", metafunc.module.REFUSED)
    for what in {"case", "mistake"} & set(metafunc.fixturenames if "suite" in metafunc.fixturenames else ()):
        metafunc.parametrize(
            ("suite", what),
            [
                pytest.param(name, of, marks=marks(name, suite, what, of))
                for name, suite in metafunc.module.SUITES.items()
                for of in getattr(suite, f"{what}s")
            ],
        )

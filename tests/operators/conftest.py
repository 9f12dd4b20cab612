"""Kernels on the CPU emulator: a file says which in ``SUITES``, and imports those tests from ``emulated``."""

import functools

import pytest

pytest.register_assert_rewrite("emulated")


@pytest.fixture(scope="module")
def emulated(request, tmp_path_factory):
    """``emulated(name)``: a suite of the file, compiled when it is first asked for."""
    from cuda_on_cpu import Emulated

    return functools.cache(lambda name: Emulated(tmp_path_factory.mktemp("emulated"), request.module.SUITES[name]))


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


def pytest_generate_tests(metafunc):
    """Each case, or each mistake, of all suites."""
    for what in {"case", "mistake"} & set(metafunc.fixturenames if "suite" in metafunc.fixturenames else ()):
        metafunc.parametrize(
            ("suite", what),
            [
                pytest.param(name, of, marks=[pytest.mark.long] if what == "case" and of in suite.long else ())
                for name, suite in metafunc.module.SUITES.items()
                for of in getattr(suite, f"{what}s")
            ],
        )

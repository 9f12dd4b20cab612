from importlib.util import find_spec

import pytest
from fake_nvml import COMPILER, FakeNvml, build

collect_ignore = [] if find_spec("hypothesis") else ["test_exporter.py"]


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if COMPILER is None:
        pytest.skip("no C compiler for the fake NVML")
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake_nvml(nvml_library, tmp_path, monkeypatch):
    """Two H100s that processes started from now on see."""
    fake = FakeNvml(nvml_library, tmp_path / "nvml-control", gpus=2)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return fake

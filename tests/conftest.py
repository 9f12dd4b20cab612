"""Marks: ``gpu`` needs a GPU, ``device`` runs on the GPU where there is one and interpreted elsewhere, ``slow`` is left out
unless WEFT_SLOW is set. ``-m gpu`` on a GPU machine selects the first two."""

from __future__ import annotations

import os

import pytest
from where import DEVICE  # before anything imports a kernel: without a GPU this switches Triton's interpreter on


def pytest_configure(config):
    config.addinivalue_line("markers", "device: runs on the GPU where there is one, else in Triton's interpreter")


@pytest.hookimpl(tryfirst=True)  # before -m selects by mark
def pytest_collection_modifyitems(items):
    for item in items:
        if DEVICE == "cuda" and item.get_closest_marker("device"):
            item.add_marker(pytest.mark.gpu)
        elif DEVICE != "cuda" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU; PyTorch sees none here"))
        if item.get_closest_marker("slow") and not os.environ.get("WEFT_SLOW"):
            item.add_marker(pytest.mark.skip(reason="slow: set WEFT_SLOW=1 to run it"))


@pytest.fixture
def device() -> str:
    return DEVICE

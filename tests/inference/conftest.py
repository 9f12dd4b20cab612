"""On a CPU the operators are PyTorch's, as a user has them; other tests of the same process interpret kernels."""

import os

import pytest

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(autouse=True, scope="module")  # ahead of fixtures that run a model
def _not_interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.operators.call.INTERPRETING", False)
        yield

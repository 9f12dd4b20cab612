"""On a CPU the operators are PyTorch's, as a user has them; other tests of the same process interpret kernels."""

import os

import pytest

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(autouse=True, scope="module")  # ahead of fixtures that run a model
def _not_interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.operators.call.INTERPRETING", False)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny random Llama, and the model of Transformers."""
    import tiny

    path = tmp_path_factory.mktemp("model")
    return path, tiny.folder(path)


@pytest.fixture(scope="module")
def model(folder):
    """The decoder of that folder, float32."""
    import torch

    from weft.inference.checkpoint import Folder
    from weft.inference.config import read_config
    from weft.inference.model import Decoder

    return Decoder(read_config(folder[0]), Folder(folder[0]), torch.device("cpu"), torch.float32)

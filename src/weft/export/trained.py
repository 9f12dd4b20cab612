"""Networks of ``weft train`` from their checkpoints: what they answer, without the loss."""

import json
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from weft.train.checkpoint import META, newest, readable
from weft.train.classifier import Classifier
from weft.train.decoder import Decoder


class Answer(nn.Module):
    """Images ``[B, C, H, W]`` → scores ``[B, K]``, or tokens ``[B, S]`` → logits ``[B, S, V]``, in fp32."""

    def __init__(self, network: Classifier | Decoder) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.network, Classifier):
            return self.network.layers(x).float()
        return self.network.head(self.network.hidden(x)).float()


def load(folder: str | os.PathLike[str]) -> tuple[nn.Module, Tensor, Tensor]:
    """The network of a run's newest checkpoint, or of a checkpoint's folder, and two inputs of different sizes.

    Raises:
        ValueError: there is no complete checkpoint, or it is damaged.
    """
    checkpoint = Path(folder) if Path(folder, META).is_file() else newest(str(folder))
    if checkpoint is None:
        raise ValueError(f"{folder} holds no checkpoint; expected the folder that weft train wrote with --out")
    readable(checkpoint)
    try:
        sizes = json.loads((checkpoint / META).read_text(encoding="utf-8"))["model"]
        job = sizes.pop("job")
        network = (Classifier if job == "cnn" else Decoder)(**sizes, operators="torch")
        state = {"model": network.state_dict()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        network.load_state_dict(state["model"])
    except (dcp.api.CheckpointException, Exception) as error:  # a damaged pickle may raise any
        raise ValueError(f"checkpoint '{checkpoint}' cannot be read: {str(error).partition(chr(10))[0]}") from error
    if job == "cnn":
        images = [torch.rand(batch, sizes["channels"], sizes["size"], sizes["size"]) for batch in (4, 7)]
        return Answer(network), images[0], images[1]
    tokens = [torch.randint(sizes["vocabulary"], shape) for shape in ((2, 24), (3, 17))]
    return Answer(network), tokens[0], tokens[1]

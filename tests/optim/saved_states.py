"""Weights and states of optimizers saved to a file and read back, as a run does that is resumed."""

import io

import torch


def through_a_file(states, weights_only: bool = True):
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def resumed(params, optimizer, made):
    """Parameters and an optimizer out of a file that goes on where this one is.

    Args:
        made: a function of parameters that makes the optimizer into which the state is loaded.
    """
    saved = through_a_file({"optimizer": optimizer.state_dict(), "weights": [p.detach() for p in params]})
    weights = [torch.nn.Parameter(p) for p in saved["weights"]]
    other = made(weights)
    other.load_state_dict(saved["optimizer"])
    return weights, other
